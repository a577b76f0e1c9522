"""CISPO: a policy gradient whose weight, the ratio, is clipped; no step loses its gradient."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from groupwise.config.base import NonNegative, Positive
from groupwise.config.choices import register_recipe
from groupwise.config.objective import TrustRegionCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Batch, Counts, Tensor


@register_recipe
class CispoCfg(TrustRegionCfg):
    """A policy gradient whose weight, the ratio, is clipped."""

    name: Literal["cispo"] = "cispo"
    low: NonNegative | None = None
    """Least weight, absolute. None: no lower bound (TRL, AgileRL; verl: 1 - its clip, so 0.8)."""
    high: Positive | None = 5.0
    """Greatest weight, absolute. Default: ScaleRL's, which TRL names (verl and AgileRL: 1.2). None: no upper bound."""
    source: ClassVar = "https://arxiv.org/abs/2506.13585"

    @model_validator(mode="after")
    def _check(self) -> "CispoCfg":
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"got low={self.low} and high={self.high}; expected low < high, fix: 0.8 and 1.2")
        return self

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-sg(clip(ratio, low, high)) * A * log_prob``."""
        from groupwise.functional.trust_regions import cispo_loss

        return cispo_loss(log_prob, ratio, batch["advantage"], self.low, self.high)
