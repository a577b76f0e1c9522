"""Pass@k: only the best of a group learns, by what it is above the second best."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.choices import register_recipe
from groupwise.config.credit import BaselineCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Scores, Tensor


@register_recipe
class SecondBestCfg(BaselineCfg):
    """The second best, for the best only (Pass@k)."""

    name: Literal["second_best"] = "second_best"
    source: ClassVar = "https://arxiv.org/abs/2503.19595"
    needs: ClassVar = {"returns": ("outcome",)}

    def of_episodes(self, scores: "Scores") -> "Tensor":
        """What the best is above the second best, 0 for all others."""
        return scores.relative("second_best")
