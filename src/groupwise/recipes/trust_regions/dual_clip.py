"""The clip, also bounded at negative advantage: however large the ratio, the loss is at most ``bound`` times it."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt

from groupwise.config.choices import register_recipe
from groupwise.config.objective import ClippedCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Batch, Counts, Tensor


@register_recipe
class DualClipCfg(ClippedCfg):
    """The clip, also bounded at negative advantage."""

    name: Literal["dual_clip"] = "dual_clip"
    bound: Annotated[float, Gt(1)] = 3.0
    """The loss is at most this many times the negative advantage. Default: verl's ``clip_ratio_c``."""
    source: ClassVar = "https://arxiv.org/abs/1912.09729"

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``min(clip_loss, -bound * A)`` at negative advantage, else ``clip_loss``."""
        from groupwise.functional.objective import dual_clip_loss

        return dual_clip_loss(ratio, batch["advantage"], self.clip_low, self.clip_high, self.bound)
