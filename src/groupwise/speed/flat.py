"""The parameters of a small network as one vector, and Adam on it."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

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
