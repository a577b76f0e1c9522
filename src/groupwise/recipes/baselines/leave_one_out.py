"""RLOO: each member against the mean of the others."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.choices import register_recipe
from groupwise.config.credit import BaselineCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Scores, Tensor


@register_recipe
class LeaveOneOutCfg(BaselineCfg):
    """The mean of the others."""

    name: Literal["leave_one_out"] = "leave_one_out"
    source: ClassVar = "https://arxiv.org/abs/2402.14740"

    def of_episodes(self, scores: "Scores") -> "Tensor":
        """``score - (sum - score) / (n - 1)``."""
        return scores.relative("leave_one_out")

    of_steps = of_episodes
