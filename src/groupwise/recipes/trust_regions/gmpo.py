"""GMPO: the geometric mean over the episode of ratios that are clipped step by step, in the logarithm."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.choices import register_recipe
from groupwise.config.objective import ClippedCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Batch, Counts, Tensor


@register_recipe
class GmpoCfg(ClippedCfg):
    """The geometric mean over the episode of ratios clipped step by step, at exp(-clip_low) and exp(clip_high)."""

    name: Literal["gmpo"] = "gmpo"
    source: ClassVar = "https://arxiv.org/abs/2507.20673"
    needs_ratio: ClassVar = "token"
    whole_episodes: ClassVar = True

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-A * exp(mean of the episode's clipped log-ratios)``."""
        from groupwise.functional.trust_regions import gmpo_loss

        episodes = batch["loss_mask"], batch["episode_id"], counts.episodes
        old, advantage = batch["old_log_prob"], batch["advantage"]
        return gmpo_loss(log_prob, old, advantage, *episodes, self.clip_low, self.clip_high)
