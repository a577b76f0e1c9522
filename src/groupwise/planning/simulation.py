"""Asynchronous collection as a simulation of events: who waits for whom, and how old completions are. Imports no torch."""

import heapq
import random
from collections.abc import Iterator
from typing import NamedTuple


class Outcome(NamedTuple):
    """What happened from the start to the end of the last optimiser step."""

    seconds: float
    worker_idle: float
    """Share of the workers' time in which they write nothing."""
    learner_idle: float
    """Share of the time in which the learner waits for completions."""
    staleness: list[int]
    """Completions that were trained on, by the optimiser steps between the weights that wrote them and those they train."""
    submitted: int
    """Completions that were begun."""

    @property
    def trained(self) -> int:
        """Completions that were trained on."""
        return sum(self.staleness)

    @property
    def mean_staleness(self) -> float:
        """Of the completions that were trained on."""
        return sum(age * count for age, count in enumerate(self.staleness)) / self.trained


def simulate(
    lengths: Iterator[float],
    *,
    workers: int,
    batch: int,
    max_staleness: int,
    learner_seconds: float,
    steps: int,
    streaming: bool = True,
) -> Outcome:
    """The outcome of ``steps`` optimiser steps on ``batch`` completions each.

    Completions are begun in order and trained on in that order. A worker writes one at a time. At most ``batch *
    (max_staleness + 1)`` are outstanding: begun and not yet trained on. So none is older than ``max_staleness``, and with 0
    all workers wait for the learner.

    Args:
        lengths: seconds that each completion takes, in the order in which they begin.
        streaming: False: a batch begins when the one before is complete.

    Source: the staleness control of AReaL, Fu et al. 2025, https://arxiv.org/abs/2505.24298.
    """
    now, version, submitted, written, learner_starts = 0.0, 0, 0, 0.0, None
    idle, running = workers, list[tuple[float, int]]()
    born: dict[int, int] = {}
    left = dict[int, int]()  # completions of a batch that are not finished
    staleness = [0] * (max_staleness + 1)
    while version < steps:
        while idle and submitted < batch * (version + max_staleness + 1):
            begins_batch = submitted > 0 and submitted % batch == 0
            if begins_batch and not streaming and left.get(submitted // batch - 1, batch):
                break
            length = next(lengths)
            heapq.heappush(running, (now + length, submitted))
            born[submitted] = version
            written, idle, submitted = written + length, idle - 1, submitted + 1
        if learner_starts is None and left.get(version) == 0:
            learner_starts = now
            for number in range(version * batch, (version + 1) * batch):
                staleness[version - born.pop(number)] += 1
        trained_at = float("inf") if learner_starts is None else learner_starts + learner_seconds
        if running and running[0][0] < trained_at:
            now, number = heapq.heappop(running)
            left[number // batch] = left.get(number // batch, batch) - 1
            idle += 1
        else:
            now, version, learner_starts = trained_at, version + 1, None
    written -= sum(end - now for end, _ in running)
    return Outcome(
        seconds=now,
        worker_idle=1 - written / (workers * now),
        learner_idle=1 - steps * learner_seconds / now,
        staleness=staleness,
        submitted=submitted,
    )


def gamma_lengths(variation: float, seed: int = 0, mean: float = 1.0) -> Iterator[float]:
    """Lengths of a gamma distribution.

    Args:
        variation: the standard deviation as a share of the mean. 0: all are the mean.
    """
    rng = random.Random(seed)
    while True:
        yield rng.gammavariate(variation**-2, mean * variation**2) if variation else mean
