"""The weight of the entropy bonus."""

import torch
from torch import Tensor

from groupwise.config.algorithm import AlgorithmCfg, GRPOCfg


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
        """``-coef * entropy`` of each element while the bonus is on, else 0."""
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
        """Weight, and whether the bonus is on (1 or 0)."""
        return {"coef": float(self.coef), "in_force": float(self.in_force)}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a saved ``state_dict``."""
        self.coef = torch.full_like(self.coef, state["coef"])
        self.in_force = torch.full_like(self.in_force, state["in_force"])
        if self.adaptive:
            self._bonus = self.coef * self.in_force
