"""The gradient of a micro-batch as one function, compiled by ``torch.compile``.

A small minibatch takes some sixty operations, whose overhead is larger than their work. Compiled, the gradient of 256 rows
of CartPole takes a third to a quarter of the time (``benchmarks/README.md``), after some seconds of compiling.
"""

import copy
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.algorithms.grpo import GRPO
from groupwise.algorithms.losses import finest_unit
from groupwise.algorithms.ppo import PPO
from groupwise.data.rollout import Nested
from groupwise.data.spaces import subspaces
from groupwise.errors import SlowPathWarning
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.base import has_hooks
from groupwise.speed.flat import FlatAdam, FlatParameters

log = logging.getLogger(__name__)

WORTH_STEPS = 20_000
"""Optimiser steps that pay for compiling: it takes 4 to 12 seconds, and each step saves half a millisecond or more."""

OPTIONS: dict[str, Any] = {
    "cpp_wrapper": True,  # a call from C++ has less overhead
    "cpp.use_decompose_tanh": True,  # the compiler's own takes six times as long
    "compile_threads": 1,  # in this process
}
"""Of ``torch.compile``."""

_TOLERANCE = 1e-3
"""Of the gradient's norm: a compiled gradient that differs by more from the reference is not used."""

Batch = dict[str, Nested]
Built = TypeVar("Built")


def why_not_compiled(algorithm: BaseAlgorithm) -> str | None:
    """What keeps the loss from being a function of parameters, buffers and micro-batch alone; None if nothing does."""
    cfg, policy = algorithm.cfg, algorithm.policy
    if not isinstance(algorithm.optimizer, FlatAdam):
        return "parameters are many or of several types, or the optimiser is not Adam"
    known = type(algorithm).loss in (PPO.loss, GRPO.loss) and type(algorithm).backward is BaseAlgorithm.backward
    if not known or type(policy).evaluate is not ActorCritic.evaluate:
        return "the loss or the policy's scores are a subclass's own"
    assert isinstance(policy, ActorCritic)
    if subspaces(policy.observation_space) is not None:
        return "observations have several parts"
    if policy.device.type != "cpu" or any(True for _ in policy.encoder.parameters()):
        return "networks are large or not on a CPU"
    if finest_unit(cfg.objective) != "transition" or algorithm.entropy.adaptive:
        return "the objective looks at whole episodes, or changes its entropy bonus"
    if algorithm.range_schedules is not None:
        return "the clip range has a schedule"
    if cfg.objective.old_log_prob == "recomputed" or has_hooks(policy):
        return "old_log_prob is recomputed, or there are hooks"
    return None


def compiled_gradient(algorithm: BaseAlgorithm) -> "CompiledBackward | None":
    """A compiled ``backward``, for ``BaseAlgorithm(gradient=compiled_gradient)``; None where it cannot be compiled."""
    return CompiledBackward(algorithm) if why_not_compiled(algorithm) is None else None


def compiled_for(function: Any, example: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """``function`` compiled ahead of time for arguments like ``example``.

    Sizes are constants unless marked as dynamic, whatever was compiled in this process before, so results are the same.

    Each call of ``torch.compile`` looks for a compiled version first: 124 us in place of 105 for a minibatch of HalfCheetah.
    """
    compiled: Any = torch.compile(function, fullgraph=True, dynamic=False, options=OPTIONS | options)
    try:
        found = compiled.aot_compile((tuple(example), {}))
    except Exception:  # torch asks for a second try where a number differs from that of an earlier compilation
        found = compiled.aot_compile((tuple(example), {}))
    found.disable_guard_check()  # what may change is checked here, in a tenth of the time
    return found  # type: ignore[no-any-return]


def compiled_or_none(what: str, build: Callable[[], Built]) -> Built | None:
    """What ``build`` compiles and compares with the reference; None where that fails, with a warning."""
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.no_grad():
            warnings.simplefilter("ignore")  # the compiler's own
            built = build()
    except Exception as error:  # the compiler raises errors of any type
        why = str(error).strip().split("\n")[0][:300]
        warnings.warn(
            f"{what} are not compiled ({type(error).__name__}: {why}); fix: a C++ compiler on the PATH, or speed='off'",
            SlowPathWarning,
            stacklevel=5,
        )
        return None
    log.debug("%s are compiled", what)
    return built


class CompiledBackward:
    """``algorithm.backward``, compiled at the first micro-batch.

    Where it cannot be compiled, or gives another gradient, a warning gives the reason, and the reference is used.
    """

    def __init__(self, algorithm: BaseAlgorithm) -> None:
        assert isinstance(algorithm.optimizer, FlatAdam)
        self._algorithm = algorithm
        self._flat = algorithm.optimizer.flat
        self._vector = self._flat.vector.detach()
        self._function: _Gradient | None = None
        self._compiled: Callable[..., tuple[Tensor, Tensor]] | None = None
        self.failed = False
        """Whether it cannot be compiled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompiledBackward":
        """The compiled function reads this policy's buffers, so the copy compiles its own."""
        copied = memo[id(self)] = object.__new__(CompiledBackward)
        copied._algorithm = copy.deepcopy(self._algorithm, memo)
        copied._flat = copy.deepcopy(self._flat, memo)
        copied._vector = copied._flat.vector.detach()
        copied._function = copied._compiled = None
        copied.failed = False
        return copied

    def __call__(self, batch: Batch) -> Float[Tensor, " metric"]:
        """Add the gradient of a micro-batch to that of the parameters; returns the sums of its metrics."""
        if self._compiled is None and not self.failed:
            self._compile(batch)
        function = self._function
        # compiled for a number of elements that is not 1
        if self._compiled is None or function is None or len(batch["loss_mask"]) < 2 or not function.fits(batch):
            return BaseAlgorithm.backward(self._algorithm, batch)
        with torch.no_grad():
            gradient, metrics = self._compiled(self._vector, *function.values(batch))
            self._flat.gradient.add_(gradient)
        return metrics

    def _compile(self, batch: Batch) -> None:
        function = _Gradient(self._algorithm, self._flat, batch)
        vector, rows = self._vector, len(batch["loss_mask"])

        def build() -> Callable[..., tuple[Tensor, Tensor]]:
            example = function.values(function.example(batch))
            for value in example:
                torch._dynamo.mark_dynamic(value, 0)
            compiled = compiled_for(function.compute, [vector, *example])
            for size in (rows, rows + 1):
                values = function.values(_resized(batch, max(size, 2)))
                _check(compiled(vector, *values)[0], function.compute(vector, *values)[0])
            return compiled

        self._function, self._compiled = function, compiled_or_none("updates", build)
        self.failed = self._compiled is None


class _Gradient:
    """The gradient and the metrics of a micro-batch as a function of tensors."""

    def __init__(self, algorithm: BaseAlgorithm, flat: FlatParameters, batch: Batch) -> None:
        names = {id(parameter): f"policy.{name}" for name, parameter in algorithm.policy.named_parameters()}
        self._sizes = flat.sizes
        self._shapes = {names[id(parameter)]: parameter.shape for parameter in flat.parameters}
        self._keys = dict.fromkeys(batch).keys()
        self.compute = _differentiated(_Loss(algorithm), self._shapes, self._sizes, list(batch))

    def values(self, batch: Batch) -> list[Tensor]:
        """The inputs besides the vector."""
        return [batch[key].contiguous() for key in self._keys]

    def fits(self, batch: Batch) -> bool:
        """Whether a micro-batch has the keys that this was compiled for; shapes and types follow from the buffer's check."""
        return batch.keys() == self._keys

    def example(self, batch: Batch) -> Batch:
        """About as many elements; not as many as another dimension has, for equal sizes would be taken as equal for ever."""
        others = {width for value in batch.values() for width in value.shape[1:]}
        others |= {width for shape in self._shapes.values() for width in shape} | {sum(self._sizes)}
        rows = max(len(batch["loss_mask"]), 2)
        return _resized(batch, next(number for number in count(rows) if number not in others))


def _differentiated(
    module: nn.Module, shapes: dict[str, torch.Size], sizes: list[int], keys: list[str]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A function of the parameters' vector and a micro-batch's values: the gradient, and the sums of the metrics."""

    def compute(vector: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        batch = dict(zip(keys, values, strict=True))

        def loss(vector: Tensor) -> tuple[Tensor, Tensor]:
            parts = zip(shapes.items(), torch.split(vector, sizes), strict=True)
            parameters = {name: part.view(shape) for (name, shape), part in parts}
            return torch.func.functional_call(module, parameters, (batch,))  # type: ignore[no-any-return]

        gradient, (_, metrics) = torch.func.grad_and_value(loss, has_aux=True)(vector)
        return gradient, metrics

    return compute


class _Loss(nn.Module):
    """``loss_and_metrics`` where ``functional_call`` can replace the policy's parameters."""

    def __init__(self, algorithm: BaseAlgorithm) -> None:
        super().__init__()
        self.policy = algorithm.policy
        self._loss_and_metrics = algorithm.loss_and_metrics

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._loss_and_metrics(batch)


def _resized(batch: Batch, rows: int) -> Batch:
    """So many elements, the same ones again where there are fewer."""
    return {key: value[torch.arange(rows) % len(value)] for key, value in batch.items()}


def _check(found: Tensor, expected: Tensor) -> None:
    norm = float(expected.norm())
    if math.isfinite(norm) and not float((found - expected).norm()) <= _TOLERANCE * norm + 1e-6:
        raise RuntimeError(f"the compiled gradient differs from the reference, whose norm is {norm:.3g}")
