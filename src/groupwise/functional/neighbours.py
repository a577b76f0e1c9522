"""Values of states without a network: what attempts that came near them went on to earn."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_BLOCK = 1024
"""States that are compared with the pool at once: distances of all of them together would need gigabytes."""


class StatePool(NamedTuple):
    """States that were visited, and what was earned from there on."""

    state: Float[Tensor, "pooled feature"]
    score: Float[Tensor, " pooled"]
    """Returns from each state on."""
    episode: Int[Tensor, " pooled"]


def near_values(
    state: Float[Tensor, "element feature"], episode: Int[Tensor, " element"], pool: StatePool, *, k: int
) -> Float[Tensor, " element"]:
    """Mean score of the ``k`` states of the pool nearest to each one, other episodes' only; of all of those where there are fewer.

    Distances are Euclidean, of features less their mean over their deviation (those of ``state``), so that units mean
    nothing. An episode's own states are left out: their scores hold the very noise that a baseline is to take off, and an
    action must not be measured against itself. Where no other episode is, the value is the mean of all scores.

    Source: value functions from nearest neighbours: Blundell et al. 2016, https://arxiv.org/abs/1606.04460, eq. 2; as a
        baseline that siblings give each other, after GiGPO, https://arxiv.org/abs/2505.10978, which asks for equal states.
    """
    mean, scale = state.mean(dim=0), state.std(dim=0, correction=0)
    scale = torch.where(scale > 0, scale, torch.inf)  # what never changes tells nothing
    theirs = pool._replace(state=(pool.state - mean) / scale)
    blocks = zip(torch.split((state - mean) / scale, _BLOCK), torch.split(episode, _BLOCK), strict=True)
    return torch.cat([_mean_of_nearest(*block, theirs, min(k, len(pool.score))) for block in blocks])


def _mean_of_nearest(
    state: Float[Tensor, "element feature"], episode: Int[Tensor, " element"], pool: StatePool, k: int
) -> Float[Tensor, " element"]:
    own = episode[:, None] == pool.episode
    distance, index = torch.cdist(state, pool.state).masked_fill(own, torch.inf).topk(k, largest=False)
    other: Bool[Tensor, "element k"] = distance.isfinite()
    count = other.sum(dim=1)
    mean = (pool.score[index] * other).sum(dim=1) / count.clamp(min=1)
    return torch.where(count > 0, mean, pool.score.mean())
