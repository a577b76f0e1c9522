"""OPO: the group's mean weighted by the episodes' lengths."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.choices import register_recipe
from groupwise.config.credit import BaselineCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Scores, Tensor


@register_recipe
class LengthWeightedCfg(BaselineCfg):
    """The mean weighted by the episodes' lengths (OPO)."""

    name: Literal["length_weighted"] = "length_weighted"
    source: ClassVar = "https://arxiv.org/abs/2505.23585"
    needs: ClassVar = {"returns": ("outcome",)}

    def of_episodes(self, scores: "Scores") -> "Tensor":
        """``score - sum(length * score) / sum(length)``."""
        from groupwise.functional.reduce import segment_sum

        batch, reward = scores.credit.batch, scores.credit.reward
        length = segment_sum(batch["loss_mask"].to(reward), batch["episode_id"], scores.credit.num_episodes)
        return scores.relative(weight=length)
