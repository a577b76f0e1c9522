"""What ranks exchange; the base class is for a single process.

``functional`` takes ``engine.sum`` as a plain callable. Algorithms do not know which engine they hold.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Engine:
    """One process: every sum over ranks is the number itself."""

    rank: int = 0
    world_size: int = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum of the tensor over all ranks, without gradient."""
        return tensor

    def sum_int(self, number: int) -> int:
        """Sum of a Python number over all ranks."""
        return number

    def gather_objects(self, thing: Any) -> list[Any]:
        """Plain data of every rank, in the order of ranks."""
        return [thing]

    def gather(self, rows: Tensor) -> tuple[Tensor, slice]:
        """Rows ``[n, ...]`` of all ranks, in the order of ranks, and the slice of this rank.

        Ranks may have different numbers of rows, so each adds its own to zeros.
        """
        counts = torch.zeros(self.world_size, dtype=torch.int64, device=rows.device)
        counts[self.rank] = len(rows)
        ends = self.sum(counts).cumsum(0).tolist()
        own = slice(ends[self.rank] - len(rows), ends[self.rank])
        everyone = rows.new_zeros(ends[-1], *rows.shape[1:])
        everyone[own] = rows
        return self.sum(everyone), own

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over all ranks (losses carry global weights, so it is a sum)."""

    def broadcast(self, module: nn.Module) -> None:
        """Make every rank's parameters and buffers those of rank 0."""

    def close(self) -> None:
        """Leave the process group."""
