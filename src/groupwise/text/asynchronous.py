"""Asynchronous collection: servers write the next rollouts while the learner updates.

One thread does everything with the servers, in order: the weights of an iteration, then the rollout that lies
``max_staleness`` ahead. So the weights that write a rollout follow from its number, not from timing, and staleness is bounded
by pacing: nothing is dropped.
"""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any, NamedTuple

from groupwise.config.generation import ServerGenerationCfg
from groupwise.text.served import ServedCollector
from groupwise.text.transcripts import Transcript


class Written(NamedTuple):
    """A rollout that servers have written; seconds are those of ``time.perf_counter``."""

    groups: list[list[Transcript]]
    weights: int
    """Iteration of the weights that wrote it."""
    begun: float
    loaded: float
    """When the servers had their weights."""
    ended: float


class AsyncCollector(ServedCollector):
    """Has rollouts written ahead: with the one that is trained on, at most ``max_staleness + 1`` of them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        how = self._cfg.generation
        assert isinstance(how, ServerGenerationCfg)
        self.max_staleness = how.max_staleness
        self._thread = ThreadPoolExecutor(1, "groupwise generation")
        self._loading = Lock()
        self._queue: deque[Future[Written]] = deque()
        self._last_taken = self._last_end = time.perf_counter()

    def close(self) -> None:
        """End what the servers write, but not that they load weights, and the thread."""
        for ahead in self._queue:
            ahead.cancel()
        with self._loading:
            self.generator.close()
        self._thread.shutdown()
        super().close()

    def forget(self) -> None:
        """Drop what is written ahead; it is asked for again."""
        for ahead in self._queue:
            ahead.cancel()
        wait(self._queue)
        self._queue.clear()

    def _give_weights(self) -> None:
        """Save the weights, and queue that the servers load them and write rollouts by them."""
        for ahead in self._queue:
            if ahead.done() and (error := ahead.exception()):
                raise error
        self.generator.save(self.iteration)
        first = len(self._queue)
        for number in range(first, self.max_staleness + 1):
            groups = self._open(self._cfg.num_prompts, ahead=number)
            self._queue.append(self._thread.submit(self._write_ahead, groups, self.iteration, load=number == first))

    def _write_ahead(self, groups: list[list[Transcript]], weights: int, *, load: bool) -> Written:
        """The groups, written by these weights."""
        begun = time.perf_counter()
        if load:
            with self._loading:
                self.generator.load(weights)
        loaded = time.perf_counter()
        self._write(groups)
        return Written(groups, self.generator.weights, begun, loaded, time.perf_counter())

    def _written(self, count: int, first: int) -> list[list[Transcript]]:
        """The oldest rollout of the queue."""
        asked, ready = time.perf_counter(), sum(ahead.done() for ahead in self._queue)
        found = self._queue[0].result()
        self._queue.popleft()
        staleness = self.iteration - found.weights
        assert staleness <= self.max_staleness  # a completion of other weights than asked for is an error before
        now = time.perf_counter()
        self._numbers = {
            "rollout/sync_seconds": found.loaded - found.begun,
            "rollout/staleness": float(staleness),
            "time/queue_length": float(ready),
            "time/learner_idle_fraction": (now - asked) / (now - self._last_taken),
            "time/server_idle_fraction": (found.begun - self._last_end) / (found.ended - self._last_end),
        }
        self._last_taken, self._last_end = now, found.ended
        return found.groups
