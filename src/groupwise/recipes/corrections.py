"""Importance sampling corrections, for a sampler whose probabilities differ from the trainer's."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import model_validator

from groupwise.config.base import NonNegative, Positive
from groupwise.config.choices import register_recipe
from groupwise.config.objective import MaskCorrectionCfg

if TYPE_CHECKING:
    from torch import Tensor

    from groupwise.algorithms.loss import UpdateStart


class WeightCorrectionCfg(MaskCorrectionCfg):
    """A correction by the weight ``exp(old_log_prob - sample_log_prob)``."""

    level: Literal["token", "sequence"] = "token"
    """Weight of each step, or the product over its episode."""
    reweights: ClassVar = True

    def weight(self, start: "UpdateStart") -> "Tensor":
        """The weight at each step, unbounded."""
        from groupwise.functional.correction import sequence_weight, token_weight

        old, sampled = start.old_log_prob, start.batch["sample_log_prob"]
        if self.level == "token":
            return token_weight(old, sampled)
        return sequence_weight(old, sampled, start.mask, start.batch["episode_id"], start.num_episodes)


@register_recipe
class TisCfg(WeightCorrectionCfg):
    """The weight ``exp(old_log_prob - sample_log_prob)``, at most ``high``."""

    name: Literal["tis"] = "tis"
    high: Positive = 3.0
    """Greatest weight. Default: TRL's (AgileRL: 2)."""
    source: ClassVar = "https://github.com/huggingface/trl"

    def factor(self, start: "UpdateStart") -> "Tensor":
        """Weight of each step's policy loss."""
        from groupwise.functional.correction import truncated

        return truncated(self.weight(start), self.high)


@register_recipe
class MisCfg(WeightCorrectionCfg):
    """The weight ``exp(old_log_prob - sample_log_prob)``, 0 outside ``[low, high]``."""

    name: Literal["mis"] = "mis"
    low: NonNegative | None = None
    """Least weight that counts (IcePop, AgileRL: 0.5). None: no lower bound."""
    high: Positive = 3.0
    """Greatest weight that counts. Default: TRL's (AgileRL: 5)."""
    source: ClassVar = "https://arxiv.org/abs/2510.18855"

    @model_validator(mode="after")
    def _check(self) -> "MisCfg":
        if self.low is not None and self.low >= self.high:
            raise ValueError(f"got low={self.low} and high={self.high}; expected low < high, fix: 0.5 and 5")
        return self

    def factor(self, start: "UpdateStart") -> "Tensor":
        """Weight of each step's policy loss."""
        from groupwise.functional.correction import masked

        return masked(self.weight(start), self.low, self.high)


@register_recipe
class OffPolicyMaskCfg(MaskCorrectionCfg):
    """Drops steps of negative advantage in episodes that have become unlikely."""

    name: Literal["off_policy_mask"] = "off_policy_mask"
    off_policy_mask_threshold: Positive | None = 0.5
    """Greatest mean of ``sample_log_prob - log_prob`` over the episode (TRL 0.5, AgileRL 0.03). None: no limit."""
    source: ClassVar = "https://arxiv.org/abs/2512.02556"
