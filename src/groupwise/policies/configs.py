"""Settings of policies. Imports no torch and no transformers."""

from typing import Annotated, Literal

from annotated_types import Ge

from groupwise.cfg import Cfg, Positive, PositiveInt


class PolicyCfg(Cfg):
    """Networks, action distribution and normalisers of a control policy."""

    hidden_sizes: tuple[Annotated[int, Ge(1)], ...] = (64, 64)
    """Width of each hidden layer."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Between layers."""
    trunk: Literal["separate", "shared"] = "separate"
    """Whether actor and critic share everything but their heads."""
    cnn: Literal["nature", "small"] = "nature"
    """Encoder of image observations: "nature" for 36x36 and larger, "small" (two 3x3 layers) below."""
    log_std_init: float = 0.0
    """Initial log deviation of Gaussian actions (Box spaces)."""
    bounded_action: Literal["clip", "squash"] = "clip"
    """Bounded Box actions: a Gaussian whose sample is clipped into the box on its way to the environment, or squashed into it by tanh."""
    normalize_obs: bool = False
    """Scale observations to running mean 0 and deviation 1 (float observations only)."""
    normalize_reward: bool = False
    """Divide rewards by the running deviation of the discounted return."""


class SamplingCfg(Cfg):
    """How a language model writes completions in training. Training scores under exactly this distribution."""

    temperature: Positive = 1.0
    """Divides the logits."""
    max_new_tokens: PositiveInt = 64
    """A completion is cut (truncated) after so many tokens."""
