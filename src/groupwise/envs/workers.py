"""Rows in worker processes, which write observations and rewards into shared memory."""

import ctypes
import math
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias

import cloudpickle
import numpy as np
import numpy.typing as npt
import torch

from groupwise import plugins
from groupwise.envs.local_rows import Arrays, Layout, LocalRows, RowCfg
from groupwise.errors import EnvError

_SECONDS_TO_CLOSE = 5.0

_Column: TypeAlias = tuple[Any, tuple[int, ...], str]
"""Shared memory, which can be passed to a new process only among its arguments; shape of a row; dtype."""


class _Worker(NamedTuple):
    process: Any
    connection: Connection
    first: int
    """Number of its first row."""
    end: int


class WorkerRows:
    """``LocalRows`` of several processes. A step is one message to each process that has running rows.

    The processes are new (forkserver) rather than copies of this one, which may hold threads and a GPU.

    Raises:
        EnvError: the environment cannot be sent to a process or made there.
    """

    def __init__(self, cfg: RowCfg, layout: Layout, num_rows: int, num_workers: int) -> None:
        self._env_id = cfg.env_id
        context = get_context("forkserver")
        context.set_forkserver_preload([__name__])
        columns: dict[str, _Column] = {}
        for name, (shape, dtype) in layout.items():
            size = num_rows * math.prod(shape) * np.dtype(dtype).itemsize
            columns[name] = context.RawArray(ctypes.c_byte, size), shape, dtype
        self.arrays = _arrays(columns)
        payload = _pickled(cfg)
        bounds = np.linspace(0, num_rows, min(num_workers, num_rows) + 1).astype(int).tolist()
        self._workers: list[_Worker] = []
        for first, end in pairwise(bounds):
            ours, theirs = context.Pipe()
            args = (theirs, payload, columns, slice(first, end))
            process = context.Process(target=_work, args=args, daemon=True, name=f"groupwise rows {first}-{end - 1}")
            with _safe_path():
                process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, first, end))
        try:
            self._gather(self._workers)
        except EnvError:
            self.close()
            raise

    def step(self, rows: npt.NDArray[Any], actions: npt.NDArray[Any]) -> bool:
        """One step of these rows; whether any ended or failed."""
        self._ask("step", rows, actions)
        return any(self.arrays[name].any() for name in ("terminated", "truncated", "failed"))

    def start(self, rows: npt.NDArray[Any], start_seeds: npt.NDArray[Any], noise_seeds: npt.NDArray[Any]) -> None:
        """Start these rows."""
        self._ask("start", rows, start_seeds, noise_seeds)

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

    def _ask(self, command: str, rows: npt.NDArray[Any], *columns: npt.NDArray[Any]) -> None:
        """Send each worker its rows with their entries of the columns, and wait for the answers."""
        if not self._workers:
            raise EnvError(f"the worker processes of {self._env_id} have ended; fix: make the environment again")
        asked = []
        try:
            for worker in self._workers:
                chosen = (rows >= worker.first) & (rows < worker.end)
                if chosen.any():
                    args = (rows[chosen] - worker.first, *(column[chosen] for column in columns))
                    worker.connection.send((command, args))
                    asked.append(worker)
            self._gather(asked)
        except EnvError:
            raise
        except OSError:
            raise self._died(worker) from None
        except BaseException:  # interrupted: an unread answer would be taken for that to the next message
            self.close()
            raise

    def _gather(self, workers: Sequence[_Worker]) -> None:
        """Read all answers; then raise the first error."""
        replies: list[str | None] = []
        for worker in workers:
            try:
                replies.append(worker.connection.recv())
            except (EOFError, OSError):
                raise self._died(worker) from None
        for worker, reply in zip(workers, replies, strict=True):
            if reply is not None:
                raise EnvError(f"{self._env_id} failed in {worker.process.name}:\n{reply}")

    def _died(self, worker: _Worker) -> EnvError:
        self.close()
        return EnvError(
            f"{worker.process.name} of {self._env_id} ended with exit code {worker.process.exitcode}; its output is "
            "above; fix: a script needs `if __name__ == '__main__':` around what it runs, a simulator may have crashed "
            "or run out of memory; vectorization='sync' shows where"
        )


def _arrays(columns: dict[str, _Column]) -> Arrays:
    """Views of all rows."""
    return {name: np.frombuffer(memory, dtype).reshape(-1, *shape) for name, (memory, shape, dtype) in columns.items()}


def _work(connection: Connection, payload: bytes, columns: dict[str, _Column], rows: slice) -> None:
    """The main function of a worker: make its rows, then answer messages until the last one, None.

    An answer is None, or the traceback where the message could not be handled.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it too, and ends its workers
    torch.set_num_threads(1)
    try:
        arrays = {name: array[rows] for name, array in _arrays(columns).items()}
        local = LocalRows(cloudpickle.loads(payload), arrays, rows.start)
    except Exception:
        connection.send(traceback.format_exc())
        return
    connection.send(None)
    commands: dict[str, Callable[..., Any]] = {"step": local.step, "start": local.start}
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while (message := connection.recv()) is not None:
            command, args = message
            try:
                commands[command](*args)
                answer = None
            except Exception:
                answer = traceback.format_exc()
            connection.send(answer)
    local.close()


@contextmanager
def _safe_path() -> Iterator[None]:
    """New interpreters import nothing from the current folder before they have the path of this one."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _pickled(cfg: RowCfg) -> bytes:
    """The config for a new process; the code of plugin files, which could not be imported there, goes along."""
    with ExitStack() as stack:
        for module in plugins.modules():
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
