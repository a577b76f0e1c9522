"""How many processes train together, and how they add up: one implementation for a single process.

``functional`` takes ``engine.sum`` as a plain callable; algorithms hold an ``Engine`` and never know which.
"""

from collections.abc import Container, Iterable

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

    def pool(self, metrics: dict[str, float], counts: Container[str]) -> dict[str, float]:
        """Metrics over all ranks: ``counts`` are added, other numbers are means over the ranks that have them."""
        return metrics

    def gather(self, rows: Tensor) -> tuple[Tensor, slice]:
        """Rows ``[n, ...]`` of all ranks, one rank's behind another's, and which of them are this one's.

        A sum of what lies apart, since ranks have different numbers of rows.
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

    def barrier(self) -> None:
        """Wait for every rank."""

    def close(self) -> None:
        """Leave the process group."""
