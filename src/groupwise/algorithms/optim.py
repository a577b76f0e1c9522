"""Optimisers and learning-rate schedules from their settings."""

import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.config.algorithm import AlgorithmCfg, ScheduleCfg
from groupwise.errors import ConfigError

FLAT_LIMIT = 2**20
"""Elements; up to here a policy's parameters are laid end to end."""


class Trained:
    """The parameters that an optimiser moves; those of a small network laid end to end in one vector.

    With a dozen small tensors clipping and stepping are nearly all dispatch; as one vector they take 0.6 of the time
    (benchmarks/README.md). Parameters become views of the vector, and their gathered gradients views of its gradient;
    nothing else about them changes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.tensors = self.parameters
        """What the optimiser, the clipping and the exchange between processes handle."""
        kinds = {(p.dtype, p.device, p.layout, type(p.data)) for p in self.parameters}
        self.is_flat = len(kinds) == 1 and sum(p.numel() for p in self.parameters) <= FLAT_LIMIT
        """Whether they are one vector."""
        if self.is_flat:
            self._lay_end_to_end()

    def zero_grad(self) -> None:
        """Forget the gradients.

        Raises:
            ConfigError: the parameters are no longer those that the algorithm was built with.
        """
        for parameter in (*self.parameters, *self.tensors):
            parameter.grad = None
        self._check_views()

    @torch.no_grad()
    def gather_grad(self) -> None:
        """Bring what backward passes left, in the parameters and in ``tensors`` themselves, to ``tensors``.

        In the vector an absent gradient is 0.
        """
        if not self.is_flat:
            return
        vector, views = self.tensors[0], self._views
        own = [(p.grad, view) for p, view in zip(self.parameters, views, strict=True) if p.grad is not None]
        if vector.grad is None and len(own) == len(views):
            torch.cat([grad.flatten() for grad, _ in own], out=self._gradient)
        else:
            self._gradient.zero_() if vector.grad is None else self._gradient.copy_(vector.grad)
            for grad, view in own:
                view.add_(grad)
        self._show_grad()

    def put_grad(self, gradient: Tensor, *, add: bool) -> None:
        """Take the vector's gradient as it is, in place of backward passes and ``gather_grad``.

        Args:
            add: to the gradient that is there, which else is replaced.

        Raises:
            ConfigError: the parameters are no longer those that the algorithm was built with.
        """
        self._check_views()
        if add:
            self._gradient.add_(gradient)
        else:
            self._gradient.copy_(gradient)
        if self.tensors[0].grad is not self._gradient:
            self._show_grad()

    def gather_if_due(self) -> None:
        """``gather_grad``, unless that was done since ``zero_grad``."""
        if self.tensors[0].grad is None:
            self.gather_grad()

    def clip_grad(self, limit: float) -> Tensor:
        """Scale the gradient down to the norm ``limit``; returns the norm before.

        It is ``torch.nn.utils.clip_grad_norm_``, of one vector in a third of its time.
        """
        if not self.is_flat:
            return torch.nn.utils.clip_grad_norm_(self.tensors, limit)
        norm: Tensor = torch.linalg.vector_norm(self._gradient)
        if limit != math.inf:
            self._gradient.mul_((norm + 1e-6).reciprocal_().mul_(limit).clamp_(max=1.0))
        return norm

    def _check_views(self) -> None:
        if self.is_flat and self.parameters[0].data_ptr() != self.tensors[0].data_ptr():
            raise ConfigError("the policy was moved or converted after the algorithm was built; fix: do it before")

    def _show_grad(self) -> None:
        """Where everybody looks for gradients."""
        self.tensors[0].grad = self._gradient
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def _lay_end_to_end(self) -> None:
        vector = nn.Parameter(torch.cat([p.detach().flatten() for p in self.parameters]))
        sizes = [p.numel() for p in self.parameters]
        for parameter, part in zip(self.parameters, torch.split(vector.detach(), sizes), strict=True):
            parameter.data = part.view_as(parameter)
        self._gradient = torch.zeros_like(vector, requires_grad=False)
        views = zip(self.parameters, torch.split(self._gradient, sizes), strict=True)
        self._views = [part.view_as(parameter) for parameter, part in views]
        self.tensors = [vector]


class FlatAdam:
    """``torch.optim.Adam(fused=True)`` of one vector, with its attributes, state and step, without what stands around them.

    Hooks, profiler scopes and sorting tensors by kind take longer than the step of a small vector, so the operation is called
    as it is; and the first ``torch.optim.Optimizer`` that is made imports the compiler: a second (``docs/performance.md``).
    """

    def __init__(
        self,
        trained: Trained,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled_weight_decay: bool,
    ) -> None:
        self._trained = trained
        self.param_groups: list[dict[str, Any]] = [
            {
                "params": [*trained.tensors],
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "decoupled_weight_decay": decoupled_weight_decay,
            }
        ]
        self.state: dict[str, Tensor] = {}

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._trained.zero_grad()

    def step(self, taken: Tensor | None = None) -> None:
        """One step along the gradient, which is gathered first if it was not yet.

        Args:
            taken: 0-dim float32; where it is 0 nothing changes. None: 1.

        Source: Kingma, Ba 2015, https://arxiv.org/abs/1412.6980, algorithm 1; decoupled weight decay: Loshchilov, Hutter
        2019, https://arxiv.org/abs/1711.05101.
        """
        self._trained.gather_if_due()
        group = self.param_groups[0]
        parameter = group["params"][0]
        vector = parameter.detach()  # without gradient there is no mode of autograd to switch
        if not self.state:
            moments = {name: torch.zeros_like(vector) for name in ("exp_avg", "exp_avg_sq")}
            self.state = {"step": torch.zeros((), device=vector.device), **moments}
        state = self.state
        beta1, beta2 = group["betas"]
        move = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
        state["step"].add_(1 if taken is None else taken)
        move(
            [vector],
            [parameter.grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            amsgrad=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            grad_scale=None,
            found_inf=None if taken is None else 1 - taken,
        )

    def state_dict(self) -> dict[str, Any]:
        """Laid out as that of ``torch.optim.Adam``."""
        state = {0: dict(self.state)} if self.state else {}
        plain = {"params": [0], "lr": float(self.param_groups[0]["lr"])}
        return {"state": state, "param_groups": [self.param_groups[0] | plain]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved ``state_dict``."""
        group = self.param_groups[0]
        vector = group["params"][0]
        group.update(state["param_groups"][0] | {"params": [vector]})
        saved = state["state"].get(0, {})
        self.state = {name: value.to(vector.device, copy=True) for name, value in saved.items()}


class _OfVector(torch.optim.Optimizer):
    """An optimiser of a vector that may also be used as one of the parameters: in a loop of zero_grad, backward, step."""

    trained: Trained

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        self.trained.zero_grad()

    def step(self, closure: Any = None) -> Any:
        """One step along the gradient, which is gathered first if it was not yet."""
        self.trained.gather_if_due()
        return super().step(closure)


class _VectorSGD(_OfVector, torch.optim.SGD):
    pass


class _VectorRMSprop(_OfVector, torch.optim.RMSprop):
    pass


Optimizer: TypeAlias = torch.optim.Optimizer | FlatAdam
"""What moves the parameters."""


def build_optimizer(cfg: AlgorithmCfg, trained: Trained) -> Optimizer:
    """The optimiser that ``cfg.optimizer`` describes, at ``cfg.learning_rate``."""
    choice = cfg.optimizer
    settings: dict[str, Any] = {"lr": cfg.learning_rate, "weight_decay": choice.weight_decay}
    if choice.name in ("adam", "adamw"):
        settings |= {
            "betas": choice.betas,
            "eps": choice.eps,
            "decoupled_weight_decay": choice.name == "adamw",
        }
        return (
            FlatAdam(trained, **settings)
            if trained.is_flat
            else torch.optim.Adam(trained.tensors, fused=True, **settings)
        )
    settings["momentum"] = choice.momentum
    if choice.name == "rmsprop":
        settings["eps"] = choice.eps
        if not trained.is_flat:
            return torch.optim.RMSprop(trained.tensors, **settings)
        optimizer: _OfVector = _VectorRMSprop(trained.tensors, **settings)
    else:
        if not trained.is_flat:
            return torch.optim.SGD(trained.tensors, **settings)
        optimizer = _VectorSGD(trained.tensors, **settings)
    optimizer.trained = trained
    return optimizer


class Schedule:
    """Drives an optimiser's learning rate by the progress of training, or by the measured KL."""

    def __init__(self, cfg: ScheduleCfg, optimizer: Optimizer, learning_rate: float) -> None:
        self.cfg = cfg
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self._factor: float | Tensor = 1.0
        self._rate: float | Tensor = learning_rate

    def stay_on(self, device: torch.device) -> None:
        """Keep the rate in a tensor there from now on, which the optimiser reads."""
        self._factor = torch.full((), self.factor, dtype=torch.float64, device=device)
        self._rate = torch.full((), self.rate, dtype=torch.float32, device=device)
        self._apply(self.factor)

    def set_progress(self, progress: float) -> None:
        """Set the rate for a share of training done, in [0, 1]."""
        if self.cfg.name != "adaptive_kl":
            self._apply(schedule_factor(self.cfg, progress))

    def adapt(self, kl: float) -> None:
        """``adaptive_kl``: lower the rate when the policy moves too fast, raise it when it hardly moves.

        Source: the rule of rsl_rl's PPO, factors 1.5 beyond [desired / 2, desired * 2].
        """
        factor = torch.tensor(self.factor, dtype=torch.float64)
        self._apply(float(self._adapted(factor, torch.tensor(kl, dtype=torch.float64))))

    @torch.no_grad()
    def adapt_in_place(self, kl: Float[Tensor, ""], taken: Float[Tensor, ""]) -> None:
        """``adapt`` where ``taken`` is 1, without waiting for the device; after ``stay_on``."""
        assert isinstance(self._factor, Tensor)
        assert isinstance(self._rate, Tensor)
        self._factor.copy_(torch.where(taken > 0, self._adapted(self._factor, kl.double()), self._factor))
        self._rate.copy_(self.learning_rate * self._factor)

    @property
    def factor(self) -> float:
        """The rate now, as a share of ``learning_rate``."""
        return float(self._factor)

    @property
    def rate(self) -> float:
        """The learning rate now."""
        return self.learning_rate * self.factor

    def measured(self, device: torch.device) -> Float[Tensor, ""]:
        """The learning rate now, for the log."""
        if isinstance(self._factor, Tensor):
            return self.learning_rate * self._factor
        return torch.full((), self.rate, dtype=torch.float64, device=device)

    def _adapted(self, factor: Float[Tensor, ""], kl: Float[Tensor, ""]) -> Float[Tensor, ""]:
        cfg = self.cfg
        slower, faster = (factor / 1.5).clamp(min=cfg.min_factor), (factor * 1.5).clamp(max=cfg.max_factor)
        hardly = (kl > 0) & (kl < cfg.desired_kl / 2)
        return torch.where(kl > 2 * cfg.desired_kl, slower, torch.where(hardly, faster, factor))

    def _apply(self, factor: float) -> None:
        if isinstance(self._factor, Tensor) and isinstance(self._rate, Tensor):
            self._factor.fill_(factor)
            self._rate.fill_(self.learning_rate * factor)
        else:
            self._factor, self._rate = factor, self.learning_rate * factor
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate

    def state_dict(self) -> dict[str, float]:
        """The factor in force."""
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Put a saved factor in force."""
        self._apply(state["factor"])


def schedule_factor(cfg: ScheduleCfg, progress: float) -> float:
    """Share of the learning rate at a share ``progress`` of training."""
    match cfg.name:
        case "linear":
            return 1 - progress * (1 - cfg.final)
        case "cosine":
            return cfg.final + (1 - cfg.final) * (1 + math.cos(math.pi * progress)) / 2
        case "step":
            # the tolerance keeps 0.75 / 0.25 at 3 whatever the rounding
            return cfg.decay ** math.floor(progress / cfg.interval + 1e-9)
        case "exponential":
            return float(cfg.decay ** (progress / cfg.interval))
        case _:
            return 1.0
