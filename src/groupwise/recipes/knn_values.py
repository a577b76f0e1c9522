"""Values of a rollout's states by what episodes that came near them earned: a baseline at every step without a critic."""

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
"""States that others are compared with at most, evenly spaced over the rollouts of all ranks; distances cost the product of both."""
ROUNDS = 10
"""In which values behind cuts settle: each leaves at most gamma of the error of the one before, and far less where few returns are cut."""


class Steps(NamedTuple):
    """The steps of all ranks that count, one rank's behind another's."""

    state: Float[Tensor, "element feature"]
    episode: Int[Tensor, " element"]
    """Ids that no two episodes of the ranks share."""
    score: Float[Tensor, " element"]
    """Discounted return to the episode's end in the rollout."""
    tail: Float[Tensor, " element"]
    """What counts of the value behind a cut, gamma to the number of steps until then; 0 where the episode was not cut."""
    cut: Bool[Tensor, " element"]
    """An episode's last step that was cut."""
    num_episodes: int
    own: slice
    """This rank's."""


def knn_advantage(credit: CreditInput, k: int, gae_lambda: float) -> Float[Tensor, "row step"]:
    """Generalised advantage estimate of each step, with values of the ``k`` nearest states in the place of a critic's.

    0 everywhere where the rollout has one episode only.

    Raises:
        DataError: observations are no vectors of numbers.
    """
    batch, reward, gamma, engine = credit.batch, credit.reward, credit.gamma, credit.engine
    steps = gathered(batch, reward, gamma, engine)
    if bool((steps.episode == steps.episode[:1]).all()):  # of all ranks, so that all of them go on or none does
        return torch.zeros_like(reward)
    total = len(steps.state)
    pool = torch.arange(0, total, -(-total // POOL), device=reward.device)
    near = nearest(steps.state, steps.episode, pool, k=k, asked=steps.own)
    value = torch.zeros_like(reward)
    value[batch["loss_mask"]] = values(near, pool, steps, engine)
    ends = (batch["terminated"], batch["truncated"])
    return gae(reward, value, next_values(value, ends[1]), *ends, gamma=gamma, gae_lambda=gae_lambda)


def gathered(batch: TensorDict, reward: Float[Tensor, "row step"], gamma: float, engine: Engine) -> Steps:
    """What all ranks have to know of each other's steps."""
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
    """Mean of the discounted returns from the nearest states; behind a truncated episode stands the value of its last step.

    Without that, states just before a cut would seem worth little, and so would all states near them. The values that stand
    there are means of returns that may have been cut themselves: ``V = mean(score + tail V_last)`` is iterated.

    Args:
        near: of this rank's steps, among the pool of all ranks'.
    """
    last = steps.score.new_zeros(steps.num_episodes)
    cut = steps.cut[steps.own]
    value = near.mean(steps.score[pool])
    for _ in range(ROUNDS - 1 if bool(steps.cut.any()) else 0):
        last[steps.episode[steps.cut]] = engine.gather(value[cut])[0]
        value = near.mean((steps.score + steps.tail * last[steps.episode])[pool])
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
            f"credit.baseline='knn' needs observations that are vectors of floats [N, T, D], to tell how near they are; "
            f"got {found}; fix: baseline='mean' with group_key='group_step', which compares steps by their time"
        )
    return obs
