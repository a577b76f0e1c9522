"""The gradient of a minibatch as one compiled function, traced from the same ``evaluate`` and ``terms`` that run without it.

In eager torch starting a small minibatch's sixty operations takes longer than computing them. Compiled, the gradient of 64
rows takes an eighth of the time and that of 256 rows a quarter (``benchmarks/README.md``), after some seconds of compiling.
"""

import logging
import math
import warnings
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakMethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.algorithms.optim import Trained
from groupwise.algorithms.step_metrics import StepMetrics
from groupwise.engines.compiler import compile_function
from groupwise.errors import SlowPathWarning
from groupwise.policies.base import Batch, Policy

log = logging.getLogger(__name__)

WORTH_STEPS = 20_000
"""Optimiser steps that must be ahead: compiling takes 4 to 12 seconds, and each step saves half a millisecond or more."""

_ALIKE = 1e-3
"""Of the gradient's norm: a compiled gradient that differs by more from the traced function's is not used."""


class MinibatchGradient(NamedTuple):
    """What one forward and backward pass gives."""

    gradient: Float[Tensor, " parameter"]
    sums: Float[Tensor, " metric"]
    """Shares of the elements times what was said of them."""


Losses = Callable[[dict[str, Any]], tuple[Tensor, Tensor]]
"""The 0-dim loss of a minibatch, with gradient, and the sums of its metrics."""


class GradientCompiler:
    """Decides whether, and sees to it that, a policy's minibatches are computed by a ``CompiledGradient``.

    Args:
        losses: a function of parameters, buffers and batch alone, and the same for every number of elements.
        when: "auto": as soon as enough steps are known to be ahead.
    """

    def __init__(self, policy: Policy, trained: Trained, losses: Losses, *, when: str) -> None:
        self.is_on = when == "compiled"
        """Whether updates are to be compiled."""
        self._decides = when == "auto"
        # the method is the algorithm's: a strong reference would be a cycle
        self._policy, self._trained, self._losses = policy, trained, WeakMethod(losses)
        self.gradient: CompiledGradient | None = None
        """What was compiled; None also where that failed."""

    def expect(self, steps: int, progress: float) -> None:
        """Switch it on if that is worth its time.

        Args:
            steps: optimiser steps that were taken.
            progress: share of training that they were, in [0, 1]; 0 where nobody knows.
        """
        if self._decides and not self.is_on and progress > 0 and steps * (1 / progress - 1) >= WORTH_STEPS:
            self.is_on = True

    def state_dict(self) -> dict[str, bool]:
        """What was decided; a resumed run goes by it."""
        return {"is_on": self.is_on, "decides": self._decides}

    def load_state_dict(self, state: dict[str, bool]) -> None:
        """Go by what an earlier process decided."""
        self.is_on, self._decides = state["is_on"], state["decides"]

    def leave_gradient(self, minibatch: list[dict[str, Any]], said: StepMetrics) -> bool:
        """Leave the gradient of one optimiser step in the parameters, ``said`` notes the metrics; False: it cannot be compiled.

        The first step of an update compiles what was not compiled yet.
        """
        if not minibatch:  # another rank's
            return False
        if not said.steps and (self.gradient is None or self.gradient.layout != _layout(minibatch[0])):
            self.gradient = self._compile(minibatch[0])
        if self.gradient is None:
            return False
        for number, batch in enumerate(minibatch):
            gradient, sums = self.gradient(batch)
            self._trained.put_grad(gradient, add=number > 0)
            said.note_sums(sums)
        return True

    def _compile(self, batch: Batch) -> "CompiledGradient | None":
        try:
            losses = self._losses()
            assert losses is not None
            gradient = CompiledGradient(self._policy, self._trained, losses, batch)
        except Exception as error:  # the compiler raises what it likes, and whatever it is, eager torch goes on
            self.is_on = self._decides = False
            why = str(error).strip().split("\n")[0][:300]
            warnings.warn(
                f"updates run without the compiler ({type(error).__name__}: {why}); fix: a C++ compiler on the PATH, or "
                "policy.mlp_kernel='by_hand'",
                SlowPathWarning,
                stacklevel=4,
            )
            return None
        log.info("updates are compiled from here on; policy.mlp_kernel='by_hand' switches that off")
        return gradient


class CompiledGradient:
    """Of minibatches of any size.

    Args:
        trained: laid end to end.
        batch: an example.

    Raises:
        RuntimeError: what was compiled gives another gradient than what was traced.
        Exception: of any kind, from tracing or compiling.
    """

    def __init__(self, policy: Policy, trained: Trained, losses: Losses, batch: Batch) -> None:
        self.layout = _layout(batch)
        self._vector = trained.tensors[0].detach()
        self._function = _PureGradient(policy, trained, losses, list(batch))
        rows = len(batch["loss_mask"])
        constants = [self._vector, *self._function.constants]
        with warnings.catch_warnings():  # the compiler's own
            warnings.simplefilter("ignore")
            self._compiled = compile_function(self._function, self._inputs(_example(batch, constants)), sizes="any")
            for some in (rows, rows + 1):
                self._check(_cut(batch, some))

    @torch.no_grad()
    def __call__(self, batch: Batch) -> MinibatchGradient:
        """Gradient and sums of metrics of a minibatch laid out as the example."""
        inputs = self._inputs(batch)
        if len(inputs[-1]) < 2:  # traced for a number of elements that is not 1
            return MinibatchGradient(*self._function(*inputs))
        return MinibatchGradient(*self._compiled(inputs))

    def _inputs(self, batch: Batch) -> list[Tensor]:
        values = [batch[key].contiguous() for key in self._function.keys]
        return [self._vector, *self._function.constants, *values]

    def _check(self, batch: Batch) -> None:
        found, expected = self(batch).gradient, self._function(*self._inputs(batch))[0]
        norm = float(expected.norm())
        if math.isfinite(norm) and not float((found - expected).norm()) <= _ALIKE * norm + 1e-6:
            raise RuntimeError(f"the compiled gradient differs from the traced one, whose norm is {norm:.3g}")


class _PureGradient:
    """``losses``, differentiated, as a function of tensors alone."""

    def __init__(self, policy: Policy, trained: Trained, losses: Losses, keys: list[str]) -> None:
        self.keys = keys
        self._sizes = [parameter.numel() for parameter in trained.parameters]
        self._shapes = [parameter.shape for parameter in trained.parameters]
        state = dict(policy.named_parameters()) | dict(policy.named_buffers())
        names = {id(tensor): f"policy.{name}" for name, tensor in state.items()}
        self._trained = [names[id(parameter)] for parameter in trained.parameters]
        others = {names[id(tensor)]: tensor for tensor in state.values() if names[id(tensor)] not in self._trained}
        self.constants = [tensor.detach() for tensor in others.values()]
        """What the policy has besides: frozen parameters, and buffers, which change in place."""
        self._others = list(others)
        self._module = _Losses(policy, losses)

    def __call__(self, vector: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        constants, values = rest[: len(self._others)], rest[len(self._others) :]
        with torch.enable_grad():
            leaf = vector.detach().requires_grad_()
            parts = zip(torch.split(leaf, self._sizes), self._shapes, strict=True)
            state = dict(zip(self._trained, (part.view(shape) for part, shape in parts), strict=True))
            state |= dict(zip(self._others, constants, strict=True))
            batch = dict(zip(self.keys, values, strict=True))
            loss, sums = torch.func.functional_call(self._module, state, (batch,))
            (gradient,) = torch.autograd.grad(loss, leaf)
        return gradient, sums.detach()


class _Losses(nn.Module):
    """``losses`` where ``functional_call`` can put other parameters into the policy."""

    def __init__(self, policy: Policy, losses: Losses) -> None:
        super().__init__()
        self.policy = policy
        self._losses = WeakMethod(losses)

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        losses = self._losses()
        assert losses is not None
        found: tuple[Tensor, Tensor] = losses(batch)
        return found


def _example(batch: Batch, constants: list[Tensor]) -> dict[str, Tensor]:
    """About as many elements; their number is no other dimension's, for equal numbers would be taken as equal for ever."""
    rows = len(batch["loss_mask"])
    other = {width for value in batch.values() for width in value.shape[1:]}
    other |= {width for constant in constants for width in constant.shape}
    return _cut(batch, next(number for number in count(max(rows, 2)) if number not in other))


def _cut(batch: Batch, rows: int) -> dict[str, Tensor]:
    """So many elements, the same ones again where there are fewer."""
    return {key: value[torch.arange(rows) % len(value)] for key, value in batch.items()}


def _layout(batch: Batch) -> list[tuple[str, Any, Any]]:
    return [(key, getattr(value, "dtype", None), value.shape[1:]) for key, value in batch.items()]
