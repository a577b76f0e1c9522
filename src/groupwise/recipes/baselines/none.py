"""REINFORCE++: no baseline but the mean of the whole batch, which is whitened."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.choices import register_recipe
from groupwise.config.credit import BaselineCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Scores, Tensor


@register_recipe
class NoBaselineCfg(BaselineCfg):
    """Nothing; the batch is whitened instead (REINFORCE++)."""

    name: Literal["none"] = "none"
    source: ClassVar = "https://arxiv.org/abs/2501.03262"
    needs: ClassVar = {"group_key": ("group",), "scale": ("none",), "normalize": ("batch",)}
    within_group: ClassVar = False

    def of_episodes(self, scores: "Scores") -> "Tensor":
        """The scores."""
        return scores.score

    of_steps = of_episodes
