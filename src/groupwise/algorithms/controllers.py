"""What reacts to the metrics of single optimiser steps: early stopping and the learning rate by KL, the entropy bonus."""

import torch
from torch import Tensor

from groupwise.algorithms.optim import Schedule
from groupwise.config.algorithm import AlgorithmCfg, GRPOCfg


class KLController:
    """Ends an update at ``target_kl``, and drives the adaptive learning rate; both by the step's ``approx_kl``."""

    def __init__(self, cfg: AlgorithmCfg, schedule: Schedule) -> None:
        self.limit = None if cfg.target_kl is None else 1.5 * cfg.target_kl
        """Stable-Baselines3's 1.5 times the target."""
        self.schedule = schedule
        self.active = cfg.target_kl is not None or schedule.adaptive

    def should_stop(self, step_metrics: dict[str, Tensor]) -> bool:
        """Whether the step must not be taken, as its KL exceeds the limit; adapts the learning rate."""
        if not self.active:
            return False
        approx_kl = float(step_metrics["approx_kl"])
        self.schedule.adapt(approx_kl)
        return self.limit is not None and approx_kl > self.limit


class EntropyController:
    """The weight of the entropy bonus, constant or led by the measured entropy.

    ``adapt`` changes it after an optimiser step, for the next one: a step's own entropy is known only when all of its
    micro-batches and ranks have been seen. The first step of a run has the bonus.

    Source: Skywork-OR1, https://arxiv.org/abs/2505.22312, sec. 4.
    """

    def __init__(self, cfg: AlgorithmCfg, device: torch.device) -> None:
        self.cfg = cfg.adaptive_entropy if isinstance(cfg, GRPOCfg) else None
        self.adaptive = self.cfg is not None
        self.enabled = self.adaptive or cfg.ent_coef != 0
        self.coef = torch.tensor(cfg.ent_coef, dtype=torch.float32, device=device)
        self.in_force = torch.ones((), device=device)
        """1 or 0."""
        self._bonus: Tensor | float = cfg.ent_coef

    def loss(self, entropy: Tensor) -> Tensor:
        """``-coef * entropy`` of each element while the bonus is in force, else 0."""
        return -self._bonus * entropy

    def adapt(self, step_metrics: dict[str, Tensor]) -> None:
        """Change the weight by the mean entropy of an optimiser step (0-dim, over all ranks)."""
        if self.cfg is None:
            return
        self.in_force = (step_metrics["entropy"] <= self.cfg.target).to(self.coef)
        change = self.cfg.step * (2 * self.in_force - 1)
        self.coef = (self.coef + change).clamp(self.cfg.min_coef, self.cfg.max_coef)
        self._bonus = self.coef * self.in_force

    def metrics(self) -> dict[str, Tensor]:
        """``train/ent_coef``, where it changes."""
        return {"train/ent_coef": self.coef.clone()} if self.adaptive else {}

    def state_dict(self) -> dict[str, float]:
        """Weight and whether it is in force (1 or 0)."""
        return {"coef": float(self.coef), "in_force": float(self.in_force)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a saved ``state_dict``."""
        self.coef = torch.full_like(self.coef, state["coef"])
        self.in_force = torch.full_like(self.in_force, state["in_force"])
        if self.adaptive:
            self._bonus = self.coef * self.in_force
