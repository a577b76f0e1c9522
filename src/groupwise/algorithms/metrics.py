"""Means of the loss's metrics over an update, and how far the sampler is from the trainer."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.algorithms.losses import k3
from groupwise.functional.reduce import AllSum
from groupwise.policies.base import Batch

DEPTHS = (0, 128, 512, 2048, 8192, 32768)
"""Tokens of context from which on the mismatch is reported separately: errors of caches and positions grow with it."""


class UpdateStats:
    """Sums of metrics, from micro-batches to optimiser steps to the update.

    Args:
        names: of the metrics, in the order of the sums.
        recomputed: the trainer computes ``old_log_prob`` itself, so the sampler's can differ.
    """

    def __init__(
        self, names: Sequence[str], device: torch.device, all_sum: AllSum, *, recomputed: bool = False
    ) -> None:
        self.steps = 0
        """Optimiser steps taken."""
        self._names = names
        self._all_sum = all_sum
        self._zeros = torch.zeros(len(names), device=device)
        self._first = self._zeros
        self._step: list[Tensor] = []
        self._taken: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._sampler = torch.zeros(2, len(DEPTHS), dtype=torch.float64, device=device) if recomputed else None

    def start_step(self) -> None:
        """Forget what was added to the current optimiser step: it begins again."""
        self._step = []

    def add(self, sums: Float[Tensor, " metric"]) -> None:
        """Add the sums of a micro-batch to the current optimiser step."""
        self._step.append(sums)

    def compare_sampler(self, micro_batches: Sequence[Batch]) -> None:
        """Add what the first optimiser step tells of the sampler, before anything has changed."""
        if self._sampler is not None and not self.steps:
            self._sampler = sum(map(sampler_kl_sums, micro_batches), self._sampler)

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
        if self._sampler is not None:
            return out | sampler_kl(self._all_sum(self._sampler))
        if "approx_kl" in self._names:  # nothing has changed yet in the first step
            out["rollout/sampler_kl"] = first[self._names.index("approx_kl")]
        return out


@torch.no_grad()
def sampler_kl_sums(batch: Batch) -> Float[Tensor, "sum depth"]:
    """KL of the sampler to the trainer, summed over the tokens at each of ``DEPTHS``, and their number."""
    mask = batch["loss_mask"]
    depth = torch.bucketize(batch["step"][mask], torch.tensor(DEPTHS[1:], device=mask.device), right=True)
    distance = k3(batch["sample_log_prob"][mask], batch["old_log_prob"][mask]).double()
    sums = distance.new_zeros(2, len(DEPTHS))
    return sums.index_add(1, depth, torch.stack([distance, torch.ones_like(distance)]))


def sampler_kl(sums: Float[Tensor, "sum depth"]) -> dict[str, Tensor]:
    """``rollout/sampler_kl``, the mean over all tokens, and that of each depth; 0 where no token is so deep."""
    total, count = sums
    means = (total / count.clamp(min=1)).unbind()
    by_depth = {f"rollout/sampler_kl_from_{depth}": mean for depth, mean in zip(DEPTHS, means, strict=True)}
    return {"rollout/sampler_kl": total.sum() / count.sum().clamp(min=1)} | by_depth
