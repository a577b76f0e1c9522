"""MIS: masked importance sampling; of single steps IcePop."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from groupwise.config.base import NonNegative, Positive
from groupwise.config.choices import register_recipe
from groupwise.config.objective import MaskCorrectionCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Tensor, UpdateStart


@register_recipe
class MisCfg(MaskCorrectionCfg):
    """The weight ``exp(old_log_prob - sample_log_prob)``, 0 outside ``[low, high]``."""

    name: Literal["mis"] = "mis"
    level: Literal["token", "sequence"] = "token"
    """Weight of each step, or the product over its episode."""
    low: NonNegative | None = None
    """Least weight that counts (IcePop, AgileRL: 0.5). None: no lower bound."""
    high: Positive = 3.0
    """Greatest weight that counts. Default: TRL's (AgileRL: 5)."""
    source: ClassVar = "https://arxiv.org/abs/2510.18855"
    reweights: ClassVar = True

    @model_validator(mode="after")
    def _check(self) -> "MisCfg":
        if self.low is not None and self.low >= self.high:
            raise ValueError(f"got low={self.low} and high={self.high}; expected low < high, fix: 0.5 and 5")
        return self

    def factor(self, start: "UpdateStart") -> "Tensor":
        """Weight of each step's policy loss."""
        from groupwise.functional.correction import masked
        from groupwise.recipes.corrections.tis import importance_weight

        return masked(importance_weight(self.level, start), self.low, self.high)
