import heapq
import itertools
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.planning.simulation import gamma_lengths, simulate

SETTINGS = st.fixed_dictionaries(
    {
        "workers": st.integers(1, 9),
        "batch": st.integers(1, 12),
        "max_staleness": st.integers(0, 4),
        "learner_seconds": st.floats(0.01, 5),
        "steps": st.integers(1, 12),
    }
)
VARIATION = st.floats(0.1, 2)


def synchronous_seconds(lengths, *, workers, batch, learner_seconds, steps):
    """Write a batch, each completion on the worker that is free first; then train."""
    now = 0.0
    for _ in range(steps):
        free = [now] * workers
        for _ in range(batch):
            heapq.heapreplace(free, free[0] + next(lengths))
        now = max(free) + learner_seconds
    return now


@settings(max_examples=25, deadline=None)
@given(SETTINGS, VARIATION, st.integers(0, 9))
def test_completions_are_conserved_and_never_older_than_allowed(chosen, variation, seed):
    found = simulate(gamma_lengths(variation, seed), **chosen)
    assert found.trained == chosen["steps"] * chosen["batch"]
    assert len(found.staleness) == chosen["max_staleness"] + 1  # an older one would have raised
    assert found.trained <= found.submitted <= found.trained + chosen["batch"] * chosen["max_staleness"]


@settings(max_examples=25, deadline=None)
@given(SETTINGS, VARIATION, st.integers(0, 9))
def test_time_is_written_or_idle(chosen, variation, seed):
    found = simulate(gamma_lengths(variation, seed), **chosen)
    assert -1e-9 <= found.worker_idle < 1
    assert -1e-9 <= found.learner_idle < 1
    busy = (1 - found.worker_idle) * chosen["workers"] * found.seconds
    every = sum(itertools.islice(gamma_lengths(variation, seed), found.submitted))
    whole = sum(itertools.islice(gamma_lengths(variation, seed), found.trained))
    assert whole - 1e-6 <= busy <= every + 1e-6


@settings(max_examples=25, deadline=None)
@given(SETTINGS, VARIATION, st.integers(0, 9))
def test_without_staleness_it_is_the_synchronous_run(chosen, variation, seed):
    chosen = chosen | {"max_staleness": 0}
    found = simulate(gamma_lengths(variation, seed), **chosen)
    del chosen["max_staleness"]
    assert found.seconds == synchronous_seconds(gamma_lengths(variation, seed), **chosen)
    assert found.mean_staleness == 0


def seconds_in_batches(lengths, *, workers, batch, max_staleness, learner_seconds, steps):
    """Write a batch when the one before is written and its weights are there; train in turn."""
    written, trained = 0.0, []
    for step in range(steps):
        begin = max(written, trained[step - max_staleness - 1] if step > max_staleness else 0.0)
        free = [begin] * workers
        ends = []
        for _ in range(batch):
            ends.append(free[0] + next(lengths))
            heapq.heapreplace(free, ends[-1])
        written = max(ends)
        trained.append(max(written, trained[-1] if trained else 0.0) + learner_seconds)
    return trained[-1]


@settings(max_examples=25, deadline=None)
@given(SETTINGS, VARIATION, st.integers(0, 9))
def test_batches_one_after_the_other(chosen, variation, seed):
    found = simulate(gamma_lengths(variation, seed), streaming=False, **chosen)
    assert found.seconds == pytest.approx(seconds_in_batches(gamma_lengths(variation, seed), **chosen))
    assert found.seconds >= simulate(gamma_lengths(variation, seed), **chosen).seconds


@settings(max_examples=25, deadline=None)
@given(SETTINGS, VARIATION, st.integers(0, 9))
def test_more_staleness_is_never_slower(chosen, variation, seed):
    seconds = [
        simulate(gamma_lengths(variation, seed), **chosen | {"max_staleness": allowed}).seconds for allowed in range(4)
    ]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize(("learner", "period"), [(2.0, 6.0), (9.0, 9.0)])
def test_equal_lengths_by_hand(learner, period):
    # 4 workers write 8 completions of 3 s: 6 s a batch. Synchronous: 6 s + the learner. Overlapped: the slower of the two,
    # and the other once: n = 10 steps take 10 * 6 + 2 or 6 + 10 * 9 seconds
    chosen = {"workers": 4, "batch": 8, "learner_seconds": learner, "steps": 10}
    serial = simulate(itertools.repeat(3.0), max_staleness=0, **chosen)
    assert serial.seconds == pytest.approx(10 * (6 + learner))
    assert serial.worker_idle == pytest.approx(learner / (6 + learner))
    assert serial.learner_idle == pytest.approx(6 / (6 + learner))
    overlapped = simulate(itertools.repeat(3.0), max_staleness=1, **chosen)
    assert overlapped.seconds == pytest.approx(10 * period + min(6, learner))


def test_a_batch_that_is_written_during_a_step_is_one_step_old():
    found = simulate(itertools.repeat(3.0), workers=4, batch=8, max_staleness=1, learner_seconds=2.0, steps=10)
    # of each later batch, the first 4 begin when the batch before is complete, before its step ends (3 s later the others)
    assert found.staleness == [8 + 9 * 4, 9 * 4]


def test_weights_that_come_as_a_completion_ends_are_those_of_the_next():
    # a batch and a step take a second each: completions that begin at second n have the weights of the step that ends then
    found = simulate(itertools.repeat(1.0), workers=4, batch=4, max_staleness=3, learner_seconds=1.0, steps=10)
    assert found.staleness == [4, 36, 0, 0]


def test_lengths_have_the_variation_that_is_asked_for():
    drawn = list(itertools.islice(gamma_lengths(0.5, seed=1, mean=3.0), 20_000))
    assert fmean(drawn) == pytest.approx(3.0, rel=0.02)
    assert pstdev(drawn) / fmean(drawn) == pytest.approx(0.5, rel=0.03)
    assert list(itertools.islice(gamma_lengths(0), 3)) == [1.0, 1.0, 1.0]
