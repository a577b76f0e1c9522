"""Optimisers and learning-rate schedules from their settings."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from groupwise.algorithms.configs import AlgorithmCfg, ScheduleCfg
from groupwise.errors import ConfigError

FLAT_LIMIT = 2**20
"""Elements; up to here a policy's parameters are laid end to end."""


class Trained:
    """The parameters that an optimiser moves; those of a small network laid end to end in one vector.

    With a dozen small tensors clipping and stepping are nearly all dispatch; as one vector they take 0.6 of the time, and
    a whole minibatch 0.93 to 0.96 (benchmarks/README.md). Parameters and gradients become views of the vector and its
    gradient; nothing else about them changes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.tensors = self.parameters
        """What the optimiser, the clipping and the exchange between processes handle."""
        self._views: list[Tensor] = []
        kinds = {(p.dtype, p.device, p.layout, type(p.data)) for p in self.parameters}
        if len(kinds) == 1 and sum(p.numel() for p in self.parameters) <= FLAT_LIMIT:
            self._lay_end_to_end()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        if not self._views:
            for parameter in self.parameters:
                parameter.grad = None
            return
        if self.parameters[0].data_ptr() != self.tensors[0].data_ptr():
            raise ConfigError("the policy was moved or converted after the algorithm was built; mend: do it before")
        self.tensors[0].grad = self._gradient.zero_()
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view

    def _lay_end_to_end(self) -> None:
        vector = nn.Parameter(torch.cat([p.detach().flatten() for p in self.parameters]))
        self._gradient = torch.zeros_like(vector, requires_grad=False)
        sizes = [p.numel() for p in self.parameters]
        for parameter, part in zip(self.parameters, torch.split(vector.detach(), sizes), strict=True):
            parameter.data = part.view_as(parameter)
        views = zip(self.parameters, torch.split(self._gradient, sizes), strict=True)
        self._views = [part.view_as(parameter) for parameter, part in views]
        self.tensors = [vector]


def build_optimizer(cfg: AlgorithmCfg, tensors: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser that ``cfg.optimizer`` describes, at ``cfg.learning_rate``."""
    trainable = list(tensors)
    choice, rate = cfg.optimizer, cfg.learning_rate
    match choice.name:
        case "adam" | "adamw":
            cls = torch.optim.Adam if choice.name == "adam" else torch.optim.AdamW
            return cls(
                trainable, lr=rate, betas=choice.betas, eps=choice.eps, weight_decay=choice.weight_decay, fused=True
            )
        case "sgd":
            return torch.optim.SGD(trainable, lr=rate, momentum=choice.momentum, weight_decay=choice.weight_decay)
        case "rmsprop":
            return torch.optim.RMSprop(
                trainable, lr=rate, eps=choice.eps, momentum=choice.momentum, weight_decay=choice.weight_decay
            )


class Schedule:
    """Drives an optimiser's learning rate by the progress of training, or by the measured KL."""

    def __init__(self, cfg: ScheduleCfg, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
        self.cfg = cfg
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.factor = 1.0

    def set_progress(self, progress: float) -> None:
        """Set the rate for a share of training done, in [0, 1]."""
        if self.cfg.name != "adaptive_kl":
            self._apply(schedule_factor(self.cfg, progress))

    def adapt(self, kl: float) -> None:
        """``adaptive_kl``: lower the rate when the policy moves too fast, raise it when it hardly moves.

        Source: the rule of rsl_rl's PPO, factors 1.5 beyond [desired / 2, desired * 2].
        """
        if kl > 2 * self.cfg.desired_kl:
            self._apply(max(self.factor / 1.5, self.cfg.min_factor))
        elif 0 < kl < self.cfg.desired_kl / 2:
            self._apply(min(self.factor * 1.5, self.cfg.max_factor))

    @property
    def rate(self) -> float:
        """The learning rate now."""
        return self.learning_rate * self.factor

    def _apply(self, factor: float) -> None:
        self.factor = factor
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate

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
