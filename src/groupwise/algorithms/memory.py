"""Smaller micro-batches when memory runs out; they change no gradient."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from groupwise.data.minibatch import Item, take
from groupwise.data.rollout import Nested
from groupwise.engines import Engine

log = logging.getLogger(__name__)

T = TypeVar("T")
Batch = dict[str, Nested]


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether the error is that memory ran out: on a GPU, in Python, or torch's on a CPU; or was raised while handling that, as in a CUDA graph."""
    kinds = torch.OutOfMemoryError | MemoryError
    return isinstance(error, kinds) or isinstance(error.__context__, kinds) or "DefaultCPUAllocator" in str(error)


class MicroBatches:
    """Micro-batches, halved once more each time that memory runs out.

    Args:
        item: elements that stay together.
    """

    def __init__(self, item: Item) -> None:
        self.halvings = 0
        self._item = item

    def run(self, batches: Sequence[Batch], compute: Callable[[list[Batch]], T]) -> T:
        """The result of ``compute`` of these micro-batches. When memory runs out, again of smaller ones, from now on."""
        while True:
            try:
                return compute(self._parts(batches))
            except (RuntimeError, MemoryError) as error:
                self._halve(batches, error)

    def _halve(self, batches: Sequence[Batch], error: Exception) -> None:
        """Make micro-batches smaller, or raise the error if that does not help."""
        if not ran_out_of_memory(error):
            raise error
        count = len(self._parts(batches))
        self.halvings += 1
        parts = self._parts(batches)
        if len(parts) == count:
            error.add_note("micro-batches cannot be smaller; fix: shorter episodes or texts, or a smaller network")
            raise error
        masks = [batch["loss_mask"] for batch in parts]
        size = max(mask.numel() if self._item == "row" else len(mask) for mask in masks)  # tokens, or decisions
        fix = f"fix: algorithm.micro_batch_size={size}"
        log.warning("out of memory: micro-batches are halved from now on, which changes no gradient; %s", fix)

    def _parts(self, batches: Sequence[Batch]) -> list[Batch]:
        """The micro-batches in parts that fitted so far."""
        parts = [*batches]
        for _ in range(self.halvings):
            parts = [half for batch in parts for half in self._halves(batch)]
        return parts

    def _halves(self, batch: Batch) -> list[Batch]:
        """Two parts of about equal size that cut no item; the batch itself if it is one item."""
        count = len(batch["loss_mask"])
        middle = count // 2
        if self._item == "episode":
            episode = batch["episode_id"].reshape(count, -1)[:, 0]
            borders = (episode.diff().nonzero()[:, 0] + 1).tolist()
            middle = min(borders, key=lambda border: abs(border - middle), default=0)
        return [take(batch, slice(middle)), take(batch, slice(middle, None))] if middle else [batch]


class EqualMicroBatches(MicroBatches):
    """The same number of micro-batches on every rank: all of them take part in each pass over a sharded policy.

    A rank that has fewer adds some without weight. None are halved when memory runs out, since one rank cannot do so alone.
    """

    def __init__(self, item: Item, engine: Engine, device: torch.device) -> None:
        super().__init__(item)
        self._engine = engine
        self._device = device

    def run(self, batches: Sequence[Batch], compute: Callable[[list[Batch]], T]) -> T:
        """The result of ``compute`` of these micro-batches, and of those that are added after them."""
        counts = self._engine.gather_objects(len(batches))
        spare = [take(batch, slice(1)) for batch in batches[:1]]  # counts for nothing
        for row in spare:
            row |= {key: torch.zeros_like(row[key]) for key in ("loss_mask", "weight", "share") if key in row}
        if 0 in counts:  # a rank without rows takes that of another
            everyone = self._engine.gather_objects([{key: value.cpu() for key, value in row.items()} for row in spare])
            spare = [{key: value.to(self._device) for key, value in row.items()} for rows in everyone for row in rows]
        return compute([*batches, *spare[:1] * (max(counts) - len(batches))])
