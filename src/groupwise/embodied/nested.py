"""Nested observations of simulators: tensors [N, ...], or dictionaries of them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from groupwise.data.rollout import Nested
from groupwise.errors import EnvError


def stored(obs: Any, num_envs: int, name: str) -> Nested:
    """A copy in the dtypes that rollouts have: float32, uint8, bool or int64.

    Args:
        name: of the simulator.

    Raises:
        EnvError: ``obs`` holds something else than tensors [N, ...].
    """
    if isinstance(obs, Mapping | TensorDict):
        leaves = {key: stored(leaf, num_envs, name) for key, leaf in obs.items()}
        return TensorDict(leaves, batch_size=[num_envs]).auto_device_()
    if not isinstance(obs, Tensor):
        raise EnvError(f"an observation of {name} holds a {type(obs).__name__}, expected tensors; fix: obs_groups")
    if obs.dim() == 0 or len(obs) != num_envs:
        raise EnvError(f"{name} has {num_envs} rows, but an observation of shape {list(obs.shape)}; fix: [N, ...]")
    dtype = obs.dtype if obs.dtype in (torch.uint8, torch.bool) else torch.int64
    return obs.detach().to(torch.float32 if obs.is_floating_point() else dtype, copy=True)


def space_of(obs: Nested) -> spaces.Space:
    """The space of one row of stored observations, without bounds."""
    if not isinstance(obs, Tensor):
        return spaces.Dict({key: space_of(leaf) for key, leaf in obs.items()})
    shape = tuple(obs.shape[1:])
    if obs.dtype == torch.float32:
        return spaces.Box(-np.inf, np.inf, shape, np.float32)
    if obs.dtype == torch.bool:
        return spaces.Box(0, 1, shape, np.bool_)
    limits = torch.iinfo(obs.dtype)
    return spaces.Box(limits.min, limits.max, shape, np.uint8 if obs.dtype == torch.uint8 else np.int64)


def select(mask: Tensor, yes: Nested, no: Nested) -> Nested:
    """The rows of ``yes`` where ``mask`` [N], else those of ``no``."""
    if isinstance(yes, Tensor):
        return torch.where(mask.view(-1, *[1] * (yes.dim() - 1)), yes, no)
    return yes.apply(partial(select, mask), no)
