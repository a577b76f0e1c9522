"""Values of a rollout's states by what attempts that came near them earned: a baseline at every step without a critic."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.algorithms.configs import CreditCfg
from groupwise.data.rollout import Nested
from groupwise.errors import DataError
from groupwise.functional.advantages import gae
from groupwise.functional.neighbours import near_values
from groupwise.functional.returns import return_to_go
from groupwise.lean_tensordict import TensorDict

POOL = 4096
"""States that each one is compared with at most, evenly spaced over the rollout; distances cost the product of both."""


def above_near_states(
    batch: TensorDict, reward: Float[Tensor, "row step"], gamma: float, cfg: CreditCfg
) -> Float[Tensor, "row step"]:
    """Generalised advantage estimate of each step, with values of near states in the place of a critic's.

    Args:
        batch: transitions [N, T].
        reward: as credit sees it.

    Raises:
        DataError: observations are no vectors of numbers.
    """
    terminated, truncated, member = batch["terminated"], batch["truncated"], batch["loss_mask"]
    score = return_to_go(reward, terminated | truncated, gamma)
    value = rollout_values(batch["obs"], score, batch["episode_id"], member, k=cfg.near_states)
    following = next_values(value, terminated, truncated)
    return gae(reward, value, following, terminated, truncated, gamma=gamma, gae_lambda=cfg.gae_lambda)


def rollout_values(
    obs: Nested,
    score: Float[Tensor, "row step"],
    episode_id: Int[Tensor, "row step"],
    member: Bool[Tensor, "row step"],
    *,
    k: int,
) -> Float[Tensor, "row step"]:
    """Mean score of the ``k`` nearest states of other episodes, 0 where a step is no member; see ``near_values``.

    Raises:
        DataError: observations are no vectors of numbers.
    """
    if not isinstance(obs, Tensor) or not obs.is_floating_point() or obs.dim() != 3:
        found = f"{obs.dtype} of shape {list(obs.shape)}" if isinstance(obs, Tensor) else "several tensors"
        raise DataError(
            f"credit.baseline='near_states' needs observations that are vectors of floats [N, T, D], to tell how near they are; "
            f"got {found}; mend: group_key='group_step', which compares steps by their time"
        )
    value = torch.zeros_like(score)
    if member.any():
        count = int(member.sum())
        pool = torch.arange(0, count, -(-count // POOL), device=score.device)
        value[member] = near_values(obs[member], score[member], episode_id[member], k=k, pool=pool)
    return value


def next_values(
    value: Float[Tensor, "row step"], terminated: Bool[Tensor, "row step"], truncated: Bool[Tensor, "row step"]
) -> Float[Tensor, "row step"]:
    """V of each step's successor: the next step's; 0 where the episode terminated; where it was cut, that of the step itself,
    for the observation behind it is nobody's step.
    """
    following = torch.cat([value[:, 1:], value[:, -1:]], dim=1)
    return torch.where(truncated, value, following).masked_fill(terminated, 0)
