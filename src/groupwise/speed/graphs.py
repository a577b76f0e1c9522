"""CUDA graphs: networks and simulators of small kernels spend nearly all their time on launching them.

Replay           a function, for the graphs below and for decoding
RolloutGraph     all steps of a rollout of a torch environment
gradient_graph   the gradient of a micro-batch
adam_graph       clipping, and the optimiser's step

A graph reads and writes tensors at fixed places, so inputs are copied into tensors of its own, and results out of them. On a CPU
nothing is captured: the same code calls the function in place of a replay.
"""

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any
from weakref import proxy

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.algorithms.memory import Batch
from groupwise.collectors.torch import TorchCollector
from groupwise.collectors.vector import RolloutWriter
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.errors import SlowPathWarning
from groupwise.speed.control import FlatAdam, first_line, flat_adam, has_pure_loss

log = logging.getLogger(__name__)


class Replay:
    """A function without arguments, whose kernels are captured once.

    Args:
        generator: that it draws from.
        check: find out first whether it waits for the device.

    Raises:
        Exception: it cannot be captured.
    """

    def __init__(
        self,
        function: Callable[[], Any],
        device: torch.device,
        generator: torch.Generator | None = None,
        *,
        check: bool = True,
    ) -> None:
        self._results: Any = None
        if device.type == "cuda":
            self._replay: Callable[[], Any] = self._captured(function, generator, check).replay
        else:
            self._replay = function

    def __call__(self) -> Any:
        """The results; on a GPU at the same places each time."""
        found = self._replay()
        return found if self._results is None else self._results

    def _captured(
        self, function: Callable[[], Any], generator: torch.Generator | None, check: bool
    ) -> torch.cuda.CUDAGraph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        mode, current = torch.cuda.get_sync_debug_mode(), torch.cuda.current_stream()
        drawn = None if generator is None else generator.get_state()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream), warnings.catch_warnings():
                function()  # loads kernels and makes workspaces
                warnings.simplefilter("ignore")  # the mode is a prototype
                if check:
                    torch.cuda.set_sync_debug_mode("error")
                    function()  # a wait for the device harms nothing here; during a capture it breaks the generators
                    torch.cuda.set_sync_debug_mode(mode)
            current.wait_stream(stream)
            if generator is not None:
                graph.register_generator_state(generator)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._results = function()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own
            torch.cuda.set_sync_debug_mode(mode)
            if generator is not None and drawn is not None:
                generator.set_state(drawn)
        return graph


# --- all steps of a rollout ---

LONGEST = 512
"""Steps of a rollout; a graph of more would take seconds to capture, and gigabytes."""
MOST_IN_A_ROW = 3
"""Rollouts in a row that may each need a new graph."""


class RolloutGraph:
    """``collector.window``, captured once and replayed for each rollout: ``TorchVectorCollector(graph=RolloutGraph)``.

    It is captured anew if tensors of the policy or the environment moved, or an attribute of the environment changed. Where it
    cannot be captured, a warning gives the reason, and the method is used.
    """

    def __init__(self, collector: TorchCollector) -> None:
        self._collector = proxy(collector)  # which holds this graph
        self._constants: list[Any] = []
        self._replay: Replay | None = None
        self._in_a_row = 0
        self.captures = 0
        """Number of graphs that were made."""
        self.failure = ""
        """Reason for which there is none."""

    @torch.inference_mode()
    def __call__(self, writer: RolloutWriter, num_steps: int, *inputs: Any) -> Any:
        """Fill a rollout; returns the results of ``collector.window``."""
        constants = [writer.rollout.shape, *self._found()]
        if not self._reason(num_steps):
            self._in_a_row = self._in_a_row + 1 if constants != self._constants else 0
            if self._in_a_row:
                self._capture(writer, num_steps, inputs)
                self._constants = constants
        if (why := self._reason(num_steps)) or self._replay is None:
            message = f"rollouts are not replayed as a CUDA graph: {why}; speed='off' is silent"
            warnings.warn(message, SlowPathWarning, stacklevel=4)
            return self._collector.window(writer, num_steps, *inputs)
        _copy(inputs, self._inputs)
        results = self._replay()
        _copy(self._writer.rollout, writer.rollout)
        writer.reports = self._writer.reports
        return tree_map(_clone, results)

    def _reason(self, num_steps: int) -> str:
        """Reason for using the method; empty: there is none."""
        if self._collector.is_heard:
            return "on_step of a callback is called after every step"
        return f"num_steps={num_steps} is more than {LONGEST}" if num_steps > LONGEST else self.failure

    def _found(self) -> list[Any]:
        """Facts that a graph has as constants: places of tensors, and the environment's attributes."""
        policy, env = self._collector.policy, self._collector.env
        places = [tensor.data_ptr() for tensor in chain(policy.parameters(), policy.buffers())]
        attributes = {name: value for name, value in vars(env).items() if name != "rows"}
        return [*places, *((name, _constant(value)) for name, value in attributes.items())]

    def _capture(self, writer: RolloutWriter, num_steps: int, inputs: tuple[Any, ...]) -> None:
        collector, self._replay = self._collector, None  # frees its memory
        if self._in_a_row > MOST_IN_A_ROW:
            self.failure = "attributes of the environment, or tensors of the policy, are others in every rollout"
            return
        self._inputs = tree_map(_clone, inputs)
        self._writer = RolloutWriter(writer.rollout.clone(), collector.policy)
        try:
            window = lambda: collector.window(self._writer, num_steps, *self._inputs)  # noqa: E731
            self._replay = Replay(window, collector.env.device, collector.generator)
        except Exception as error:  # CUDA raises errors of several types
            self.failure = first_line(error)
            return
        self.captures += 1
        log.debug("rollouts of %d steps are replayed as one CUDA graph", num_steps)


# --- the gradient of a micro-batch ---


def gradient_graph(algorithm: BaseAlgorithm) -> "GradientGraph | None":
    """A ``backward`` that is replayed, for ``BaseAlgorithm(gradient=gradient_graph)``; None unless the loss is pure."""
    return GradientGraph(algorithm) if has_pure_loss(algorithm) else None


class GradientGraph:
    """``algorithm.backward``, captured for each of a few sizes; micro-batches are filled up with elements of weight 0.

    Where it cannot be captured, a warning gives the reason, and the method is used.
    """

    def __init__(self, algorithm: BaseAlgorithm) -> None:
        assert isinstance(algorithm.optimizer, FlatAdam)
        self._algorithm = algorithm
        self._flat = algorithm.optimizer
        self._graphs: dict[tuple[Any, ...], tuple[Batch, list[list[str]], Replay]] = {}
        self._cfg = algorithm.cfg
        self.failed = False
        """Whether it cannot be captured."""

    def __call__(self, batch: Batch) -> Float[Tensor, " metric"]:
        """Add the gradient of a micro-batch to that of the parameters; returns the sums of its metrics."""
        if self._algorithm.cfg is not self._cfg:  # its numbers are constants
            self._graphs, self._cfg = {}, self._algorithm.cfg
        count = len(batch["loss_mask"])
        size = filled_up(count)
        key = (size, *batch)
        if key not in self._graphs and not self.failed:
            self._capture(key, batch, size)
        if self.failed:
            return BaseAlgorithm.backward(self._algorithm, batch)
        static, alike, replay = self._graphs[key]
        for names in alike:  # one kernel for those of a type
            torch._foreach_copy_([static[name][:count] for name in names], [batch[name] for name in names])
        for name in ("loss_mask", "weight", "share") if count < size else ():
            static[name][count:].zero_()
        metrics: Tensor = replay()
        return metrics.clone()

    def _capture(self, key: tuple[Any, ...], batch: Batch, size: int) -> None:
        gradient, device = self._flat.gradient.clone(), self._flat.gradient.device
        static = {name: value[torch.arange(size, device=device) % len(value)] for name, value in batch.items()}

        def backward() -> Tensor:
            loss, metrics = self._algorithm.loss_and_metrics({**static})
            self._flat.add_gradient(loss)
            return metrics

        try:
            types = {value.dtype for value in static.values()}
            alike = [[name for name, value in static.items() if value.dtype == kind] for kind in types]
            self._graphs[key] = static, alike, Replay(backward, device)
            log.debug("gradients of %d elements are replayed as one CUDA graph", size)
        except Exception as error:  # CUDA raises errors of several types
            self.failed = True
            _warn(error)
        self._flat.gradient.copy_(gradient)


def filled_up(count: int) -> int:
    """The size that ``count`` elements are filled up to, by an eighth at most; powers of two stay."""
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


# --- the optimiser ---


def adam_graph(cfg: AlgorithmCfg, parameters: Sequence[nn.Parameter]) -> FlatAdam | None:
    """Adam whose steps are replayed, for ``BaseAlgorithm(optimizer=adam_graph)``; None where ``flat_adam`` is."""
    return flat_adam(cfg, parameters, AdamGraph)


class AdamGraph(FlatAdam):
    """``FlatAdam`` with a graph for clipping and one for the step. The learning rate, which changes, is read in float32.

    Where they cannot be captured, a warning gives the reason, and the methods are used.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        super().__init__(parameters, group)
        self._graphs: dict[Any, Callable[[], Any]] = {}
        self.rate = torch.zeros((), device=self.gradient.device)
        self._filled = 0.0

    def clip(self, limit: float | None) -> Float[Tensor, ""]:
        """Clip the gradient's norm; returns the old one."""
        self._replay(limit, partial(super().clip, limit))
        return self._norm.clone()

    def step(self) -> None:
        """One step along the gradient, or none if the norm that ``clip`` found is not finite."""
        group = self.param_groups[0]
        if self.rate is not None and group["lr"] != self._filled:
            self._filled = group["lr"]
            self.rate.fill_(self._filled)
        constants = {name: value for name, value in group.items() if name not in ("params", "lr")}
        self._replay(repr(constants), super().step)

    def _replay(self, key: Any, method: Callable[[], Any]) -> None:
        if key not in self._graphs:
            tensors = [self.vector.detach(), self.gradient, self._norm, self._refused, *self.state.values()]
            before = [tensor.clone() for tensor in tensors]
            try:
                self._graphs[key] = Replay(method, self.gradient.device)
            except Exception as error:  # CUDA raises errors of several types
                self._graphs[key] = method
                _warn(error)
            torch._foreach_copy_(tensors, before)
        self._graphs[key]()


def _warn(error: Exception) -> None:
    """Say why the method takes the place of a graph in updates."""
    message = f"updates are not replayed as a CUDA graph: {first_line(error)}; speed='off' is silent"
    warnings.warn(message, SlowPathWarning, stacklevel=5)


def _constant(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr()
    return value if isinstance(value, bool | int | float | str | None) else id(value)


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _copy(values: Any, places: Any) -> None:
    """Copy the tensors of a tree into those of another one."""
    for place, value in zip(tree_leaves(places), tree_leaves(values), strict=True):
        place.copy_(value)
