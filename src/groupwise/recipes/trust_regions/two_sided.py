"""The clip, with a ratio that counts as at most ``delta`` at negative advantage, too."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt
from pydantic import model_validator

from groupwise.config.choices import register_recipe
from groupwise.config.objective import ClippedCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Batch, Counts, Tensor


@register_recipe
class TwoSidedCfg(ClippedCfg):
    """The ratio also bounded at negative advantage (INTELLECT-2)."""

    name: Literal["two_sided"] = "two_sided"
    delta: Annotated[float, Gt(1)] = 4.0
    """Bound of the ratio, above 1 + clip_high."""
    source: ClassVar = "https://arxiv.org/abs/2505.07291"

    @model_validator(mode="after")
    def _check_delta(self) -> "TwoSidedCfg":
        if self.delta <= 1 + self.clip_high:
            enough = max(4.0, 2 + self.clip_high)
            raise ValueError(
                f"delta={self.delta} must exceed 1 + clip_high = {1 + self.clip_high}; fix: delta={enough}"
            )
        return self

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-min(min(ratio, delta) * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``."""
        from groupwise.functional.trust_regions import two_sided_loss

        return two_sided_loss(ratio, batch["advantage"], self.clip_low, self.clip_high, self.delta)
