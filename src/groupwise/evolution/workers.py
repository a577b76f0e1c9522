"""Processes that train members, each one at a time."""

import gc
import logging
import os
import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import cloudpickle
import torch

from groupwise import plugins
from groupwise.errors import MemberError
from groupwise.evolution.member import Round, play
from groupwise.system import processes
from groupwise.training.components import UserObjects
from groupwise.training.running import peak_memory

log = logging.getLogger(__name__)

MAX_CRASHES = 3
"""Of a member in one round; then the search ends."""


class Answer(NamedTuple):
    """What became of a round."""

    result: dict[str, Any] | None
    failure: str = ""
    """Why there is no result."""
    peak_mib: float = 0.0
    """Peak memory of the process."""


Worker = TypeVar("Worker")


class Workers(ABC, Generic[Worker]):
    """A pool whose workers may die. A member that was lost continues from its last checkpoint.

    Args:
        count: members at once. None: as many as there is room for.
        given: Python objects of all runs.
        output: file for what the runs print.
    """

    def __init__(self, count: int | None, given: UserObjects, output: Path) -> None:
        self.count = count
        self.output = output
        self._payload = plugins.pickled(given)
        self._busy: dict[Worker, Round] = {}

    def run(self, rounds: Sequence[Round]) -> Iterator[tuple[Round, dict[str, Any]]]:
        """Results as they come.

        Raises:
            MemberError: a member failed, or its process died, ``MAX_CRASHES`` times; others are waited for first.
        """
        waiting, lost = list(rounds), ""
        failures = dict.fromkeys((task.folder for task in rounds), 0)
        while waiting or self._busy:
            while waiting and (self.count is None or len(self._busy) < self.count) and self._has_room():
                task = waiting.pop(0)
                self._busy[self._begin(task)] = task
            for worker, answer in self._answers():
                task = self._busy.pop(worker)
                if answer.result is not None:
                    yield task, answer.result
                    continue
                failures[task.folder] += 1
                log.warning("%s failed (time %d): %s", task.folder.name, failures[task.folder], answer.failure)
                if failures[task.folder] < MAX_CRASHES:
                    waiting.insert(0, task)
                else:
                    lost = f"{task.folder} failed {MAX_CRASHES} times in round {task.number + 1}: {answer.failure}"
        if lost:
            raise MemberError(f"{lost}; {self.output} has more; fix: remove the cause, then resume the population")

    @abstractmethod
    def _begin(self, task: Round) -> Worker:
        """Who plays it from now on."""

    @abstractmethod
    def _answers(self) -> Iterable[tuple[Worker, Answer]]:
        """Of busy workers; waits for at least one."""

    @abstractmethod
    def close(self) -> None:
        """End all workers."""

    def _has_room(self) -> bool:
        return True


class _Process(NamedTuple):
    process: BaseProcess
    connection: Any


class Processes(Workers[_Process]):
    """Processes of this machine, fewer where memory is short."""

    def __init__(self, count: int, given: UserObjects, output: Path) -> None:
        super().__init__(count, given, output)
        self._idle: list[_Process] = []
        self._peak_mib = 0.0

    def close(self) -> None:
        """End all processes."""
        for worker in (*self._idle, *self._busy):
            processes.kill(worker.process)

    def _begin(self, task: Round) -> _Process:
        worker = self._idle.pop() if self._idle else self._start()
        worker.connection.send(task)
        return worker

    def _start(self) -> _Process:
        ours, theirs = processes.context().Pipe()
        args = (theirs, self._payload, tuple(plugins.loaded()), str(self.output))
        process = processes.start(_work, *args, name="groupwise member", daemon=False)
        theirs.close()
        return _Process(process, ours)

    def _answers(self) -> Iterator[tuple[_Process, Answer]]:
        ready = connection.wait([worker.connection for worker in self._busy])
        for worker in [worker for worker in self._busy if worker.connection in ready]:
            yield worker, self._receive(worker)

    def _receive(self, worker: _Process) -> Answer:
        """The answer of a worker, which is idle again unless it died."""
        try:
            answer: Answer = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(1.0)
            processes.kill(worker.process)
            return Answer(None, f"its process ended with exit code {worker.process.exitcode}")
        self._idle.append(worker)
        self._peak_mib = max(self._peak_mib, answer.peak_mib)
        return answer

    def _has_room(self) -> bool:
        """Whether another process fits in memory: as much as the largest so far."""
        meminfo = Path("/proc/meminfo")
        found = re.search(r"MemAvailable:\s*(\d+) kB", meminfo.read_text()) if meminfo.is_file() else None
        return not self._busy or found is None or int(found[1]) / 1024 > 1.2 * self._peak_mib


@cache
def _prepare(plugin_files: tuple[str, ...]) -> None:
    """Make this process ready for rounds, once."""
    torch.set_num_threads(1)
    plugins.load(list(map(Path, plugin_files)))


def answered(task: Round, payload: bytes, plugin_files: tuple[str, ...]) -> Answer:
    """The result of a round, or its error, which is printed, too.

    Args:
        payload: the Python objects of the runs. Each round has its own, since training changes a policy.
    """
    try:
        _prepare(plugin_files)
        result = play(task, cloudpickle.loads(payload))
        return Answer(result, peak_mib=peak_memory(torch.device("cpu")).get("peak_memory_mib", 0.0))
    except Exception as error:  # whatever it is, the parent decides
        traceback.print_exc()
        return Answer(None, f"{type(error).__name__}: {error}")
    finally:
        gc.collect()  # parts of a run refer to each other: its model would stay until the next one is loaded


def _work(requests: Any, payload: bytes, plugin_files: tuple[str, ...], output: str) -> None:
    """The main function of a worker: answer each round."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            requests.send(answered(requests.recv(), payload, plugin_files))
