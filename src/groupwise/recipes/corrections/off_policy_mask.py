"""Off-policy sequence masking of DeepSeek-V3.2: bad episodes that the policy has left behind are dropped."""

from typing import ClassVar, Literal

from groupwise.config.base import Positive
from groupwise.config.choices import register_recipe
from groupwise.config.objective import MaskCorrectionCfg


@register_recipe
class OffPolicyMaskCfg(MaskCorrectionCfg):
    """Drops steps of negative advantage in episodes that have become unlikely."""

    name: Literal["off_policy_mask"] = "off_policy_mask"
    off_policy_mask_threshold: Positive | None = 0.5
    """Greatest mean of ``sample_log_prob - log_prob`` over the episode (TRL 0.5, AgileRL 0.03). None: no limit."""
    source: ClassVar = "https://arxiv.org/abs/2512.02556"
