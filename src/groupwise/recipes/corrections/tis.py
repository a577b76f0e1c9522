"""TIS: truncated importance sampling."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.base import Positive
from groupwise.config.choices import register_recipe
from groupwise.config.objective import MaskCorrectionCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Tensor, UpdateStart


@register_recipe
class TisCfg(MaskCorrectionCfg):
    """The weight ``exp(old_log_prob - sample_log_prob)``, at most ``high``."""

    name: Literal["tis"] = "tis"
    level: Literal["token", "sequence"] = "token"
    """Weight of each step, or the product over its episode."""
    high: Positive = 3.0
    """Greatest weight. Default: TRL's (AgileRL: 2)."""
    source: ClassVar = "https://github.com/huggingface/trl"
    reweights: ClassVar = True

    def factor(self, start: "UpdateStart") -> "Tensor":
        """Weight of each step's policy loss."""
        from groupwise.functional.correction import truncated

        return truncated(importance_weight(self.level, start), self.high)


def importance_weight(level: Literal["token", "sequence"], start: "UpdateStart") -> "Tensor":
    """``exp(old_log_prob - sample_log_prob)`` of each step, or the product over its episode."""
    from groupwise.functional.correction import sequence_weight, token_weight

    old, sampled = start.old_log_prob, start.batch["sample_log_prob"]
    if level == "token":
        return token_weight(old, sampled)
    return sequence_weight(old, sampled, start.mask, start.batch["episode_id"], start.num_episodes)
