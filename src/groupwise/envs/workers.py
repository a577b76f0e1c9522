"""Rows in worker processes, which write observations and rewards into shared memory."""

import ctypes
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn, TypeAlias

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from groupwise import plugins
from groupwise.envs.local_rows import OUTCOMES, Arrays, Layout, LocalRows, RowCfg
from groupwise.errors import EnvError
from groupwise.system import processes

log = logging.getLogger(__name__)

_Column: TypeAlias = tuple[Any, tuple[int, ...], str]
"""Shared memory, which can be passed to a new process only among its arguments; shape of a row; dtype."""


class _Worker(NamedTuple):
    child: processes.Child
    first: int
    """Number of its first row."""
    end: int


class WorkerRows:
    """``LocalRows`` of several processes. A step is one message to each process that has running rows.

    A process that dies, or gives no answer in ``cfg.timeout`` seconds, is killed. With ``cfg.on_error="report"`` another
    takes its place, and all its rows have failed.

    Raises:
        EnvError: the environment cannot be sent to a process or made there.
    """

    def __init__(self, cfg: RowCfg, layout: Layout, num_rows: int, num_workers: int) -> None:
        self._cfg = cfg
        self._columns: dict[str, _Column] = {}
        for name, (shape, dtype) in layout.items():
            size = num_rows * math.prod(shape) * np.dtype(dtype).itemsize
            self._columns[name] = processes.context().RawArray(ctypes.c_byte, size), shape, dtype
        self.arrays = _arrays(self._columns)
        try:
            self._payload = plugins.pickled(cfg)
        except Exception as error:
            raise EnvError(
                f"what makes {cfg.env_id} cannot be sent to another process: {error!r}; fix: make locks, files and "
                "generators inside the callable, or vectorization='sync'"
            ) from error
        bounds = np.linspace(0, num_rows, min(num_workers, num_rows) + 1).astype(int).tolist()
        self._workers = [self._launch(first, end) for first, end in pairwise(bounds)]
        self._await_launched(self._workers)

    def step(self, rows: npt.NDArray[Any], actions: npt.NDArray[Any]) -> bool:
        """One step of these rows; whether any ended or failed."""
        self._ask("step", rows, actions)
        return any(self.arrays[name].any() for name in ("terminated", "truncated", "failed"))

    def start(self, rows: npt.NDArray[Any], start_seeds: npt.NDArray[Any], noise_seeds: npt.NDArray[Any]) -> None:
        """Start these rows."""
        self._ask("start", rows, start_seeds, noise_seeds)

    def close(self, seconds: float = processes.SECONDS_TO_CLOSE) -> None:
        """End the processes; those that do not end by themselves in that time are killed."""
        since = time.monotonic()
        for worker in self._workers:
            worker.child.send(None)
        for worker in self._workers:
            worker.child.close(since + seconds - time.monotonic())
        self._workers = []

    def _launch(self, first: int, end: int) -> _Worker:
        """A process that makes these rows; its first answer says whether it could."""
        name = f"groupwise rows {first}-{end - 1}"
        return _Worker(processes.Child(_work, self._payload, self._columns, slice(first, end), name=name), first, end)

    def _await_launched(self, workers: Sequence[_Worker]) -> None:
        lost, error = self._gather(workers, max(processes.SECONDS_TO_IMPORT, self._cfg.timeout))
        for worker, why in lost[:1]:
            self._give_up(worker, why)
        if error is not None:
            self.close()
            raise error

    def _ask(self, command: str, rows: npt.NDArray[Any], *columns: npt.NDArray[Any]) -> None:
        """Send each worker its rows with their entries of the columns, and wait for the answers."""
        if not self._workers:
            raise EnvError(f"the worker processes of {self._cfg.env_id} have ended; fix: make the environment again")
        asked = []
        try:
            for worker in self._workers:
                chosen = (rows >= worker.first) & (rows < worker.end)
                if chosen.any():
                    worker.child.send((command, rows[chosen] - worker.first, *(column[chosen] for column in columns)))
                    asked.append(worker)
            lost, error = self._gather(asked, self._cfg.timeout)
        except BaseException:  # interrupted: an unread answer would be taken for that to the next message
            self.close(0.0)
            raise
        for worker, why in lost:
            if self._cfg.on_error == "raise":
                self._give_up(worker, why)
            self._replace(worker, why)
        if error is not None:
            raise error

    def _gather(self, workers: Sequence[_Worker], seconds: float) -> tuple[list[tuple[_Worker, str]], EnvError | None]:
        """The workers that give no answer in time, with why, and the first error of the others."""
        lost, errors, since = [], [], time.monotonic()
        for worker in workers:
            try:
                _, error = worker.child.answer(seconds, since)
            except processes.LostChildError as why:
                lost.append((worker, str(why)))
                continue
            if error is not None:
                errors.append(EnvError(f"{self._cfg.env_id} failed in {worker.child.process.name}:\n{error[1]}"))
        return lost, errors[0] if errors else None

    def _replace(self, worker: _Worker, why: str) -> None:
        """Start a lost worker again; its rows have failed."""
        log.error("%s of %s %s, and was replaced", worker.child.process.name, self._cfg.env_id, why)
        worker.child.close(0.0)
        for name in OUTCOMES:
            self.arrays[name][worker.first : worker.end] = name == "failed"
        launched = self._launch(worker.first, worker.end)
        self._workers[self._workers.index(worker)] = launched
        self._await_launched([launched])

    def _give_up(self, worker: _Worker, why: str) -> NoReturn:
        process = worker.child.process
        fix = (
            "a larger env.timeout, if it is slow; vectorization='sync' shows where it hangs"
            if process.is_alive()
            else "a script needs `if __name__ == '__main__':` around what it runs, a simulator may have crashed or run out of "
            "memory; vectorization='sync' shows where"
        )
        processes.kill(process)  # closing would wait for it
        self.close()
        raise EnvError(f"{process.name} of {self._cfg.env_id} {why}; its output is above; fix: {fix}")


def _arrays(columns: dict[str, _Column]) -> Arrays:
    """Views of all rows."""
    return {name: np.frombuffer(memory, dtype).reshape(-1, *shape) for name, (memory, shape, dtype) in columns.items()}


def _work(connection: Connection, payload: bytes, columns: dict[str, _Column], rows: slice) -> None:
    """The main function of a worker."""
    torch.set_num_threads(1)
    processes.serve(connection, _local_rows(payload, columns, rows))


@contextmanager
def _local_rows(payload: bytes, columns: dict[str, _Column], rows: slice) -> Iterator[Callable[[Any], Any]]:
    """What steps and starts the rows, as a message says; they write into the columns."""
    arrays = {name: array[rows] for name, array in _arrays(columns).items()}
    local = LocalRows(cloudpickle.loads(payload), arrays, rows.start)
    commands: dict[str, Callable[..., Any]] = {"step": local.step, "start": local.start}
    yield lambda message: commands[message[0]](*message[1:])
    local.close()
