"""No trust region: the importance-weighted policy gradient."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.choices import register_recipe
from groupwise.config.objective import TrustRegionCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Batch, Counts, Tensor


@register_recipe
class UnclippedCfg(TrustRegionCfg):
    """Ratio times advantage."""

    name: Literal["none"] = "none"
    source: ClassVar = "https://arxiv.org/abs/2402.14740"

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-ratio * A``."""
        from groupwise.functional.objective import unclipped_loss

        return unclipped_loss(ratio, batch["advantage"])
