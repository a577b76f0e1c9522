"""Processes that train members, each one at a time."""

import logging
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import torch

from groupwise import plugins, processes
from groupwise.errors import MemberError
from groupwise.evolution.member import Round, play
from groupwise.training.components import UserObjects
from groupwise.training.running import peak_memory

log = logging.getLogger(__name__)

MAX_CRASHES = 3
"""Of a member in one round; then the search ends."""


class _Worker(NamedTuple):
    process: BaseProcess
    connection: Any


class _Answer(NamedTuple):
    result: dict[str, Any] | None
    failure: str = ""
    """Why there is no result."""
    peak_mib: float = 0.0
    """Peak memory of the process."""


class Workers:
    """A pool whose processes may die.

    Args:
        count: processes at once, fewer where memory is short.
        given: Python objects of all runs.
        output: file for what the runs print.
    """

    def __init__(self, count: int, given: UserObjects, output: Path) -> None:
        self.count = count
        self.output = output
        self._payload = processes.pickled(given)
        self._idle: list[_Worker] = []
        self._busy: dict[Any, tuple[_Worker, Round]] = {}
        self._peak_mib = 0.0

    def run(self, rounds: Sequence[Round]) -> Iterator[tuple[Round, dict[str, Any]]]:
        """Results as they come.

        Raises:
            MemberError: a member failed, or its process died, ``MAX_CRASHES`` times; others are waited for first.
        """
        waiting, lost = list(rounds), ""
        failures = dict.fromkeys((task.folder for task in rounds), 0)
        while waiting or self._busy:
            while waiting and len(self._busy) < self.count and (not self._busy or self._has_room()):
                worker, task = self._idle.pop() if self._idle else self._start(), waiting.pop(0)
                worker.connection.send(task)
                self._busy[worker.connection] = worker, task
            for ready in connection.wait(list(self._busy)):
                worker, task = self._busy.pop(ready)
                answer = self._receive(worker)
                self._peak_mib = max(self._peak_mib, answer.peak_mib)
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

    def close(self) -> None:
        """End all processes."""
        for worker in (*self._idle, *(worker for worker, _ in self._busy.values())):
            processes.kill(worker.process)

    def _start(self) -> _Worker:
        ours, theirs = processes.context().Pipe()
        args = (theirs, self._payload, plugins.loaded(), str(self.output))
        process = processes.start(_work, *args, name="groupwise member", daemon=False)
        theirs.close()
        return _Worker(process, ours)

    def _receive(self, worker: _Worker) -> _Answer:
        """The answer of a worker, which is idle again unless it died."""
        try:
            answer: _Answer = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join(1.0)
            processes.kill(worker.process)
            return _Answer(None, f"its process ended with exit code {worker.process.exitcode}")
        self._idle.append(worker)
        return answer

    def _has_room(self) -> bool:
        """Whether another process fits in memory: as much as the largest so far."""
        meminfo = Path("/proc/meminfo")
        found = re.search(r"MemAvailable:\s*(\d+) kB", meminfo.read_text()) if meminfo.is_file() else None
        return found is None or int(found[1]) / 1024 > 1.2 * self._peak_mib


def _work(requests: Any, payload: bytes, plugin_files: Sequence[str], output: str) -> None:
    """The main function of a worker: answer each round with its result, or an error."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    torch.set_num_threads(1)
    plugins.load(list(map(Path, plugin_files)))
    given = cloudpickle.loads(payload)
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            task = requests.recv()
            try:
                result, failure = play(task, given), ""
            except Exception as error:  # whatever it is, the parent decides
                traceback.print_exc()
                result, failure = None, f"{type(error).__name__}: {error}"
            requests.send(_Answer(result, failure, peak_memory(torch.device("cpu")).get("peak_memory_mib", 0.0)))
