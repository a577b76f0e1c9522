"""Optimisers and learning-rate schedules from their settings."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.config.algorithm import AlgorithmCfg, ScheduleCfg


def build_optimizer(cfg: AlgorithmCfg, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser that ``cfg.optimizer`` describes, at ``cfg.learning_rate``."""
    choice = cfg.optimizer
    settings: dict[str, Any] = {"lr": cfg.learning_rate, "weight_decay": choice.weight_decay}
    match choice.name:
        case "adam" | "adamw":
            decoupled = choice.name == "adamw"
            settings |= {"betas": choice.betas, "eps": choice.eps, "decoupled_weight_decay": decoupled}
            return torch.optim.Adam(parameters, fused=True, **settings)
        case "rmsprop":
            return torch.optim.RMSprop(parameters, momentum=choice.momentum, eps=choice.eps, **settings)
        case "sgd":
            return torch.optim.SGD(parameters, momentum=choice.momentum, **settings)


class Schedule:
    """Drives an optimiser's learning rate by the progress of training, or by the measured KL."""

    def __init__(self, cfg: ScheduleCfg, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
        self.cfg = cfg
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.factor = 1.0
        """The rate in force, as a share of ``learning_rate``."""
        self.adaptive = cfg.name == "adaptive_kl"

    def set_progress(self, progress: float) -> None:
        """Set the rate for a share of training done, in [0, 1]."""
        if not self.adaptive:
            self._apply(schedule_factor(self.cfg, progress))

    def adapt(self, kl: float) -> None:
        """``adaptive_kl``: lower the rate when the policy moves too fast, raise it when it hardly moves.

        Source: the rule of rsl_rl's PPO, factors 1.5 beyond [desired / 2, desired * 2].
        """
        if not self.adaptive:
            return
        if kl > 2 * self.cfg.desired_kl:
            self._apply(max(self.factor / 1.5, self.cfg.min_factor))
        elif 0 < kl < self.cfg.desired_kl / 2:
            self._apply(min(self.factor * 1.5, self.cfg.max_factor))

    @property
    def rate(self) -> float:
        """The learning rate now."""
        return self.learning_rate * self.factor

    def metrics(self) -> dict[str, Tensor]:
        """``train/learning_rate``."""
        return {"train/learning_rate": torch.tensor(self.rate, dtype=torch.float64)}

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
