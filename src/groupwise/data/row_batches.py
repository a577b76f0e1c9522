"""Packing of whole rows for sequence models: members side by side, the longest first.

Members in one micro-batch can share their common prefix, and rows of like length waste little on padding.
The first micro-batch is the largest, so that a lack of memory shows at once.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from groupwise.data.minibatch import Epoch, shuffle_items


class RowSizes(NamedTuple):
    """Sizes of each row that decide its place, in tokens."""

    group: Int[Tensor, " row"]
    head: Int[Tensor, " row"]
    """Before the first token that counts: what members have in common."""
    tail: Int[Tensor, " row"]
    """From there on."""
    counted: Int[Tensor, " row"]
    """Tokens that count."""

    @classmethod
    def of(
        cls, valid: Bool[Tensor, "row step"], loss_mask: Bool[Tensor, "row step"], group_id: Int[Tensor, "row step"]
    ) -> "RowSizes":
        """Sizes of rows; a row without a group is a group of its own."""
        group = group_id.amax(dim=1)
        # a rank may have no rows of what the others train on
        alone = max(group.tolist(), default=-1) + 1 + torch.arange(len(group), device=group.device)
        length = valid.sum(dim=1)
        # where nothing counts, what members have in common is unknown: none of it is the safe guess
        start = torch.where(loss_mask.any(dim=1), loss_mask.long().argmax(dim=1) - valid.long().argmax(dim=1), 0)
        return cls(torch.where(group >= 0, group, alone), start, length - start, loss_mask.sum(dim=1))

    def apart(self) -> "RowSizes":
        """The same rows for a model that reads each of them whole: none has members."""
        return self._replace(group=torch.arange(len(self.group), device=self.group.device))


def shuffle_rows(
    sizes: RowSizes, *, num_minibatches: int, micro_batch_size: int | None, generator: torch.Generator
) -> Epoch:
    """A random order of the rows, cut into minibatches of nearly equal counted tokens, and each of these packed.

    Members spread over the minibatches, so that each sees as many groups as it can.

    Args:
        micro_batch_size: most tokens in a slice (see ``pack``). None: one slice a minibatch.
    """
    number = torch.arange(len(sizes.group), device=sizes.group.device)
    shuffled = shuffle_items(
        number, sizes.counted, num_minibatches=num_minibatches, micro_batch_size=None, generator=generator
    )
    orders, minibatches, done = [], [], 0
    for whole in shuffled.minibatches:
        rows = shuffled.order[whole[0]] if whole else shuffled.order[:0]
        order, slices = pack(sizes, rows, micro_batch_size)
        orders.append(order)
        minibatches.append([slice(s.start + done, s.stop + done) for s in slices])
        done += len(order)
    return Epoch(torch.cat(orders), minibatches)


def pack(sizes: RowSizes, rows: Int[Tensor, " chosen"], most: int | None) -> tuple[Int[Tensor, " chosen"], list[slice]]:
    """The rows with members together, longest group first, and slices of them.

    A slice holds at most ``most`` tokens, padding included, or a single row. The heads of its groups count once each, as
    wide as the widest; the tails of its rows as wide as the widest.
    """
    columns = (rows, *(column[rows] for column in (sizes.group, sizes.head, sizes.tail)))
    packed = [_Row(*numbers) for numbers in zip(*(column.tolist() for column in columns), strict=True)]
    longest: dict[int, int] = {}
    for row in packed:
        longest[row.group] = max(longest.get(row.group, 0), row.head + row.tail)
    packed.sort(key=lambda row: (-longest[row.group], row.group, -row.tail))
    borders = [0, *_borders(packed, most), len(packed)] if packed else []
    return rows.new_tensor([row.number for row in packed]), [slice(a, b) for a, b in pairwise(borders)]


class _Row(NamedTuple):
    number: int
    group: int
    head: int
    tail: int


def _borders(rows: list[_Row], most: int | None) -> Iterator[int]:
    """Where a slice ends because the next row would make it too large."""
    groups: set[int] = set()
    head = tail = begin = 0
    for place, row in enumerate(rows):
        groups, head, tail = groups | {row.group}, max(head, row.head), max(tail, row.tail)
        if most is not None and place > begin and len(groups) * head + (place + 1 - begin) * tail > most:
            yield place
            groups, head, tail, begin = {row.group}, row.head, row.tail, place
