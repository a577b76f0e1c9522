"""VESPO: a policy gradient whose weight fades on both sides of the episode's ratio 1."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.base import NonNegative
from groupwise.config.choices import register_recipe
from groupwise.config.objective import TrustRegionCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Batch, Counts, Tensor


@register_recipe
class VespoCfg(TrustRegionCfg):
    """A policy gradient with weight ``w^power * exp(decay * (1 - w))``, w the episode's ratio."""

    name: Literal["vespo"] = "vespo"
    positive_power: NonNegative = 2.0
    """Power k at advantage 0 and above."""
    positive_decay: NonNegative = 3.0
    """Decay lambda at advantage 0 and above."""
    negative_power: NonNegative = 3.0
    """Power k at negative advantage."""
    negative_decay: NonNegative = 2.0
    """Decay lambda at negative advantage."""
    source: ClassVar = "https://arxiv.org/abs/2602.10693"
    needs_ratio: ClassVar = "sequence_product"

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-sg(w^k exp(lambda (1 - w))) * A * log_prob``."""
        from groupwise.functional.trust_regions import vespo_loss

        positive = self.positive_power, self.positive_decay
        negative = self.negative_power, self.negative_decay
        return vespo_loss(log_prob, ratio, batch["advantage"], positive=positive, negative=negative)
