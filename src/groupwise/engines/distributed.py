"""Data-parallel training: one process a rank under ``torchrun``, each with its own environments.

Losses carry weights that are global over ranks, so gradients are added, never averaged, and the result is that of one
process on the union of the data.
"""

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from groupwise.engines.base import Engine


class DistributedEngine(Engine):
    """Sums over the ranks of the default process group, which it joins and leaves.

    Args:
        device: type of the tensors to be summed, "cpu" or "cuda".
    """

    def __init__(self, device: str = "cpu") -> None:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum of the tensor over all ranks, without gradient."""
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over all ranks, in one exchange; a missing gradient counts as 0."""
        trained = [p for p in parameters if p.requires_grad]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])
        dist.all_reduce(flat)
        for parameter, part in zip(trained, torch.split(flat, [p.numel() for p in trained]), strict=True):
            parameter.grad = part.view_as(parameter)

    def broadcast(self, module: nn.Module) -> None:
        """Make every rank's parameters and buffers those of rank 0."""
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), src=0)

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def from_environment(device: str = "cpu") -> Engine:
    """The engine that the launcher asks for: distributed under ``torchrun``, else a single process.

    Args:
        device: type of the tensors to be summed, "cpu" or "cuda". Each process takes the GPU of its local rank as its
            current one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Engine()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return DistributedEngine(device)
