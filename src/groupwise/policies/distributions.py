"""Action heads: what a policy's flat output means as a distribution over one Gymnasium action space.

A head has no parameters and remembers nothing; its constants move with the policy. ``params`` are the flat parameters
``[..., P]`` of the distribution, as ``Evaluation.dist`` carries them:

| action space | head | params | policy's own action |
|---|---|---|---|
| Discrete | Categorical | logits | index from 0, int64 |
| MultiDiscrete | MultiCategorical | logits of each choice, one after another | indices from 0, int64 |
| MultiBinary | Bernoulli | logits | int8 |
| Box of floats | DiagGaussian | mean, log_std | the unclipped sample |
| bounded Box, ``squash_output=True`` | SquashedGaussian | mean, log_std of the latent | the latent, before tanh |
| Dict, Tuple | Composite | outputs of all parts, then all log_std | one vector of float32, all parts |

The rollout stores the policy's own action, never what the environment received: the probability ratio is then exact
where the box's bound was hit. ``env_action`` maps one to the other.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.config.policy import PolicyCfg
from groupwise.data.spaces import leaf_spaces, space_kind
from groupwise.errors import UnsupportedSpaceError
from groupwise.policies.action_head import ActionHead
from groupwise.policies.composite_head import Composite
from groupwise.policies.discrete_heads import Bernoulli, Categorical, MultiCategorical
from groupwise.policies.gaussian_heads import DiagGaussian, SquashedGaussian


def make_head(action_space: Any, cfg: PolicyCfg) -> ActionHead:
    """The head for an action space.

    Raises:
        UnsupportedSpaceError: no head exists for the space.
        ConfigError: ``squash_output=True`` on a Box that is not bounded everywhere.
    """
    kind = space_kind(action_space)
    if kind == "discrete":
        return Categorical(int(action_space.n), int(action_space.start))
    if kind == "multi_discrete":
        return MultiCategorical(action_space.nvec, action_space.start)
    if kind == "multi_binary":
        return Bernoulli(tuple(action_space.shape))
    if kind == "box" and action_space.dtype.kind == "f":
        bounds = _inner_float32(action_space.low, action_space.high)
        return SquashedGaussian(*bounds) if cfg.squash_output else DiagGaussian(*bounds)
    if (leaves := leaf_spaces(action_space)) and () not in leaves:
        return Composite([make_head(leaf, cfg) for leaf in leaves.values()])
    raise UnsupportedSpaceError(
        f"action space {action_space} is not supported; supported: Discrete, MultiDiscrete, MultiBinary, Box of floats, and "
        "Dict or Tuple of them; fix: wrap the environment with gymnasium.wrappers.TransformAction"
    )


def _inner_float32(low: np.ndarray, high: np.ndarray) -> tuple[Tensor, Tensor]:
    """The bounds in float32, rounded inwards, so that what is clipped to them is inside the space's own."""
    with np.errstate(over="ignore"):
        low32, high32 = low.astype(np.float32), high.astype(np.float32)
    low32 = np.where(low32 < low, np.nextafter(low32, np.float32(np.inf)), low32)
    high32 = np.where(high32 > high, np.nextafter(high32, np.float32(-np.inf)), high32)
    return torch.from_numpy(low32), torch.from_numpy(high32)
