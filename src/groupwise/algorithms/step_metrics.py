"""The means of what an algorithm says of every element, over the optimiser steps of an update.

They are computed for many steps at once: of small minibatches, one by one, they take as long as the loss.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.algorithms.loss import diagnostics
from groupwise.config.algorithm import ObjectiveCfg
from groupwise.functional.reduce import AllSum
from groupwise.policies.base import Batch

KEPT = 2**18
"""Elements that wait for their means at most, to bound the memory that they take."""


class StepMetrics:
    """Of one update.

    Args:
        names: of the metrics, in the order in which ``note`` gets them.
    """

    def __init__(self, names: Sequence[str], objective: ObjectiveCfg, device: torch.device, all_sum: AllSum) -> None:
        self.steps = 0
        """Optimiser steps that were taken."""
        self._names = tuple(names)
        self._objective = objective
        self._all_sum = all_sum
        self._sums = torch.zeros(len(names), device=device)
        self._taken: list[tuple[Tensor, ...]] = []
        """What micro-batches of the steps taken said."""
        self._running: list[tuple[Tensor, ...]] = []
        """What micro-batches of the step that is being taken said."""
        self._taken_sums: list[Tensor] = []
        self._running_sums: list[Tensor] = []
        """The same of micro-batches that came as sums."""
        self._norms: list[Tensor] = []
        self._counted: list[Tensor] = []
        """Of each step taken, whether it counts."""
        self._kept = 0
        """Elements that wait for their means."""

    @torch.no_grad()
    def note(self, metrics: tuple[Tensor, ...], ratio: Tensor | None, log_prob: Tensor, batch: Batch) -> None:
        """Take in what was said of a micro-batch.

        Args:
            ratio: with it the metrics go on with ``DIAGNOSTICS``.
        """
        said = metrics if ratio is None else (*metrics, ratio, log_prob, batch["old_log_prob"])
        self._running.append(tuple(values.detach().flatten() for values in (*said, batch["share"])))
        self._kept += batch["share"].numel()
        self._has_ratio = ratio is not None

    def note_sums(self, sums: Float[Tensor, " metric"]) -> None:
        """Take in ``metric_sums`` of a micro-batch."""
        self._running_sums.append(sums)

    def of_step(self) -> dict[str, Tensor]:
        """Means over the step that is being taken, on all ranks."""
        return dict(
            zip(self._names, self._all_sum(self._summed(self._running, self._running_sums)).unbind(), strict=True)
        )

    def end_step(self, grad_norm: Tensor, taken: Tensor | None = None) -> None:
        """The step was taken; what was noted since the last one counts.

        Args:
            taken: 0-dim; where it is 0, neither the step nor what was noted counts. None: 1.
        """
        if taken is not None:
            self._running = [(*said, share * taken) for *said, share in self._running]
            self._running_sums = [sums * taken for sums in self._running_sums]
            self._counted.append(taken)
            grad_norm = grad_norm * taken
        self._taken += self._running
        self._taken_sums += self._running_sums
        self._running, self._running_sums = [], []
        self._norms.append(grad_norm.reshape(1))
        self.steps += 1
        if self._kept > KEPT:
            self._fold()

    def means(self) -> dict[str, Tensor]:
        """0-dim means over the steps taken, on all ranks, and ``grad_norm``; 0 without steps."""
        self._fold()
        steps = self.taken().clamp(min=1)
        norm = torch.cat(self._norms).sum() / steps if self._norms else self._sums.new_zeros(())
        means = self._all_sum(self._sums) / steps
        return dict(zip(self._names, means.unbind(), strict=True)) | {"grad_norm": norm}

    def taken(self) -> Float[Tensor, ""]:
        """Optimiser steps that count."""
        if self._counted:
            return torch.stack(self._counted).sum()
        return torch.full((), float(self.steps), device=self._sums.device)

    def _fold(self) -> None:
        self._sums = self._sums + self._summed(self._taken, self._taken_sums)
        self._taken, self._taken_sums, self._kept = [], [], 0

    @torch.no_grad()
    def _summed(self, noted: list[tuple[Tensor, ...]], sums: list[Tensor]) -> Float[Tensor, " metric"]:
        total = torch.stack(sums).sum(dim=0) if sums else torch.zeros_like(self._sums)
        if not noted:
            return total
        *said, share = (torch.cat(column) for column in zip(*noted, strict=True))
        return total + _sums(self._objective, tuple(said), share, self._has_ratio)


def metric_sums(
    objective: ObjectiveCfg, metrics: tuple[Tensor, ...], ratio: Tensor | None, log_prob: Tensor, batch: Batch
) -> Float[Tensor, " metric"]:
    """Shares of a micro-batch's elements times what was said of them, without gradient.

    Args:
        ratio: with it the metrics go on with ``DIAGNOSTICS``.
    """
    said = metrics if ratio is None else (*metrics, ratio, log_prob, batch["old_log_prob"])
    flat = tuple(values.detach().flatten() for values in said)
    return _sums(objective, flat, batch["share"].flatten(), ratio is not None)


def _sums(
    objective: ObjectiveCfg, said: tuple[Tensor, ...], share: Tensor, has_ratio: bool
) -> Float[Tensor, " metric"]:
    if has_ratio:
        *said, ratio, log_prob, old_log_prob = said  # type: ignore[assignment]
        said = (*said, *diagnostics(objective, ratio, log_prob, old_log_prob))
    return torch.stack(said) @ share if said else share.new_zeros(0)
