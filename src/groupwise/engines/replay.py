"""A function that is recorded once and then replayed: on a GPU a CUDA graph starts all of its kernels at once.

A small network spends most of its time on starting kernels from Python. A graph replays addresses: the function reads what
it needs from tensors that stay where they are, leaves there what it will need next time, and takes nothing else from
Python that changes between calls.
"""

import warnings
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable
from weakref import WeakMethod

import torch
from torch import Tensor

from groupwise.errors import SlowPathWarning

Out = TypeVar("Out")

WARM_UP = 3
"""Calls that run as they stand before one is recorded, in which libraries choose kernels and take workspace."""


@runtime_checkable
class Recorder(Protocol):
    """What records a function."""

    def warm_up(self, function: Callable[[], Out]) -> Out:
        """Call the function as it will be recorded."""

    def record(
        self, function: Callable[[], Out], generators: Sequence[torch.Generator]
    ) -> tuple[Callable[[], None], Out]:
        """What replays the function, and where it leaves its results. Nothing is computed yet.

        Raises:
            RuntimeError: it cannot be recorded.
        """


class CudaRecorder:
    """Records kernels into a CUDA graph.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs, "Whole-network capture".
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def warm_up(self, function: Callable[[], Out]) -> Out:
        """Call the function on a stream of its own."""
        with torch.cuda.device(self.device):
            side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                out = function()
            torch.cuda.current_stream().wait_stream(side)
        return out

    def record(
        self, function: Callable[[], Out], generators: Sequence[torch.Generator]
    ) -> tuple[Callable[[], None], Out]:
        """The graph's replay, and its results."""
        with torch.cuda.device(self.device):
            graph: Any = torch.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            # other threads, such as one that pins memory, may go on meanwhile
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = function()
        return graph.replay, out


class Replayed(Generic[Out]):
    """A function without arguments, replayed where the device can. Its results stay good until the next call.

    Where it cannot be recorded a warning says why, and it is called as it stands from then on, as it is on a CPU.

    Args:
        name: of what it does, for that warning.
        generators: what it draws from, beside the device's own.
        recorder: None: the device's; False: none, and it is called as it stands.
    """

    def __init__(
        self,
        function: Callable[[], Out],
        device: torch.device,
        *,
        name: str,
        generators: Sequence[torch.Generator] = (),
        recorder: Recorder | Literal[False] | None = None,
    ) -> None:
        # held weakly where it is a method: whose it is holds this, and would wait for a search for cycles to be freed
        self._method = WeakMethod(function) if isinstance(function, MethodType) else lambda: function
        self.name = name
        self._generators = generators
        devices = CudaRecorder(device) if device.type == "cuda" else None
        self._recorder = devices if recorder is None else recorder or None
        self._where: list[tuple[int, torch.Size, tuple[int, ...]]] = []
        self._calls = 0
        self._replay: Callable[[], None] | None = None
        self._out: list[Out] = []

    def __call__(self, storage: Sequence[Tensor] = ()) -> Out:
        """What the function returns.

        Args:
            storage: tensors that it uses and that may be others than last time; then it is recorded anew.
        """
        if self._recorder is None:
            return self.function()
        where = [(tensor.data_ptr(), tensor.shape, tensor.stride()) for tensor in storage]
        if where != self._where:
            self.forget()
            self._where = where
        if self._calls < WARM_UP:
            self._calls += 1
            return self._recorder.warm_up(self.function)
        if self._replay is None and not self._record():
            return self.function()
        assert self._replay is not None
        self._replay()
        return self._out[0]

    def function(self) -> Out:
        """What is replayed, as it stands."""
        function = self._method()
        assert function is not None
        return function()

    @property
    def is_recorded(self) -> bool:
        """Whether calls are replayed."""
        return self._replay is not None

    def forget(self) -> None:
        """Record anew: what the function uses has moved."""
        self._where, self._calls, self._replay, self._out = [], 0, None, []

    def _record(self) -> bool:
        assert self._recorder is not None
        try:
            self._replay, out = self._recorder.record(self.function, self._generators)
        except RuntimeError as error:  # of CUDA, out of memory included
            self._recorder = None
            warnings.warn(
                f"{self.name} runs without a CUDA graph, which could not be recorded: {error}",
                SlowPathWarning,
                stacklevel=4,
            )
            return False
        self._out = [out]
        return True
