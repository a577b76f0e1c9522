"""Clip-Cov: a few random steps with a high covariance of advantage and log-probability have no gradient, to keep entropy."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from groupwise.config.base import Fraction
from groupwise.config.choices import register_recipe
from groupwise.config.objective import ClippedCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Batch, Counts, Tensor, UpdateStart


@register_recipe
class ClipCovCfg(ClippedCfg):
    """The clip, without a few random steps of high covariance."""

    name: Literal["clip_cov"] = "clip_cov"
    fraction: Fraction = 2e-4
    """Share of the rollout's steps that are left out, at least one."""
    low: float = 1.0
    """They are drawn from the steps whose ``(A - mean A)(log_prob - mean log_prob)`` is above this."""
    high: float = 5.0
    """And below this."""
    source: ClassVar = "https://arxiv.org/abs/2505.22617"
    needs_old_log_prob: ClassVar = True

    @model_validator(mode="after")
    def _check(self) -> "ClipCovCfg":
        if self.low >= self.high:
            raise ValueError(f"got low={self.low} and high={self.high}; expected low < high, fix: 1 and 5")
        return self

    def at_start(self, start: "UpdateStart") -> "dict[str, Tensor]":
        """A factor 0 for the steps that are left out."""
        from groupwise.functional import selection

        together = selection.covariance(start.old_log_prob, start.advantage, start.mask, start.all_sum)
        candidate = (together > self.low) & (together < self.high) & start.mask
        batch = start.batch
        noise = selection.element_noise(start.seed, batch["sample_log_prob"], start.advantage, batch["step"])
        masked = selection.random_fraction(noise, self.fraction, candidate, start.mask, start.all_sum)
        return {"policy_factor": (~masked).to(start.old_log_prob)}

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """PPO's clipped loss."""
        from groupwise.functional.objective import clip_loss

        return clip_loss(ratio, batch["advantage"], self.clip_low, self.clip_high)
