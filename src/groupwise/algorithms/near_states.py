"""Values of a rollout's states by what attempts that came near them earned: a baseline at every step without a critic."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms.configs import CreditCfg
from groupwise.data.rollout import Nested
from groupwise.errors import DataError
from groupwise.functional.advantages import gae
from groupwise.functional.neighbours import StatePool, near_values
from groupwise.functional.returns import return_to_go
from groupwise.lean_tensordict import TensorDict

POOL = 4096
"""States of a rollout that others are compared with at most, evenly spaced; distances cost the product of both."""


def above_near_states(
    batch: TensorDict,
    reward: Float[Tensor, "row step"],
    gamma: float,
    cfg: CreditCfg,
    past: Sequence[StatePool] = (),
) -> Float[Tensor, "row step"]:
    """Generalised advantage estimate of each step, with values of near states in the place of a critic's.

    Args:
        batch: transitions [N, T].
        reward: as credit sees it.
        past: what ``visited`` gave of earlier rollouts.

    Raises:
        DataError: observations are no vectors of numbers.
    """
    terminated, truncated, member = batch["terminated"], batch["truncated"], batch["loss_mask"]
    value = torch.zeros_like(reward)
    if member.any():
        pools = [visited(batch, reward, gamma), *past]
        pool = StatePool(*(torch.cat(parts) for parts in zip(*pools, strict=True)))
        value[member] = near_values(
            _vectors(batch["obs"])[member], batch["episode_id"][member], pool, k=cfg.near_states
        )
    following = next_values(value, terminated, truncated)
    return gae(reward, value, following, terminated, truncated, gamma=gamma, gae_lambda=cfg.gae_lambda)


def visited(batch: TensorDict, reward: Float[Tensor, "row step"], gamma: float) -> StatePool:
    """The rollout's states that count, at most ``POOL``, with the discounted returns from there on."""
    member = batch["loss_mask"]
    score = return_to_go(reward, batch["terminated"] | batch["truncated"], gamma)
    spacing = max(1, -(-int(member.sum()) // POOL))
    return StatePool(*(part[member][::spacing] for part in (_vectors(batch["obs"]), score, batch["episode_id"])))


def foreign(pool: StatePool) -> StatePool:
    """The pool as later rollouts see it: none of its episodes is one of theirs."""
    return pool._replace(episode=torch.full_like(pool.episode, -1))


def next_values(
    value: Float[Tensor, "row step"], terminated: Bool[Tensor, "row step"], truncated: Bool[Tensor, "row step"]
) -> Float[Tensor, "row step"]:
    """V of each step's successor: the next step's; 0 where the episode terminated; where it was cut, the step's own.

    The observation behind a cut is nobody's step, so nothing was earned from there.
    """
    following = torch.cat([value[:, 1:], value[:, -1:]], dim=1)
    return torch.where(truncated, value, following).masked_fill(terminated, 0)


def _vectors(obs: Nested) -> Float[Tensor, "row step feature"]:
    if not isinstance(obs, Tensor) or not obs.is_floating_point() or obs.dim() != 3:
        found = f"{obs.dtype} of shape {list(obs.shape)}" if isinstance(obs, Tensor) else "several tensors"
        raise DataError(
            f"credit.baseline='near_states' needs observations that are vectors of floats [N, T, D], to tell how near they are; "
            f"got {found}; mend: group_key='group_step', which compares steps by their time"
        )
    return obs
