"""How a rollout is cut into optimiser steps and micro-batches.

An *item* must not be cut: it is a transition, an episode (sequence ratios and per-episode means need it whole) or a
row (sequence models score it whole). An epoch is one order of all items; minibatches and micro-batches are slices of
it, so data is gathered once an epoch.

Everything that differs between a network that scores single steps, a language model that scores whole texts and a policy with
several probability ratios for each decision is in three layouts, ``Steps``, ``Rows`` and ``Units``; ``LAYOUTS`` has them by the
policy's ``scored_by``. So the algorithms have no branch on it.
"""

from bisect import bisect_left
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.data.rollout import Nested, TensorDict

Item = Literal["transition", "episode", "row"]
"""Items from finest to coarsest."""


class Epoch(NamedTuple):
    """One pass over the data."""

    order: Int[Tensor, " item"]
    """Transitions (or rows) in the order in which they are used."""
    minibatches: list[list[slice]]
    """Slices of ``order`` for the micro-batches of each optimiser step; none if this rank has no share."""


Scored: TypeAlias = Any
"""A ``Policy``, whose module imports this layer."""
Scores: TypeAlias = Any
"""An ``Evaluation``."""


class Steps:
    """Every step ``[N, T]`` is scored by itself: elements are steps.

    Args:
        finest: item that the objective needs whole.
    """

    keys: ClassVar[tuple[str, ...]] = ()
    """Keys that cutting reads besides ``loss_mask`` and ``episode_id``."""
    own_item: ClassVar[Item] = "transition"

    def __init__(self, policy: Scored, finest: Item) -> None:
        self.policy = policy
        self.item: Item = max(self.own_item, finest, key=get_args(Item).index)
        """The item that a micro-batch must not cut."""

    def inputs(self, batch: TensorDict | Mapping[str, Nested], inputs: dict[str, Nested]) -> dict[str, Nested]:
        """Inputs of the scores, as the loss counts them."""
        return inputs

    def per_unit(self, data: Mapping[str, Nested], units: Bool[Tensor, "row step *unit"]) -> dict[str, Nested]:
        """Numbers of steps ``[N, T]`` repeated for each of their units; inputs of the policy stay."""
        return dict(data)

    def elements(self, data: Mapping[str, Nested]) -> dict[str, Nested]:
        """All elements of ``[N, T]`` data, in one dimension."""
        return flat(data)

    def counted(self, data: Mapping[str, Nested]) -> dict[str, Nested]:
        """The elements that count."""
        elements = flat(data)
        return take(elements, elements["loss_mask"].nonzero()[:, 0])

    def num_steps(self, mask: Tensor) -> Tensor:
        """Steps that count; a decision is one, however many units it has."""
        return mask.sum()

    def num_counted(self, mask: Tensor) -> int:
        """Steps that count among ``counted`` elements: all, where each is a step."""
        return len(mask)

    def shuffle(
        self, elements: Mapping[str, Nested], num_minibatches: int, most: int | None, generator: torch.Generator
    ) -> Epoch:
        """A random order of the elements, cut into minibatches, and these into micro-batches of at most ``most`` steps."""
        mask, count = elements["loss_mask"], len(elements["loss_mask"])
        if self.item == "episode":
            return shuffle_items(elements["episode_id"], mask.long(), num_minibatches, most, generator)
        # sizes differ by one step at most
        edges = [round(k * count / num_minibatches) for k in range(num_minibatches + 1)]
        minibatches = []
        for start, stop in pairwise(edges):
            width = most or max(stop - start, 1)
            minibatches.append([slice(i, min(i + width, stop)) for i in range(start, stop, width)])
        return Epoch(torch.randperm(count, generator=generator).to(mask.device, non_blocking=True), minibatches)

    def in_order(
        self, elements: Mapping[str, Nested], most: int | None, policy: Scored
    ) -> tuple[Int[Tensor, " element"] | None, list[slice]]:
        """Micro-batches that ``policy`` only scores, as slices of an order. None: the elements as they are."""
        count = len(elements["loss_mask"])
        return None, [slice(i, i + (most or count)) for i in range(0, count, most or count)]

    def finish(self, scores: Scores, mask: Tensor) -> Scores:
        """The policy's scores, shaped like the mask."""
        return scores

    def per_decision(self, score: Float[Tensor, "row step *unit"]) -> Float[Tensor, "row step"]:
        """Scores of units, summed over each decision."""
        return score


class Rows(Steps):
    """Rows are scored whole, as texts are: elements are rows, packed by length and by common prefix."""

    keys = ("valid", "group_id")
    own_item = "row"

    def elements(self, data: Mapping[str, Nested]) -> dict[str, Nested]:
        """Rows as they are."""
        return dict(data)

    def counted(self, data: Mapping[str, Nested]) -> dict[str, Nested]:
        """Rows with a step that count."""
        return take(data, data["loss_mask"].any(dim=1).nonzero()[:, 0])

    def num_counted(self, mask: Tensor) -> int:
        """Tokens of the rows that count."""
        return int(mask.sum())

    def shuffle(
        self, elements: Mapping[str, Nested], num_minibatches: int, most: int | None, generator: torch.Generator
    ) -> Epoch:
        """A random order of the rows; members spread over the minibatches."""
        sizes = RowSizes.of(elements, shared=self.policy.shares_prefixes)
        return shuffle_rows(sizes, num_minibatches, most, generator)

    def in_order(
        self, elements: Mapping[str, Nested], most: int | None, policy: Scored
    ) -> tuple[Int[Tensor, " element"] | None, list[slice]]:
        """Packed rows."""
        mask = elements["loss_mask"]
        sizes = RowSizes.of(elements, shared=policy.shares_prefixes)
        return pack(sizes, torch.arange(len(mask), device=mask.device), most)

    def finish(self, scores: Scores, mask: Tensor) -> Scores:
        """Scores with 0 at the padding, where they may be NaN."""
        return scores.masked(~mask.to(scores.log_prob.device, non_blocking=True))


class Units(Steps):
    """A decision has K probability ratios, as the tokens of a robot's action: elements are decisions ``[K]``."""

    def inputs(self, batch: TensorDict | Mapping[str, Nested], inputs: dict[str, Nested]) -> dict[str, Nested]:
        """Scored inputs, as the loss counts them: units that were acted with."""
        units = self.policy.unit_mask({**batch})
        inputs = self.per_unit(inputs, units)
        return inputs | {"loss_mask": inputs["loss_mask"] & units}

    def per_unit(self, data: Mapping[str, Nested], units: Bool[Tensor, "row step *unit"]) -> dict[str, Nested]:
        """Numbers of decisions, repeated for each of their units."""
        numbers = {key for key, value in data.items() if key not in self.policy.batch_keys and value.dim() == 2}
        return {key: value.unsqueeze(-1).expand_as(units) if key in numbers else value for key, value in data.items()}

    def counted(self, data: Mapping[str, Nested]) -> dict[str, Nested]:
        """Decisions that count."""
        elements = flat(self.per_unit(data, data["loss_mask"]))
        return take(elements, elements["loss_mask"].any(dim=1))

    def num_steps(self, mask: Tensor) -> Tensor:
        """Decisions that count."""
        return mask.any(dim=-1).sum()

    def shuffle(
        self, elements: Mapping[str, Nested], num_minibatches: int, most: int | None, generator: torch.Generator
    ) -> Epoch:
        """A random order of the decisions."""
        decisions = {"loss_mask": elements["loss_mask"].any(dim=1), "episode_id": elements["episode_id"][:, 0]}
        return super().shuffle(decisions, num_minibatches, most, generator)

    def finish(self, scores: Scores, mask: Tensor) -> Scores:
        """Scores with 0 at units that count for nothing; the value of a decision is that of each unit."""
        if scores.value is not None:
            scores = scores._replace(value=scores.value.unsqueeze(-1).expand_as(mask))
        return scores.masked(~mask)

    def per_decision(self, score: Float[Tensor, "row step *unit"]) -> Float[Tensor, "row step"]:
        """Sums over the units."""
        return score.sum(dim=-1)


LAYOUTS: dict[str, type[Steps]] = {"transition": Steps, "row": Rows, "token": Units}
"""Layouts by a policy's ``scored_by``."""


def take(batch: Mapping[str, Nested], index: Tensor | slice) -> dict[str, Nested]:
    """Every key indexed along its first dimension; a slice gives views."""
    return {key: tensor[index] for key, tensor in batch.items()}


def flat(batch: Mapping[str, Nested]) -> dict[str, Nested]:
    """Every key ``[N, T, ...]`` as transitions ``[N * T, ...]``."""
    return {key: value.flatten(0, 1) for key, value in batch.items()}


def shuffle_items(
    item: Int[Tensor, " element"],
    size: Int[Tensor, " element"],
    num_minibatches: int,
    most: int | None,
    generator: torch.Generator,
) -> Epoch:
    """A random order of the elements that keeps items together, cut into minibatches of nearly equal size.

    Args:
        item: number of the item of each element, any non-negative ones; elements of one item are never parted.
        size: steps of each element: 1 for a transition, the tokens of a row.
        most: steps in a slice, unless a single item has more. None: one slice a minibatch.
    """
    count = int(item.max()) + 1 if item.numel() else 0  # a rank may have no share of the data that the others train on
    chance = torch.randperm(count, generator=generator, device=generator.device).to(item.device)
    rank, order = chance[item].sort(stable=True)
    after = torch.unique_consecutive(rank, return_counts=True)[1].cumsum(0)
    ends, totals = [0, *after.tolist()], [0, *size[order].cumsum(0)[after - 1].tolist()]
    cuts = [0]
    for k in range(1, num_minibatches):  # as even as whole items allow
        target = totals[-1] * k / num_minibatches
        right = bisect_left(totals, target)
        left = max(right - 1, 0)
        cuts.append(left if target - totals[left] < totals[right] - target else right)
    minibatches = []
    for first, final in pairwise([*cuts, len(ends) - 1]):
        borders = [first]
        for i in range(first, final):
            if most is not None and i > borders[-1] and totals[i + 1] - totals[borders[-1]] > most:
                borders.append(i)
        borders += [final] if final > first else []
        minibatches.append([slice(ends[a], ends[b]) for a, b in pairwise(borders)])
    return Epoch(order, minibatches)


# --- packing of whole rows: members together, the longest first ---
#
# Members in one micro-batch can share their common prefix, and rows of similar length waste little on padding. The
# first micro-batch is the largest, so that a lack of memory shows at once.


class RowSizes(NamedTuple):
    """Sizes of each row that decide its place, in tokens."""

    group: Int[Tensor, " row"]
    head: Int[Tensor, " row"]
    """Tokens before the first one that counts: the prefix that members share."""
    tail: Int[Tensor, " row"]
    """Tokens from there on."""
    counted: Int[Tensor, " row"]
    """Tokens that count."""

    @classmethod
    def of(cls, rows: Mapping[str, Nested], *, shared: bool) -> "RowSizes":
        """Sizes of rows; a row without a group is a group of its own, and so are all where no prefixes are ``shared``."""
        valid, loss_mask, group = rows["valid"], rows["loss_mask"], rows["group_id"].amax(dim=1)
        own = torch.arange(len(group), device=group.device)
        # a rank may have no rows of the data that the others train on
        group = torch.where(group >= 0, group, max(group.tolist(), default=-1) + 1 + own) if shared else own
        length = valid.sum(dim=1)
        # if no token counts, the common prefix is unknown: an empty one is safe
        start = torch.where(loss_mask.any(dim=1), loss_mask.long().argmax(dim=1) - valid.long().argmax(dim=1), 0)
        return cls(group, start, length - start, loss_mask.sum(dim=1))


def shuffle_rows(sizes: RowSizes, num_minibatches: int, most: int | None, generator: torch.Generator) -> Epoch:
    """A random order of the rows, cut into minibatches of nearly equal counted tokens, and each of these packed.

    Members spread over the minibatches, so that each sees as many groups as it can.

    Args:
        most: tokens in a slice (see ``pack``). None: one slice a minibatch.
    """
    number = torch.arange(len(sizes.group), device=sizes.group.device)
    epoch = shuffle_items(number, sizes.counted, num_minibatches, None, generator)
    for minibatch in epoch.minibatches:
        for whole in minibatch[:]:  # one or none
            epoch.order[whole], slices = pack(sizes, epoch.order[whole], most)
            minibatch[:] = [slice(whole.start + s.start, whole.start + s.stop) for s in slices]
    return epoch


def pack(sizes: RowSizes, rows: Int[Tensor, " chosen"], most: int | None) -> tuple[Int[Tensor, " chosen"], list[slice]]:
    """The rows with members together, longest group first, and slices of them.

    A slice holds at most ``most`` tokens, padding included, or a single row. The heads of its groups count once each, as
    wide as the widest; the tails of its rows as wide as the widest.
    """
    packed = torch.stack([rows, *(column[rows] for column in sizes[:3])], dim=1).tolist()
    longest: dict[int, int] = {}
    for _, group, head, tail in packed:
        longest[group] = max(longest.get(group, 0), head + tail)
    packed.sort(key=lambda row: (-longest[row[1]], row[1], -row[3]))
    borders = [0] if packed else []
    groups: set[int] = set()
    widest_head = widest_tail = 0
    for place, (_, group, head, tail) in enumerate(packed):
        groups, widest_head, widest_tail = groups | {group}, max(widest_head, head), max(widest_tail, tail)
        tokens = len(groups) * widest_head + (place + 1 - borders[-1]) * widest_tail
        if most is not None and place > borders[-1] and tokens > most:
            borders.append(place)
            groups, widest_head, widest_tail = {group}, head, tail
    return rows.new_tensor([row[0] for row in packed]), [slice(a, b) for a, b in pairwise([*borders, len(packed)])]
