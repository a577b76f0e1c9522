"""REINFORCE: log-probability times advantage, without ratio; for a single pass over fresh data."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.choices import register_recipe
from groupwise.config.objective import TrustRegionCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Batch, Counts, Tensor


@register_recipe
class ReinforceCfg(TrustRegionCfg):
    """Log-probability times advantage, without ratio."""

    name: Literal["reinforce"] = "reinforce"
    source: ClassVar = "https://arxiv.org/abs/2504.02546"

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-log_prob * A``."""
        from groupwise.functional.trust_regions import reinforce_loss

        return reinforce_loss(log_prob, batch["advantage"])
