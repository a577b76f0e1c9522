"""SAPO: a smooth gate in place of the clip."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.base import Positive
from groupwise.config.choices import register_recipe
from groupwise.config.objective import TrustRegionCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Batch, Counts, Tensor


@register_recipe
class SapoCfg(TrustRegionCfg):
    """A gradient that fades smoothly on both sides of ratio 1."""

    name: Literal["sapo"] = "sapo"
    positive: Positive = 1.0
    """Temperature at positive advantage: how fast an action loses influence as its ratio leaves 1."""
    negative: Positive = 1.05
    """Temperature at negative advantage; higher, so that these actions lose it sooner."""
    source: ClassVar = "https://arxiv.org/abs/2511.20347"

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-(4 / tau) sigmoid(tau (ratio - 1)) * A``."""
        from groupwise.functional.trust_regions import sapo_loss

        return sapo_loss(ratio, batch["advantage"], self.positive, self.negative)
