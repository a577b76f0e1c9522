"""No optimiser step on a gradient that is NaN or infinite, so that parameters stay finite."""

import logging
import math

import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.config.algorithm import OnNonFinite
from groupwise.errors import DivergedError
from groupwise.policies.base import Policy

log = logging.getLogger(__name__)


class GradientCheck:
    """Refuses gradients that are not finite, or raises. The norm tells: it is known anyway.

    Args:
        mode: ``AlgorithmCfg.on_nonfinite``.
    """

    def __init__(self, mode: OnNonFinite, policy: Policy) -> None:
        self._mode = mode
        self._policy = policy
        self._skipped = 0

    def passes(self, grad_norm: Float[Tensor, ""], step: str) -> bool:
        """Whether the optimiser may take the step.

        Raises:
            DivergedError: it may not, and ``mode`` is "stop".
        """
        return math.isfinite(grad_norm) or self._skip(step)

    def end_update(self) -> dict[str, Tensor]:
        """``train/skipped_steps`` of this update, where there are any."""
        skipped, self._skipped = self._skipped, 0
        return {"train/skipped_steps": torch.tensor(float(skipped))} if skipped else {}

    def _skip(self, step: str) -> bool:
        """Count a step that is not taken, and warn of the first one of an update; or raise."""
        self._skipped += 1
        found = [(name, p.grad) for name, p in self._policy.named_parameters() if p.grad is not None]
        bad = [name for name, gradient in found if not gradient.isfinite().all()]
        what = f"the gradient of {step} is {'not finite' if bad else 'too large'}"
        if 0 < len(bad) < len(found):  # else clipping made all of it NaN
            what += f" (first {bad[0]})"
        if self._mode == "stop":
            raise DivergedError.because(what)
        if self._skipped == 1:
            log.warning("%s: such steps are skipped", what)
        return False
