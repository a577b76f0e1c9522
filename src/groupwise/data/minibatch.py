"""How a rollout is cut into optimiser steps and micro-batches.

An *item* is what must not be cut: a transition, an episode (sequence ratios and per-episode means need it whole) or a
row (sequence models score it whole). An epoch is one order of all items; minibatches and micro-batches are slices of
it, so data is gathered once an epoch.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Int
from torch import Tensor

from groupwise.data.rollout import Nested

Unit = Literal["transition", "episode", "row"]
"""From finest to coarsest."""


class Epoch(NamedTuple):
    """One pass over the data."""

    order: Int[Tensor, " item"]
    """Transitions (or rows) in the order in which they are used."""
    minibatches: list[list[slice]]
    """For each optimiser step, the slices of ``order`` that are its micro-batches; none where this rank has no share."""


def coarsest(*units: Unit) -> Unit:
    """The unit that contains all the others."""
    return max(units, key=get_args(Unit).index)


def take(batch: Mapping[str, Nested], index: Tensor | slice) -> dict[str, Nested]:
    """Every key indexed along its first dimension; a slice gives views."""
    return {key: tensor[index] for key, tensor in batch.items()}


def cut(batch: Mapping[str, Nested], sizes: list[int]) -> Iterator[dict[str, Nested]]:
    """Consecutive views of these sizes, in half the time of slicing each one."""
    for parts in zip(*(tensor.split(sizes) for tensor in batch.values()), strict=True):
        yield dict(zip(batch, parts, strict=True))


def shuffle_transitions(
    count: int, *, num_minibatches: int, micro_batch_size: int | None, generator: torch.Generator
) -> Epoch:
    """A random order of ``count`` transitions, cut into minibatches of equal size (but for one transition)."""
    order = torch.randperm(count, generator=generator, device=generator.device)
    edges = [round(k * count / num_minibatches) for k in range(num_minibatches + 1)]
    minibatches = []
    for start, stop in pairwise(edges):
        width = micro_batch_size or max(stop - start, 1)
        minibatches.append([slice(i, min(i + width, stop)) for i in range(start, stop, width)])
    return Epoch(order, minibatches)


def shuffle_items(
    item: Int[Tensor, " element"],
    size: Int[Tensor, " element"],
    *,
    num_minibatches: int,
    micro_batch_size: int | None,
    generator: torch.Generator,
) -> Epoch:
    """A random order of the elements that keeps items together, cut into minibatches of nearly equal size.

    Args:
        item: what each element belongs to, any non-negative numbers; elements of one item are never parted.
        size: steps of each element: 1 for a transition, the tokens of a row.
        micro_batch_size: most steps in a slice, unless a single item has more. None: one slice a minibatch.
    """
    count = int(item.max()) + 1 if item.numel() else 0  # a rank may have no share of what the others train on
    chance = torch.randperm(count, generator=generator, device=generator.device).to(item.device)
    rank, order = chance[item].sort(stable=True)
    last = torch.ones_like(rank, dtype=torch.bool)
    last[:-1] = rank[1:] != rank[:-1]
    ends = [0, *(last.nonzero()[:, 0] + 1).tolist()]
    totals = [0, *size[order].cumsum(0)[last].tolist()]
    cuts = [0, *_even_cuts(totals, num_minibatches), len(ends) - 1]
    minibatches = [_slices(ends, totals, first, final, micro_batch_size) for first, final in pairwise(cuts)]
    return Epoch(order, minibatches)


def _even_cuts(totals: list[int], parts: int) -> list[int]:
    """Numbers of items before each of the ``parts - 1`` inner borders, sizes as even as whole items allow."""
    targets = [totals[-1] * k / parts for k in range(1, parts)]
    cuts = []
    for target in targets:
        right = min(bisect_left(totals, target), len(totals) - 1)
        left = max(right - 1, 0)
        cuts.append(left if target - totals[left] < totals[right] - target else right)
    return cuts


def _slices(ends: list[int], totals: list[int], first: int, final: int, most: int | None) -> list[slice]:
    """Slices of items ``first..final-1``, each with at most ``most`` steps or a single item."""
    borders = [first]
    for i in range(first, final):
        if most is not None and i > borders[-1] and totals[i + 1] - totals[borders[-1]] > most:
            borders.append(i)
    if final > first:
        borders.append(final)
    return [slice(ends[a], ends[b]) for a, b in pairwise(borders)]
