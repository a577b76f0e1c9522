"""A rollout of a torch environment as one CUDA graph: a simulator of small kernels spends nearly all its time on launching them."""

import logging
import warnings
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from groupwise.collectors.torch import TorchCollector
from groupwise.collectors.vector import RolloutWriter
from groupwise.errors import SlowPathWarning

log = logging.getLogger(__name__)

LONGEST = 512
"""Steps of a rollout; a graph of more would take seconds to capture, and gigabytes."""
MOST_IN_A_ROW = 3
"""Rollouts in a row that may each need a new graph."""


class RolloutGraph:
    """``collector.window``, captured once and replayed for each rollout: ``TorchVectorCollector(graph=RolloutGraph)``.

    A graph reads and writes tensors at fixed places. So inputs are copied into tensors of its own, and results out of them. It is
    captured anew if tensors of the policy or the environment moved, or an attribute of the environment changed. Where it cannot
    be captured, a warning gives the reason, and the method is used. On a CPU nothing is captured: the same code calls the method
    in place of a replay.
    """

    def __init__(self, collector: TorchCollector) -> None:
        self._collector = collector
        self._constants: list[Any] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._in_a_row = 0
        self.captures = 0
        """Number of graphs that were made."""
        self.failure = ""
        """Reason for which there is none."""

    @torch.inference_mode()
    def __call__(self, writer: RolloutWriter, num_steps: int, *inputs: Any) -> Any:
        """Fill a rollout; returns the results of ``collector.window``."""
        constants = [writer.rollout.shape, *self._found()]
        if not self._reason(num_steps) and constants != self._constants:
            self._capture(writer, num_steps, inputs)
            self._constants = constants
        elif not self.failure:
            self._in_a_row = 0
        if why := self._reason(num_steps):
            message = f"rollouts are not replayed as a CUDA graph: {why}; speed='off' is silent"
            warnings.warn(message, SlowPathWarning, stacklevel=4)
            return self._collector.window(writer, num_steps, *inputs)
        _copy(inputs, self._inputs)
        if self._graph is None:
            self._results = self._window()
        else:
            self._graph.replay()
        _copy(self._writer.rollout, writer.rollout)
        writer.reports = self._writer.reports
        return tree_map(_clone, self._results)

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

    def _window(self) -> Any:
        return self._collector.window(self._writer, self._writer.rollout.shape[1] - 1, *self._inputs)

    def _capture(self, writer: RolloutWriter, num_steps: int, inputs: tuple[Any, ...]) -> None:
        self._graph = None  # frees its memory
        self._inputs = tree_map(_clone, inputs)
        self._writer = RolloutWriter(writer.rollout.clone(), self._collector.policy)
        self.captures, self._in_a_row = self.captures + 1, self._in_a_row + 1
        if self._in_a_row > MOST_IN_A_ROW:
            self.failure = "attributes of the environment, or tensors of the policy, are others in every rollout"
        elif self._collector.env.device.type == "cuda":
            self._capture_on_gpu()
        if not self.failure:
            log.debug("rollouts of %d steps are replayed as one CUDA graph", num_steps)

    def _capture_on_gpu(self) -> None:
        generator, graph = self._collector.generator, torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        drawn = generator.get_state()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._window()  # loads kernels and makes workspaces; errors of the simulator are raised here
        torch.cuda.current_stream().wait_stream(stream)
        mode = torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is a prototype
                torch.cuda.set_sync_debug_mode("error" if self.captures == 1 else mode)
            self._window()  # found here, a wait for the device harms nothing; during a capture it breaks the generators
            torch.cuda.set_sync_debug_mode(mode)
            graph.register_generator_state(generator)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._results = self._window()
            self._graph = graph
        except Exception as error:  # CUDA raises errors of several types
            self.failure = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        finally:
            torch.cuda.set_sync_debug_mode(mode)
            generator.set_state(drawn)


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
