"""Means of the loss's metrics over an update, and how far the sampler is from the trainer."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.functional.kl import k3
from groupwise.functional.reduce import AllSum
from groupwise.policies.base import Batch

DEPTHS = (0, 128, 512, 2048, 8192, 32768)
"""Tokens of context from which on the mismatch is reported separately: errors of caches and positions grow with it."""


class UpdateStats:
    """Sums of metrics, from micro-batches to optimiser steps to the update.

    Args:
        names: of the metrics, in the order of the sums.
    """

    def __init__(self, names: Sequence[str], device: torch.device, all_sum: AllSum) -> None:
        self.steps = 0
        """Optimiser steps taken."""
        self._names = names
        self._all_sum = all_sum
        self._zeros = torch.zeros(len(names), device=device)
        self._first = self._zeros
        self._step: list[Tensor] = []
        self._taken: list[Tensor] = []
        self._norms: list[Tensor] = []

    def start_step(self) -> None:
        """Forget what was added to the current optimiser step: it begins again."""
        self._step = []

    def add(self, sums: Float[Tensor, " metric"]) -> None:
        """Add the sums of a micro-batch to the current optimiser step."""
        self._step.append(sums)

    def step_means(self) -> dict[str, Tensor]:
        """Means over the current optimiser step, on all ranks."""
        return dict(zip(self._names, self._all_sum(sum(self._step, self._zeros)).unbind(), strict=True))

    def end_step(self, grad_norm: Float[Tensor, ""]) -> None:
        """Count the current optimiser step: it will be taken."""
        if not self.steps:
            self._first = sum(self._step, self._zeros)
        self._taken += self._step
        self._norms.append(grad_norm)
        self._step = []
        self.steps += 1

    def means(self) -> dict[str, Tensor]:
        """0-dim means over the steps taken, on all ranks; 0 without steps."""
        total = torch.stack([self._zeros, *self._taken]).sum(dim=0)
        total, first = self._all_sum(torch.stack([total, self._first]))
        out = {f"train/{name}": value / max(self.steps, 1) for name, value in zip(self._names, total, strict=True)}
        out["train/grad_norm"] = torch.stack(self._norms).mean() if self._norms else total.new_zeros(())
        out["train/optimizer_steps"] = total.new_tensor(float(self.steps))
        if "approx_kl" in self._names:  # nothing has changed yet in the first step
            out["rollout/sampler_kl"] = first[self._names.index("approx_kl")]
        return out


class SamplerMismatch:
    """KL of the sampler to the trainer per token at the update's start, where the two should be the same."""

    def __init__(self, device: torch.device) -> None:
        self._edges = torch.tensor(DEPTHS[1:], device=device)
        self._sums = torch.zeros(2, len(DEPTHS), device=device, dtype=torch.float64)

    @torch.no_grad()
    def add(self, batch: Batch) -> None:
        """Add a micro-batch; ``old_log_prob`` is the trainer's."""
        mask = batch["loss_mask"]
        depth = torch.bucketize(batch["step"][mask], self._edges, right=True)
        distance = k3(batch["sample_log_prob"][mask], batch["old_log_prob"][mask]).double()
        self._sums[0].index_add_(0, depth, distance)
        self._sums[1].index_add_(0, depth, torch.ones_like(distance))

    def metrics(self, all_sum: AllSum) -> dict[str, Tensor]:
        """``rollout/sampler_kl`` over all tokens, and of each depth, 0 where there are none so deep."""
        total, count = all_sum(self._sums)
        means = total / count.clamp(min=1)
        by_depth = {
            f"rollout/sampler_kl_from_{depth}": mean for depth, mean in zip(DEPTHS, means.unbind(), strict=True)
        }
        return {"rollout/sampler_kl": total.sum() / count.sum().clamp(min=1)} | by_depth
