"""Optimisers and learning-rate schedules from their settings."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.config.algorithm import (
    AdamCfg,
    AdamWCfg,
    AdaptiveKLCfg,
    AlgorithmCfg,
    CosineCfg,
    ExponentialCfg,
    LinearCfg,
    RMSpropCfg,
    ScheduleCfg,
    SGDCfg,
    StepCfg,
)
from groupwise.errors import ConfigError


def build_optimizer(cfg: AlgorithmCfg, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser that ``cfg.optimizer`` describes, at ``cfg.learning_rate``."""
    chosen = cfg.optimizer
    settings: dict[str, Any] = {"lr": cfg.learning_rate, **chosen.model_dump(exclude={"name"})}
    match chosen:
        case AdamCfg():
            decoupled = isinstance(chosen, AdamWCfg)
            return torch.optim.Adam(parameters, fused=True, decoupled_weight_decay=decoupled, **settings)
        case RMSpropCfg():
            return torch.optim.RMSprop(parameters, **settings)
        case SGDCfg():
            return torch.optim.SGD(parameters, **settings)
        case _:
            raise ConfigError(f"optimizer={chosen.name!r} is not one of torch's; fix: override build_optimizer")


class Schedule:
    """Drives an optimiser's learning rate by the progress of training, or by the measured KL."""

    def __init__(self, cfg: ScheduleCfg, optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
        self.cfg = cfg
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.factor = 1.0
        """The current rate, as a share of ``learning_rate``."""
        self.adaptive = isinstance(cfg, AdaptiveKLCfg)

    def set_progress(self, progress: float, budget: int | float = 1, step: float = 0.0) -> None:
        """Set the rate of the next update, as ``schedule_factor`` has it."""
        if not self.adaptive:
            self._apply(schedule_factor(self.cfg, progress, budget, step))

    def adapt(self, step_metrics: Mapping[str, Tensor]) -> None:
        """``adaptive_kl``: by an optimiser step's ``approx_kl``, lower the rate when the policy moves too fast, raise it when it hardly moves.

        Source: the rule of rsl_rl's PPO, factors 1.5 beyond [desired / 2, desired * 2].
        """
        cfg = self.cfg
        if not isinstance(cfg, AdaptiveKLCfg):
            return
        kl = float(step_metrics["approx_kl"])
        if kl > 2 * cfg.desired_kl:
            self._apply(max(self.factor / 1.5, cfg.min_factor))
        elif 0 < kl < cfg.desired_kl / 2:
            self._apply(min(self.factor * 1.5, cfg.max_factor))

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
        """The current factor."""
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a saved factor."""
        self._apply(state["factor"])


def schedule_factor(cfg: ScheduleCfg, progress: float, budget: int | float = 1, step: float = 0.0) -> float:
    """Share of the learning rate for an update that begins at a share ``progress`` of training.

    Args:
        budget: all of training, in the unit of a ``warmup`` that is no share.
        step: share of training that the update takes. The warm-up counts it, so that its first update has a rate, too; with 0 it is that of
            transformers.
    """
    if isinstance(cfg, LinearCfg) and cfg.warmup:
        warmup = cfg.warmup if cfg.warmup < 1 else cfg.warmup / budget
        if warmup >= 1:
            raise ConfigError(
                f"schedule.warmup={cfg.warmup} is all of a budget of {budget:g}; fix: less, or a larger budget"
            )
        if progress < warmup:
            return min((progress + step) / warmup, 1.0)
        progress = (progress - warmup) / (1 - warmup)
    match cfg:
        case CosineCfg():
            return cfg.final + (1 - cfg.final) * (1 + math.cos(math.pi * progress)) / 2
        case LinearCfg():
            return 1 - progress * (1 - cfg.final)
        case ExponentialCfg():
            return float(cfg.decay ** (progress / cfg.interval))
        case StepCfg():  # the tolerance keeps 0.75 / 0.25 at 3 whatever the rounding
            return cfg.decay ** math.floor(progress / cfg.interval + 1e-9)
        case _:
            return 1.0
