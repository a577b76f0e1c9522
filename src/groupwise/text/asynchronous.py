"""Asynchronous collection: servers write the next rollouts while the learner updates.

At most ``max_staleness + 1`` rollouts are unfinished or untrained. So staleness is bounded by pacing, and nothing is dropped.
One thread does everything with the servers, in order: the weights of an iteration, then the rollout that lies ``max_staleness``
ahead. So the weights that write a rollout follow from its number, not from timing. With ``in_flight_updates`` each rollout has
a thread of its own: servers load weights as soon as they are saved, and go on with what they write.
"""

import time
from collections import Counter, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from groupwise.config.generation import ServerGenerationCfg
from groupwise.text.served import ServedCollector
from groupwise.text.transcripts import Transcript


class Written(NamedTuple):
    """A rollout that servers have written; seconds are those of ``time.perf_counter``."""

    groups: list[list[Transcript]]
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
        self._threads = ThreadPoolExecutor(
            self.max_staleness + 1 if how.in_flight_updates else 1, "groupwise generation"
        )
        self._queue: deque[Future[Written]] = deque()
        self._last_taken = self._last_end = time.perf_counter()

    def close(self) -> None:
        """End what the servers write, and the threads."""
        for ahead in self._queue:
            ahead.cancel()
        self.generator.close()
        self._threads.shutdown()
        super().close()

    def forget(self) -> None:
        """Drop what is written ahead; it is asked for again."""
        for ahead in self._queue:
            ahead.cancel()
        wait(self._queue)
        self._queue.clear()
        super().forget()  # last, as these may have loaded weights

    def _give_weights(self) -> None:
        """Save the weights, and queue that the servers load them and write rollouts by them."""
        for ahead in self._queue:
            if ahead.done() and (error := ahead.exception()):
                raise error
        self.generator.save(self.iteration)
        for number in range(len(self._queue), self.max_staleness + 1):
            groups = self._open(self._cfg.num_prompts, ahead=number)
            self._queue.append(self._threads.submit(self._write_ahead, groups, self.iteration))

    def _write_ahead(self, groups: list[list[Transcript]], weights: int) -> Written:
        """The groups, begun by these weights or later ones."""
        begun = time.perf_counter()
        self.generator.load(weights)
        loaded = time.perf_counter()
        return Written(self._write(groups), begun, loaded, time.perf_counter())

    def _written(self, count: int, first: int) -> list[list[Transcript]]:
        """The oldest rollout of the queue."""
        asked, ready = time.perf_counter(), sum(ahead.done() for ahead in self._queue)
        found = self._queue[0].result()
        self._queue.popleft()
        now, ended = time.perf_counter(), max(found.ended, self._last_end)
        waited = max(0.0, found.begun - self._last_end)  # rollouts in flight overlap
        self._numbers = {
            "rollout/sync_seconds": found.loaded - found.begun,
            "time/queue_length": float(ready),
            "time/learner_idle_fraction": (now - asked) / (now - self._last_taken),
            "time/server_idle_fraction": waited / (ended - self._last_end) if waited else 0.0,
        }
        self._numbers |= self._staleness([member for group in found.groups for member in group])
        self._last_taken, self._last_end = now, ended
        return found.groups

    def _staleness(self, members: list[Transcript]) -> dict[str, float]:
        """Updates since the policy that generated the tokens: their mean, and the share of each number."""
        versions = (version for member in members for version in member.policy_version if version >= 0)
        ages = Counter(self.iteration - version for version in versions)
        assert 0 <= min(ages) <= max(ages) <= self.max_staleness  # others are an error before
        total = ages.total()
        shares = {f"rollout/staleness_{age}": ages[age] / total for age in range(self.max_staleness + 1)}
        return {"rollout/staleness": sum(age * count for age, count in ages.items()) / total} | shares
