"""GRPO as a Stable-Baselines3 algorithm, and its policies. Needs the extra ``sb3``."""

from groupwise.errors import require_extra

require_extra("stable_baselines3", "sb3")

from groupwise.contrib.sb3.grpo import GRPO
from groupwise.contrib.sb3.policy import ActorPolicy, CnnActorPolicy, MultiInputActorPolicy
from groupwise.contrib.sb3.start import SharedStart

__all__ = ["GRPO", "ActorPolicy", "CnnActorPolicy", "MultiInputActorPolicy", "SharedStart"]
