"""Sums and exchanges of ranks; the base class is for a single process.

``functional`` takes ``engine.sum`` as a plain callable. Algorithms do not know which engine they hold.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.utils import clip_grad_norm_

from groupwise.errors import ConfigError

Module = TypeVar("Module", bound=nn.Module)


class Engine:
    """One process: every sum over ranks is the number itself."""

    rank: int = 0
    world_size: int = 1
    sharded: bool = False
    """Whether each rank holds only a part of the trained parameters, so that it can neither score nor save alone."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum of the tensor over all ranks, without gradient."""
        return tensor

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
        """The module that updates train: the policy itself, or a copy that ``publish`` brings back."""
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


# Data-parallel training under torchrun: one process per rank, each with its own environments


class DistributedEngine(Engine):
    """Sums over the ranks of torch's default process group.

    Args:
        device: type of the tensors to be summed, "cpu" or "cuda".
        timeout: seconds that an exchange may take.
        cpu_offload: tensors in the host's memory are exchanged, too.
    """

    def __init__(self, device: str, timeout: float, *, cpu_offload: bool = False) -> None:
        self.device = device
        self._opened = not dist.is_initialized()  # Ray Train does
        if self._opened:
            limit = timedelta(seconds=timeout)
            if not _LAUNCHED:
                _LAUNCHED.append(next(iter(rendezvous("env://", timeout=limit))))
            store, rank, world_size = _LAUNCHED[0]
            store.set_timeout(limit)
            # the store outlives a group, and a second one must not find the addresses of the first
            own = PrefixStore(f"groupwise-{next(_GROUPS)}", store)
            backend = backend_of(device, cpu_offload)
            dist.init_process_group(backend, store=own, rank=rank, world_size=world_size, timeout=limit)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum of the tensor over all ranks, without gradient."""
        total = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(tensor.device)

    def gather_objects(self, thing: Any) -> list[Any]:
        """Plain data of every rank, in the order of ranks."""
        things: list[Any] = [None] * self.world_size
        dist.all_gather_object(things, thing)
        return things

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient, in place, by its sum over all ranks, in one exchange; a missing one counts as 0."""
        trained = [p for p in parameters if p.requires_grad]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in trained if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def broadcast(self, module: nn.Module) -> None:
        """Make every rank's parameters and buffers those of rank 0."""
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def close(self) -> None:
        """Leave the process group, if the engine opened it."""
        if self._opened:
            dist.destroy_process_group()


_GROUPS = count()
"""Numbers of the process groups of this program, the same on every rank."""


_LAUNCHED: list[tuple[Any, int, int]] = []
"""The store of the launcher, with rank and number of ranks; one for the whole program, since its port is."""


def backend_of(device: str, cpu_offload: bool) -> str:
    """Torch's backend for tensors on the device; with ``cpu_offload`` also for those in the host's memory."""
    return "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl" if cpu_offload else "nccl"


def from_environment(
    device: str = "cpu", several: Callable[[str, float], DistributedEngine] = DistributedEngine, timeout: float = 1800.0
) -> Engine:
    """A distributed engine under ``torchrun`` or in a process group that exists, else one for a single process.

    Args:
        device: type of the tensors to be summed, "cpu" or "cuda"; "cuda" selects the GPU of the local rank.
        several: the engine of several processes.
        timeout: seconds that one of their exchanges may take.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not dist.is_initialized():
        return Engine()
    if device == "cuda":
        rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if rank >= gpus and (gpus > 1 or dist.is_torchelastic_launched()):  # else the launcher shows each rank its own
            raise ConfigError(
                f"{rank + 1} or more processes on a machine where torch sees {gpus} GPU{'s' * (gpus != 1)}, and each needs "
                f"its own; fix: torchrun --nproc-per-node {gpus}, or device='cpu'"
            )
        torch.cuda.set_device(min(rank, gpus - 1))
    return several(device, timeout)
