"""Rows that live in worker processes and write what they say into shared memory."""

import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.envs.registration import EnvSpec

from groupwise.envs.arrays import Layout, SharedArrays, step_arrays
from groupwise.envs.local_rows import LocalRows, RowCfg
from groupwise.errors import EnvError

_SECONDS_TO_CLOSE = 5.0


class _Reply(NamedTuple):
    """A worker's answer to one message."""

    result: Any
    extra_steps: int = 0
    failures: tuple[str, ...] = ()
    error: str | None = None
    """The traceback, if the message could not be done."""


class _Worker(NamedTuple):
    process: Any
    connection: Connection
    first: int
    """Number of its first row."""
    end: int


class WorkerRows:
    """``LocalRows`` of several processes. Each step is one message to every process that has something to do.

    Processes begin afresh (forkserver) instead of as copies of this one, which may hold threads and a GPU.

    Raises:
        EnvError: the environment cannot be sent to a process or made there.
    """

    def __init__(self, cfg: RowCfg, layout: Layout, num_rows: int, num_workers: int) -> None:
        self.extra_steps = 0
        self._env_id = cfg.env_id
        self._failures: list[str] = []
        self._extra_steps: dict[int, int] = {}
        context = _context()
        shared = SharedArrays.allocate(layout, num_rows, context)
        self.arrays = shared.arrays()
        self._of_step = step_arrays(self.arrays)
        payload = _pickled(cfg)
        bounds = np.linspace(0, num_rows, min(num_workers, num_rows) + 1).astype(int).tolist()
        self._workers: list[_Worker] = []
        for first, end in pairwise(bounds):
            ours, theirs = context.Pipe()
            args = (theirs, payload, shared, slice(first, end))
            process = context.Process(target=_work, args=args, daemon=True, name=f"groupwise rows {first}-{end - 1}")
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, first, end))
        self._home = [number for number, worker in enumerate(self._workers) for _ in range(worker.first, worker.end)]
        """Which worker each row lives in."""
        try:
            self._gather(self._workers)
        except EnvError:
            self.close()
            raise

    def step(self, rows: Sequence[int], actions: npt.NDArray[Any]) -> bool:
        """One step of these rows; whether any ended or failed. The others get reward 0 and are not done."""
        for array in self._of_step:  # workers that have nothing to do are not asked
            array.fill(0)
        self._ask("step", rows, actions)
        return any(self.arrays[name].any() for name in ("terminated", "truncated", "failed"))

    def start(self, rows: Sequence[int], start_seeds: Sequence[int], noise_seeds: Sequence[int]) -> None:
        """Start these rows."""
        self._ask("start", rows, start_seeds, noise_seeds)

    def take_failures(self) -> list[str]:
        """What is to be logged about rows that failed; each worker's first with its traceback."""
        failures, self._failures = self._failures, []
        return failures

    def forget_starts(self) -> None:
        """Drop the captured starts, so that the next episode at each resets anew."""
        for worker in self._workers:
            self._send(worker, "forget_starts")
        self._gather(self._workers)

    def close(self) -> None:
        """End the processes; those that do not end by themselves are killed."""
        for worker in self._workers:
            with suppress(OSError):
                worker.connection.send(None)
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(_SECONDS_TO_CLOSE)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []

    def _ask(
        self, command: str, rows: Sequence[int], *columns: Sequence[Any] | npt.NDArray[Any]
    ) -> list[tuple[list[int], Any]]:
        """Send each worker its rows and what the columns say about them; its places in ``rows`` and what it answered."""
        if not self._workers:
            raise EnvError(f"the worker processes of {self._env_id} have ended; fix: make the environment again")
        places_of: list[list[int]] = [[] for _ in self._workers]
        for place, row in enumerate(rows):
            places_of[self._home[row]].append(place)
        asked = [(worker, places) for worker, places in zip(self._workers, places_of, strict=True) if places]
        try:
            for worker, places in asked:
                own = [rows[place] - worker.first for place in places]
                self._send(worker, command, own, *(_take(column, places) for column in columns))
            replies = self._gather([worker for worker, _ in asked])
        except EnvError:
            raise
        except BaseException:  # interrupted: an answer left unread would be taken for that to the next message
            self.close()
            raise
        return [(places, reply.result) for (_, places), reply in zip(asked, replies, strict=True)]

    def _send(self, worker: _Worker, command: str, *args: Any) -> None:
        try:
            worker.connection.send((command, args))
        except OSError:
            raise self._died(worker) from None

    def _gather(self, workers: Sequence[_Worker]) -> list[_Reply]:
        """Everybody's answer; all are read before the first error is raised."""
        replies = [self._receive(worker) for worker in workers]
        for worker, reply in zip(workers, replies, strict=True):
            self._failures += reply.failures
            if reply.error is not None:
                raise EnvError(f"{self._env_id} failed in {worker.process.name}:\n{reply.error}")
            self._extra_steps[worker.first] = reply.extra_steps
        self.extra_steps = sum(self._extra_steps.values())
        return replies

    def _receive(self, worker: _Worker) -> _Reply:
        try:
            reply: _Reply = worker.connection.recv()
        except (EOFError, OSError):
            raise self._died(worker) from None
        return reply

    def _died(self, worker: _Worker) -> EnvError:
        self.close()
        return EnvError(
            f"{worker.process.name} of {self._env_id} ended with exit code {worker.process.exitcode}; its last words are "
            "above; fix: a script needs `if __name__ == '__main__':` around what it runs, a simulator may have crashed "
            "or run out of memory; vectorization='sync' shows where"
        )


def _context() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _take(column: Sequence[Any] | npt.NDArray[Any], places: list[int]) -> Any:
    return column[places] if isinstance(column, np.ndarray) else [column[place] for place in places]


def _work(connection: Connection, payload: bytes, shared: SharedArrays, rows: slice) -> None:
    """What a worker does: make its rows, then answer messages until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent was interrupted, too, and says when to end
    torch.set_num_threads(1)
    try:
        local = LocalRows(cloudpickle.loads(payload), shared.arrays(rows), rows.start)
    except Exception:
        connection.send(_Reply(None, error=traceback.format_exc()))
        return
    connection.send(_Reply(None))
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while (message := connection.recv()) is not None:
            connection.send(_answer(local, *message))
    local.close()


def _answer(rows: LocalRows, command: str, args: tuple[Any, ...]) -> _Reply:
    commands: dict[str, Callable[..., Any]] = {
        "step": rows.step,
        "start": rows.start,
        "forget_starts": rows.forget_starts,
    }
    try:
        result = commands[command](*args)
    except Exception:
        return _Reply(None, rows.extra_steps, error=traceback.format_exc())
    return _Reply(result, rows.extra_steps, tuple(rows.take_failures()))


def _pickled(cfg: RowCfg) -> bytes:
    """The config for a new process; code that could not be imported there (a plugin's) goes along."""
    with ExitStack() as stack:
        for module in {sys.modules[name] for name in _modules(cfg.make) if not _is_importable(name)}:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        try:
            payload: bytes = cloudpickle.dumps(cfg)
            return payload
        except Exception as error:
            raise EnvError(
                f"what makes {cfg.env_id} cannot be sent to another process: {error!r}; fix: make locks, files and "
                "generators inside the callable, or vectorization='sync'"
            ) from error


def _modules(make: Any) -> Iterator[str]:
    """Where the code of a callable is, through the partial applications around it."""
    if isinstance(make, partial):
        for inner in (make.func, *make.args):
            yield from _modules(inner)
    elif isinstance(make, EnvSpec):
        yield from _modules(make.entry_point)
    elif callable(make):
        yield make.__module__


def _is_importable(name: str) -> bool:
    package = name.partition(".")[0]
    return name == "__main__" or any(finder.find_spec(package, None) is not None for finder in sys.meta_path)
