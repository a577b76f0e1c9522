"""Whether sampler and trainer are one policy: measured on the first minibatch's own forward pass, at no cost."""

import torch
from torch import Tensor

from groupwise.functional.kl import k3
from groupwise.functional.reduce import AllSum
from groupwise.policies.base import Batch

DEPTHS = (0, 128, 512, 2048, 8192, 32768)
"""Tokens of context from which on a depth of its own is told: errors of caches and positions grow with it."""


class Agreement:
    """KL of the sampler to the trainer per token, at an update's start, where the two should be the same."""

    def __init__(self, device: torch.device) -> None:
        self._edges = torch.tensor(DEPTHS[1:], device=device)
        self._sums = torch.zeros(2, len(DEPTHS), device=device, dtype=torch.float64)

    @torch.no_grad()
    def note(self, batch: Batch, log_prob: Tensor) -> None:
        """Take in a micro-batch that was scored by the unchanged policy."""
        mask = batch["loss_mask"]
        depth = torch.bucketize(batch["step"][mask], self._edges, right=True)
        distance = k3(batch["sample_log_prob"][mask], log_prob[mask]).double()
        self._sums[0].index_add_(0, depth, distance)
        self._sums[1].index_add_(0, depth, torch.ones_like(distance))

    def metrics(self, all_sum: AllSum) -> dict[str, Tensor]:
        """``agreement/kl`` over all tokens, and of each depth, 0 where there are none so deep."""
        total, count = all_sum(self._sums)
        means = total / count.clamp(min=1)
        by_depth = {f"agreement/kl_from_{depth}": mean for depth, mean in zip(DEPTHS, means.unbind(), strict=True)}
        return {"agreement/kl": total.sum() / count.sum().clamp(min=1)} | by_depth
