"""Acting and stepping of torch environments on a CPU as one function, compiled by ``torch.compile``.

A step takes some 150 operations, which small simulators spend mostly on overhead. Random numbers are drawn by the same calls
from the same generators and go in as arguments, so rollouts agree with the reference to rounding.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from groupwise.collectors.base import Collector
from groupwise.collectors.torch_vector import StepOutput, TorchCollector
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.base import has_hooks
from groupwise.speed.compile import compiled_for, compiled_or_none

WORTH_STEPS = 50_000
"""Steps of every row that pay for compiling: it takes 5 to 15 seconds, and each step saves a quarter of a millisecond or more."""

_RTOL, _ATOL = 1e-3, 1e-5
"""A compiled step whose numbers differ by more from the reference is not used."""

Step: TypeAlias = Callable[..., StepOutput]


def compiled_stepper(collector: TorchCollector) -> "CompiledStepper | None":
    """A compiled ``stepper``, for ``TorchCollector(stepper=compiled_stepper)``; None where it cannot be compiled."""
    return CompiledStepper(collector) if why_not_compiled(collector) is None else None


def why_not_compiled(collector: Collector) -> str | None:
    """What keeps acting and stepping from being a function of tensors and draws alone; None if nothing does."""
    if not isinstance(collector, TorchCollector):
        return "the environment is no torch environment"
    if collector.env.device.type != "cpu" or not collector.env.traceable:
        return "the environment is not on a CPU, or takes more than operations of torch"
    if type(collector.policy) is not ActorCritic or has_hooks(collector.policy):
        return "the policy is a subclass, or has hooks"
    return None


class CompiledStepper:
    """A torch collector's ``stepper``, compiled at the first step.

    Where it cannot be compiled, or gives other results, a warning gives the reason, and the reference is used.
    """

    def __init__(self, collector: TorchCollector) -> None:
        self._step = collector.step
        self._policy = collector.policy
        self._reference = collector.reference_stepper
        self._draws: list[Callable[..., Tensor]] = []
        self._compiled: Callable[..., StepOutput] | None = None
        self.failed = False
        """Whether it cannot be compiled."""

    def __call__(self, generator: torch.Generator) -> Step:
        """What acts and steps all rows in one rollout."""
        if self.failed or has_hooks(self._policy):
            return self._reference(generator)
        return partial(self._call, generator)

    def _call(self, generator: torch.Generator, *args: Any) -> StepOutput:
        if self._compiled is None:
            return self._reference(generator)(*args) if self.failed else self._compile(generator, *args)
        draws = [draw(generator=generator) for draw in self._draws]
        return self._compiled(draws, *pytree.tree_map(torch.Tensor.contiguous, args))

    def _compile(self, generator: torch.Generator, *args: Any) -> StepOutput:
        """A step; compiles those that follow."""
        reference = partial(self._step, partial(self._policy.act, generator=generator))
        with _Draws() as draws:
            expected = reference(*args)
        # tensors of their own: the compiler takes one that comes twice as the same for ever
        example, given = pytree.tree_map(_own, (args, draws.drawn))
        step, act = self._step, self._policy.act

        def pure(draws: list[Tensor], *args: Any) -> StepOutput:
            with _Draws(draws):
                return step(act, *args)

        def build() -> tuple[Step, StepOutput]:
            # hashes need integers that wrap around
            compiled = compiled_for(pure, [given, *example], constant_and_index_propagation=False)
            found: StepOutput = compiled(given, *example)
            _check(found, expected)
            return compiled, found

        built = compiled_or_none("rollouts", build)
        self.failed = built is None
        if built is None:
            return expected
        self._compiled, found = built
        self._draws = draws.calls
        return found  # rounded as later ones, so that a resumed run is the same


class _Draws(TorchFunctionMode):
    """Records random draws, or gives what was drawn before in their place.

    Args:
        given: of each draw, in order; None: they are drawn.
    """

    def __init__(self, given: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.calls: list[Callable[..., Tensor]] = []
        self.drawn: list[Tensor] = []
        self._given = given
        self._next = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or not."""
        kwargs = kwargs or {}
        if func is not torch.rand and func is not torch.randn:
            return func(*args, **kwargs)
        if self._given is not None:
            self._next += 1
            return self._given[self._next - 1].clone()  # the caller may write into it
        result: Tensor = func(*args, **kwargs)
        self.calls.append(partial(func, *args, **{key: value for key, value in kwargs.items() if key != "generator"}))
        self.drawn.append(result.clone())
        return result


def _own(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False):
        return tensor.clone(memory_format=torch.contiguous_format)


def _check(found: Any, expected: Any) -> None:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    for number, (one, other) in enumerate(pairs):
        if other is None:
            continue
        exact = not other.is_floating_point()
        same = torch.equal(one, other) if exact else torch.allclose(one, other, rtol=_RTOL, atol=_ATOL, equal_nan=True)
        if not same:
            raise RuntimeError(f"result {number} differs from the reference")
