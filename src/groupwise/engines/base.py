"""What ranks exchange; the base class is for a single process.

``functional`` takes ``engine.sum`` as a plain callable. Algorithms do not know which engine they hold.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

Module = TypeVar("Module", bound=nn.Module)


class Engine:
    """One process: every sum over ranks is the number itself."""

    rank: int = 0
    world_size: int = 1
    sharded: bool = False
    """Whether a rank holds a part of what is trained, so that it can neither score nor save anything alone."""

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

    def clip_gradients(self, parameters: Iterable[nn.Parameter], limit: float | None) -> Tensor:
        """Clip the norm of the summed gradient; returns the norm before. None: no limit."""
        return clip_grad_norm_(parameters, math.inf if limit is None else limit)

    def learner(self, policy: Module) -> Module:
        """What updates train: the policy itself, or a copy that ``publish`` brings back."""
        return policy

    def load_learner(self, learner: nn.Module, policy: nn.Module) -> None:
        """Give the learner the parameters of its policy, which were loaded."""

    def publish(self, learner: nn.Module, policy: nn.Module) -> None:
        """Give the policy the trained parameters of its learner."""

    def shard(self, policy: Module) -> Module:
        """The policy, of which each rank may keep a part only."""
        return policy

    def whole(self, state: Any) -> Any:
        """Nested data with whole tensors in place of the ranks' parts. All ranks call it together."""
        return state

    def split(self, state: Mapping[Any, Any], like: Mapping[Any, Tensor]) -> Mapping[Any, Any]:
        """The reverse of ``whole``: the parts of this rank, as those of the same keys in ``like``."""
        return state

    def broadcast(self, module: nn.Module) -> None:
        """Make every rank's parameters and buffers those of rank 0."""

    def close(self) -> None:
        """Leave the process group."""
