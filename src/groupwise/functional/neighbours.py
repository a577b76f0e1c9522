"""Values of states without a network: what attempts that came near them went on to earn."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_BLOCK = 1024
"""States that are compared with the pool at once: distances of all of them together would need gigabytes."""


def near_values(
    state: Float[Tensor, "element feature"],
    score: Float[Tensor, " element"],
    episode: Int[Tensor, " element"],
    *,
    k: int,
    pool: Int[Tensor, " pooled"] | None = None,
) -> Float[Tensor, " element"]:
    """Mean score of the ``k`` states nearest to each one that other episodes visited; of all of those where there are fewer.

    Distances are Euclidean, of features less their mean over their deviation, so that units mean nothing. An episode's own
    states are left out: their scores hold the very noise that a baseline is to take off, and an action must not be
    measured against itself. Where no other episode is, the value is the mean of all scores.

    Args:
        score: returns from each state on.
        pool: indices of the states that are looked at; None: all. Time and memory grow with its size.

    Source: value functions from nearest neighbours: Blundell et al. 2016, https://arxiv.org/abs/1606.04460, eq. 2; as a
        baseline that siblings give each other, after GiGPO, https://arxiv.org/abs/2505.10978, which asks for equal states.
    """
    state = (state - state.mean(dim=0)) / state.std(dim=0, correction=0).clamp(min=torch.finfo(state.dtype).tiny)
    pool = torch.arange(len(score), device=score.device) if pool is None else pool
    theirs, scores, episodes = state[pool], score[pool], episode[pool]
    k = min(k, len(pool))
    blocks = zip(torch.split(state, _BLOCK), torch.split(episode, _BLOCK), strict=True)
    return torch.cat([_mean_of_nearest(*block, theirs, episodes, scores, k) for block in blocks])


def _mean_of_nearest(
    state: Float[Tensor, "element feature"],
    episode: Int[Tensor, " element"],
    pool: Float[Tensor, "pooled feature"],
    pool_episode: Int[Tensor, " pooled"],
    pool_score: Float[Tensor, " pooled"],
    k: int,
) -> Float[Tensor, " element"]:
    own = episode[:, None] == pool_episode
    distance, index = torch.cdist(state, pool).masked_fill(own, torch.inf).topk(k, largest=False)
    other: Bool[Tensor, "element k"] = distance.isfinite()
    count = other.sum(dim=1)
    mean = (pool_score[index] * other).sum(dim=1) / count.clamp(min=1)
    return torch.where(count > 0, mean, pool_score.mean())
