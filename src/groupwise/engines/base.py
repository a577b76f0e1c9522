"""How many processes train together, and how they add up: one implementation for a single process.

``functional`` takes ``engine.sum`` as a plain callable; algorithms hold an ``Engine`` and never know which.
"""

from collections.abc import Iterable

from torch import Tensor, nn


class Engine:
    """One process: every sum over ranks is the number itself."""

    rank: int = 0
    world_size: int = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum of the tensor over all ranks, without gradient."""
        return tensor

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over all ranks (losses carry global weights, so it is a sum)."""

    def broadcast(self, module: nn.Module) -> None:
        """Make every rank's parameters and buffers those of rank 0."""

    def barrier(self) -> None:
        """Wait for every rank."""

    def close(self) -> None:
        """Leave the process group."""
