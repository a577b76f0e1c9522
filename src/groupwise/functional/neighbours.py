"""States near to others, and what was earned from there: values without a network."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_BLOCK = 256
"""States that are compared with the pool at once: distances of all of them together would need gigabytes."""
_FLAT = 1e-6
"""A feature whose standard deviation is a smaller share of its size than this is left out: only rounding changes it."""


class Neighbours(NamedTuple):
    """Of each element, the nearest states of a pool."""

    place: Int[Tensor, "element k"]
    """In the pool."""
    counts: Bool[Tensor, "element k"]
    """False for padding, where there are fewer than k."""

    def mean(self, score: Float[Tensor, " pooled"]) -> Float[Tensor, " element"]:
        """Mean of the pool's scores over the neighbours; 0 where there are none."""
        return (score[self.place] * self.counts).sum(dim=1) / self.counts.sum(dim=1).clamp(min=1)


def nearest(
    state: Float[Tensor, "element feature"],
    episode: Int[Tensor, " element"],
    pool: Int[Tensor, " pooled"],
    *,
    k: int,
    asked: slice = slice(None),
) -> Neighbours:
    """The ``k`` states of the pool nearest to each one asked about, those of other episodes; all where there are fewer.

    Distances are Euclidean, of features divided by their standard deviation. An episode's own states are left out: what
    was earned there holds the very noise that a baseline is to take off.

    Args:
        pool: indices of elements.
        asked: the elements to look up; None: all.

    Source: values from nearest neighbours: Blundell et al. 2016, https://arxiv.org/abs/1606.04460, eq. 2; as a baseline that
        episodes give each other, after GiGPO, https://arxiv.org/abs/2505.10978, which asks for equal states.
    """
    mean, scale = state.mean(dim=0), state.std(dim=0, correction=0)
    state = (state - mean) / torch.where(scale > _FLAT * mean.abs(), scale, torch.inf)
    blocks = zip(torch.split(state[asked], _BLOCK), torch.split(episode[asked], _BLOCK), strict=True)
    found = [_nearest(*block, state[pool], episode[pool], min(k, len(pool))) for block in blocks]
    return Neighbours(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _nearest(
    state: Float[Tensor, "element feature"],
    episode: Int[Tensor, " element"],
    pool: Float[Tensor, "pooled feature"],
    pool_episode: Int[Tensor, " pooled"],
    k: int,
) -> Neighbours:
    # by products, one state far from all others costs the distances between these their digits
    distance = torch.cdist(state, pool, compute_mode="donot_use_mm_for_euclid_dist")
    distance, index = distance.masked_fill_(episode[:, None] == pool_episode, torch.inf).topk(k, largest=False)
    return Neighbours(index, distance.isfinite())
