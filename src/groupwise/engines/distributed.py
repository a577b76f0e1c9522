"""Data-parallel training under ``torchrun``: one process per rank, each with its own environments.

Loss weights are global over ranks, so gradients are summed, never averaged. The result is that of one process on the
union of the data.
"""

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groupwise.engines.base import Engine


class DistributedEngine(Engine):
    """Sums over the ranks of torch's default process group.

    Args:
        device: type of the tensors to be summed, "cpu" or "cuda".
        timeout: seconds that an exchange may take.
        backend: of torch. None: that of the device.
    """

    def __init__(self, device: str, timeout: float, backend: str | None = None) -> None:
        self.device = device
        if not dist.is_initialized():  # Ray Train does
            dist.init_process_group(backend or backend_of(device), timeout=timedelta(seconds=timeout))
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum of the tensor over all ranks, without gradient."""
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def sum_int(self, number: int) -> int:
        """Sum of a Python number over all ranks."""
        return int(self.sum(torch.tensor(number, device=self.device)))

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
        """Leave the process group."""
        dist.destroy_process_group()


def backend_of(device: str, *, cpu_offload: bool = False) -> str:
    """Torch's backend for tensors on the device; with ``cpu_offload`` also for those in the host's memory."""
    if device != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if cpu_offload else "nccl"


def from_environment(
    device: str = "cpu", several: Callable[[str, float], DistributedEngine] = DistributedEngine, timeout: float = 1800.0
) -> Engine:
    """A distributed engine under ``torchrun``, else one for a single process.

    Args:
        device: type of the tensors to be summed, "cpu" or "cuda"; "cuda" selects the GPU of the local rank.
        several: the engine of several processes.
        timeout: seconds that one of their exchanges may take.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Engine()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return several(device, timeout)
