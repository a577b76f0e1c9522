"""k nearest neighbours: values from the returns of the nearest states in other episodes, in place of a critic.

The values are those of the paper, the advantages PPO's. The combination is not from a paper.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.base import Fraction, PositiveInt
from groupwise.config.choices import register_recipe
from groupwise.config.credit import BaselineCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import CreditInput, Tensor


@register_recipe
class KnnCfg(BaselineCfg):
    """The mean of returns from the nearest states of other episodes, with generalised advantages."""

    name: Literal["knn"] = "knn"
    k: PositiveInt = 16
    """Number of neighbours. Fewer: less bias; more: less variance."""
    gae_lambda: Fraction = 0.95
    """Lambda of the generalised advantage estimate, as in PPO. 1: returns, without bootstrapping from values."""
    source: ClassVar = "https://arxiv.org/abs/1606.04460"
    within_group: ClassVar = False
    needs: ClassVar = {
        "returns": ("return_to_go",),
        "group_key": ("group",),
        "scale": ("none",),
        "reward": ("total",),
    }

    def advantage(self, credit: "CreditInput", compare: "Callable[[CreditInput], Tensor]") -> "Tensor":
        """Generalised advantage estimate of each step."""
        from groupwise.recipes.knn_values import knn_advantage

        return knn_advantage(credit, self.k, self.gae_lambda)
