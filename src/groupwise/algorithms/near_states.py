"""Values of a rollout's states by what attempts that came near them earned: a baseline at every step without a critic."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.algorithms.configs import CreditCfg
from groupwise.data.rollout import Nested
from groupwise.errors import DataError
from groupwise.functional.advantages import gae
from groupwise.functional.neighbours import Neighbours, nearest
from groupwise.functional.returns import return_to_go
from groupwise.lean_tensordict import TensorDict

POOL = 4096
"""States that others are compared with at most, evenly spaced over the rollout; distances cost the product of both."""
ROUNDS = 10
"""In which values behind cuts settle: each leaves at most gamma of the error of the one before, and far less where few returns are cut."""


def above_near_states(
    batch: TensorDict, reward: Float[Tensor, "row step"], gamma: float, cfg: CreditCfg
) -> Float[Tensor, "row step"]:
    """Generalised advantage estimate of each step, with values of near states in the place of a critic's.

    0 everywhere where the rollout has one attempt only.

    Args:
        batch: transitions [N, T].
        reward: as credit sees it.

    Raises:
        DataError: observations are no vectors of numbers.
    """
    obs, member, episode = _vectors(batch["obs"]), batch["loss_mask"], batch["episode_id"]
    terminated, truncated = batch["terminated"], batch["truncated"]
    pool = torch.arange(0, int(member.sum()), max(1, -(-int(member.sum()) // POOL)), device=member.device)
    near = nearest(obs[member], episode[member], pool, k=cfg.near_states) if len(pool) else None
    if near is None or not near.counts.any():
        return torch.zeros_like(reward)
    value = values(near, pool, batch, reward, gamma)
    following = next_values(value, truncated)
    return gae(reward, value, following, terminated, truncated, gamma=gamma, gae_lambda=cfg.gae_lambda)


def values(
    near: Neighbours, pool: Tensor, batch: TensorDict, reward: Float[Tensor, "row step"], gamma: float
) -> Float[Tensor, "row step"]:
    """Mean of the discounted returns from near states on; behind an attempt that was cut stands the value of its last step.

    Without that, states just before a cut would seem worth little, and so would all states near them. The values that stand
    there are means of returns that may have been cut themselves: ``V = mean(score + tail V_last)`` is iterated.
    """
    member, episode = batch["loss_mask"], batch["episode_id"]
    cut = batch["truncated"] & ~batch["terminated"] & member
    done = batch["terminated"] | batch["truncated"]
    score = return_to_go(reward, done, gamma)
    tail = return_to_go(gamma * cut.to(reward), done, gamma)
    last = reward.new_zeros(int(episode.max()) + 1)
    value = torch.zeros_like(reward)
    for _ in range(ROUNDS if bool(cut.any()) else 1):
        whole = (score + tail * last[episode.clamp(min=0)])[member]
        value[member] = near.mean(whole[pool])
        last[episode[cut]] = value[cut]
    return value


def next_values(value: Float[Tensor, "row step"], truncated: Bool[Tensor, "row step"]) -> Float[Tensor, "row step"]:
    """V of each step's successor: the next step's; where the episode was cut, the step's own.

    The observation behind a cut is nobody's step, so nothing was earned from there. ``gae`` lets nothing follow a terminal state.
    """
    return torch.where(truncated, value, torch.cat([value[:, 1:], value[:, -1:]], dim=1))


def _vectors(obs: Nested) -> Float[Tensor, "row step feature"]:
    if not isinstance(obs, Tensor) or not obs.is_floating_point() or obs.dim() != 3:
        found = f"{obs.dtype} of shape {list(obs.shape)}" if isinstance(obs, Tensor) else "several tensors"
        raise DataError(
            f"credit.baseline='near_states' needs observations that are vectors of floats [N, T, D], to tell how near they are; "
            f"got {found}; mend: baseline='mean' with group_key='group_step', which compares steps by their time"
        )
    return obs
