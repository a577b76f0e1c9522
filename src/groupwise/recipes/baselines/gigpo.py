"""GiGPO: the group's mean, and a second advantage among steps of the group with the same observation."""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.base import NonNegative
from groupwise.config.choices import register_recipe
from groupwise.config.credit import BaselineCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import CreditInput, Tensor


@register_recipe
class GigpoCfg(BaselineCfg):
    """The mean, and a second comparison of steps with the same observation (GiGPO)."""

    name: Literal["gigpo"] = "gigpo"
    weight: NonNegative = 1.0
    """Weight of the second advantage, the paper's omega."""
    source: ClassVar = "https://arxiv.org/abs/2505.10978"

    def advantage(self, credit: "CreditInput", compare: "Callable[[CreditInput], Tensor]") -> "Tensor":
        """The group's comparison, plus ``weight`` times that of discounted returns at the same observation.

        As in the paper (eq. 5 to 7), that includes the episode's own visits. A unique observation adds 0.
        """
        from groupwise.algorithms.advantages import Scores
        from groupwise.functional.returns import return_to_go
        from groupwise.recipes.anchors import anchors

        key, num_keys = anchors(credit.batch["obs"], credit.batch["group_id"], credit.live)
        score = return_to_go(credit.reward, credit.done, credit.gamma)
        return compare(credit) + self.weight * Scores(credit, score, key, num_keys, credit.live).relative()
