"""Data-parallel training: one process a rank under ``torchrun``, each with its own environments.

Losses carry weights that are global over ranks, so gradients are added, never averaged, and the result is that of one
process on the union of the data.
"""

import os
from collections.abc import Container, Iterable

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
        self.device = device
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
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

    def pool(self, metrics: dict[str, float], counts: Container[str]) -> dict[str, float]:
        """Metrics over all ranks: ``counts`` are added, other numbers are means over the ranks that have them."""
        known: list[list[str] | None] = [None] * self.world_size
        dist.all_gather_object(known, sorted(metrics))
        names = sorted({name for some in known if some for name in some})
        pairs = [(metrics.get(name, 0.0), float(name in metrics)) for name in names]
        totals = self.sum(torch.tensor(pairs, dtype=torch.float64, device=self.device)).tolist()
        return {n: total if n in counts else total / ranks for n, (total, ranks) in zip(names, totals, strict=True)}

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
