"""Masks of allowed actions: the entry ``action_mask`` of a Dict observation, for Discrete and MultiDiscrete actions.

A mask has a number for each option, 0 where it is not allowed; those of a MultiDiscrete follow one after another, as in
sb3-contrib's ``MaskablePPO``. Nothing here imports Gymnasium.
"""

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.data.spaces import space_kind
from groupwise.errors import ConfigError, DataError, GroupwiseError

KEY = "action_mask"


def options(action_space: Any) -> list[int]:
    """How many options each choice has; nothing for actions that are no choices."""
    kind = space_kind(action_space)
    if kind == "discrete":
        return [int(action_space.n)]
    return action_space.nvec.ravel().tolist() if kind == "multi_discrete" else []


def has_mask(observation_space: Any, action_space: Any) -> bool:
    """Whether observations say which actions are allowed.

    Raises:
        ConfigError: their mask is of another size than the actions.
    """
    if space_kind(observation_space) != "dict" or KEY not in observation_space.spaces or not options(action_space):
        return False
    shape, size = observation_space[KEY].shape or (), sum(options(action_space))
    if math.prod(shape) != size:
        raise ConfigError(
            f"the observation's {KEY!r} has shape {list(shape)}, and the actions have {size} options ({action_space}); fix: "
            "one number for each option, or env.obs_keys without it"
        )
    return True


def allowed_logits(logits: Float[Tensor, "*batch option"], mask: Tensor) -> Float[Tensor, "*batch option"]:
    """The logits, with a number so low that the probability is 0 where an option is not allowed. So is its gradient.

    Where a choice has no option, as after an episode's end, any may be taken. ``mask`` has as many numbers as ``logits``.
    """
    forbidden = (mask == 0).reshape(logits.shape)
    return logits.masked_fill(forbidden, torch.finfo(logits.dtype).min)


def check(mask: Any, action_space: Any, where: str = "obs", *, error: type[GroupwiseError] = DataError) -> None:
    """Refuse a mask, or a batch of them, that leaves a choice no option.

    Raises:
        DataError: or another ``error``; names the mask.
    """
    rows = (torch.as_tensor(mask) != 0).reshape(-1, sum(options(action_space)))
    open_choices = [part.any(dim=-1) for part in torch.split(rows, options(action_space), dim=-1)]
    closed = ~torch.stack(open_choices).all(dim=0)
    if closed.any():
        raise error(
            f"{KEY} of {where} allows no action: {rows[closed][0].int().tolist()}; fix: at least one option of each choice, "
            "until the episode ends"
        )


def allowed_action(action: Tensor, obs: Any, action_space: Any) -> Tensor:
    """Environment actions ``[B, ...]``, with an allowed one in place of each that is not, the same for the same mask.

    Without masks in the observations they stay as they are.
    """
    if isinstance(obs, Tensor) or KEY not in obs.keys() or not options(action_space):  # noqa: SIM118  # a TensorDict
        return action
    mask = (obs[KEY] != 0).reshape(len(action), -1).cpu()
    start = torch.as_tensor(np.asarray(action_space.start)).reshape(-1)
    numbers, found = action.reshape(len(action), -1) - start, []
    for number, part in zip(numbers.unbind(-1), torch.split(mask, options(action_space), dim=-1), strict=True):
        place = number % part.sum(dim=-1).clamp(min=1) + 1
        found.append(((part.cumsum(dim=-1) == place.unsqueeze(-1)) & part).int().argmax(dim=-1))
    return (torch.stack(found, dim=-1) + start).reshape(action.shape)
