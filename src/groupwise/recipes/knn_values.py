"""Values of a rollout's states from the returns of the nearest states in other episodes."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from tensordict import TensorDict
from torch import Tensor

from groupwise.algorithms.advantages import CreditInput
from groupwise.data.rollout import Nested
from groupwise.engines.base import Engine
from groupwise.errors import DataError
from groupwise.functional.advantages import gae
from groupwise.functional.neighbours import Neighbours, nearest
from groupwise.functional.returns import return_to_go

POOL = 4096
"""Most states that are candidates for neighbours, evenly spaced over the rollouts of all ranks."""
ROUNDS = 10
"""Iterations of the values at truncations; each leaves at most gamma of the error."""


class Steps(NamedTuple):
    """The steps of all ranks, concatenated."""

    state: Float[Tensor, "element feature"]
    episode: Int[Tensor, " element"]
    """Ids that are unique over all ranks."""
    score: Float[Tensor, " element"]
    """Discounted return to the episode's end in the rollout."""
    tail: Float[Tensor, " element"]
    """Gamma to the number of steps until the truncation, the weight of the value there; 0 in terminated episodes."""
    cut: Bool[Tensor, " element"]
    """Last step of a truncated episode."""
    num_episodes: int
    own: slice
    """This rank's steps."""


def knn_advantage(credit: CreditInput, k: int, gae_lambda: float) -> Float[Tensor, "row step"]:
    """Generalised advantage estimate of each step, with values from the ``k`` nearest states. 0 for a single episode.

    Raises:
        DataError: observations are not vectors of floats.
    """
    batch, reward, gamma, engine = credit.batch, credit.reward, credit.gamma, credit.engine
    steps = gathered(batch, reward, gamma, engine)
    if bool((steps.episode == steps.episode[:1]).all()):  # the same on every rank
        return torch.zeros_like(reward)
    total = len(steps.state)
    pool = torch.arange(0, total, -(-total // POOL), device=reward.device)
    near = nearest(steps.state, steps.episode, pool, k=k, asked=steps.own)
    value = torch.zeros_like(reward)
    value[batch["loss_mask"]] = values(near, pool, steps, engine)
    ends = (batch["terminated"], batch["truncated"])
    return gae(reward, value, next_values(value, ends[1]), *ends, gamma=gamma, gae_lambda=gae_lambda)


def gathered(batch: TensorDict, reward: Float[Tensor, "row step"], gamma: float, engine: Engine) -> Steps:
    """The steps of all ranks."""
    member, truncated = batch["loss_mask"], batch["truncated"]
    cut = truncated & ~batch["terminated"]
    done = batch["terminated"] | truncated
    score = return_to_go(reward, done, gamma)
    tail = return_to_go(gamma * (cut & member).to(reward), done, gamma)
    counts, rank = engine.gather((batch["episode_id"].max() + 1).clamp(min=0)[None])
    episode = batch["episode_id"][member] + counts[: rank.start].sum()
    numbers = torch.stack([score, tail, cut.to(score)], dim=-1)[member]
    (state, own), (episode, _), (numbers, _) = map(engine.gather, (_vectors(batch["obs"])[member], episode, numbers))
    score, tail, ended = numbers.unbind(dim=-1)
    return Steps(state, episode, score, tail, ended.bool(), int(counts.sum()), own)


def values(near: Neighbours, pool: Int[Tensor, " pooled"], steps: Steps, engine: Engine) -> Float[Tensor, " own"]:
    """Mean of the discounted returns from the nearest states; truncated ones are bootstrapped from their last step's value.

    That value depends on other values, so ``V = mean(score + tail V_last)`` is iterated.

    Args:
        near: neighbours of this rank's steps in the pool of all ranks.
    """
    last = steps.score.new_zeros(steps.num_episodes)
    cut = steps.cut[steps.own]
    value = near.mean(steps.score[pool])
    for _ in range(ROUNDS - 1 if bool(steps.cut.any()) else 0):
        last[steps.episode[steps.cut]] = engine.gather(value[cut])[0]
        value = near.mean((steps.score + steps.tail * last[steps.episode])[pool])
    return value


def next_values(value: Float[Tensor, "row step"], truncated: Bool[Tensor, "row step"]) -> Float[Tensor, "row step"]:
    """V of each step's successor; at truncations the step's own, because the final observation has no return."""
    return torch.where(truncated, value, torch.cat([value[:, 1:], value[:, -1:]], dim=1))


def _vectors(obs: Nested) -> Float[Tensor, "row step feature"]:
    if not isinstance(obs, Tensor) or not obs.is_floating_point() or obs.dim() != 3:
        found = f"{obs.dtype} of shape {list(obs.shape)}" if isinstance(obs, Tensor) else "several tensors"
        raise DataError(
            f"credit.baseline='knn' needs vectors of floats [N, T, D] as observations, got {found}; "
            "fix: baseline='mean' with group_key='group_step'"
        )
    return obs
