import contextlib
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from at_events import on
from run_folders import same_weights

import groupwise as gw
from groupwise.collectors.vector import Episode
from groupwise.engines import Engine
from groupwise.errors import ConfigError, DataError, DivergedError
from groupwise.training.trainer import INTERRUPTED, Callback, check_callbacks


class Recorder(Callback):
    """Writes down every event, and the metrics."""

    def __init__(self, name="", journal=None):
        self.name = name
        self.journal = [] if journal is None else journal
        self.metrics = []
        self.draws = []

    def on_training_start(self, trainer):
        self.journal.append(f"{self.name}start")

    def on_rollout_end(self, trainer, rollout):
        self.journal.append(f"{self.name}rollout {trainer.iteration}")

    def on_iteration_end(self, trainer, rollout, metrics):
        self.journal.append(f"{self.name}iteration {trainer.iteration}")
        self.metrics.append(metrics)
        self.draws.append((random.random(), float(np.random.rand()), float(torch.rand(()))))

    def on_training_end(self, trainer):
        self.journal.append(f"{self.name}end")

    def on_interrupt(self, trainer):
        self.journal.append(f"{self.name}interrupt after {trainer.iteration}")

    def close(self):
        self.journal.append(f"{self.name}close")


def test_events_come_in_order_and_callbacks_too(parts):
    journal = []
    parts.trainer(Recorder("a ", journal), Recorder("b ", journal), total_steps=15).train()
    events = ["start", "rollout 0", "iteration 1", "rollout 1", "iteration 2", "end", "close"]
    assert journal == [f"{name} {event}" for event in events for name in "ab"]


def test_training_ends_with_the_iteration_that_reaches_total_steps(parts):
    recorder = Recorder()
    trainer = parts.trainer(recorder, total_steps=25)
    trainer.train()
    assert (trainer.iteration, trainer.env_steps) == (3, 30)  # 10 steps an iteration: 20 is too few
    assert all(type(value) is float for metrics in recorder.metrics for value in metrics.values())
    assert {"train/loss", "rollout/return_mean", "time/steps_per_second", "time/total_seconds"} <= set(
        recorder.metrics[0]
    )


def test_times_by_hand(parts, monkeypatch):
    # an iteration begins, has collected, and begins and ends its update
    clock = iter([10.0, 13.0, 20.0, 27.0, 100.0, 101.0, 110.0, 112.0])
    monkeypatch.setattr("groupwise.training.trainer.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    recorder = Recorder()
    parts.trainer(recorder, total_steps=20).train()
    names = ["time/collect_seconds", "time/update_seconds", "time/total_seconds", "time/steps_per_second"]
    found = [[metrics[name] for name in names] for metrics in recorder.metrics]
    assert found == [[3.0, 7.0, 17.0, 10 / 17], [1.0, 2.0, 29.0, 10 / 12]]


def test_stop_ends_after_the_iteration_and_keeps_the_first_reason(parts):
    recorder = Recorder()
    stops = on("rollout_end", lambda trainer, _: (trainer.stop("first"), trainer.stop("second")))
    trainer = parts.trainer(stops, recorder)
    trainer.train()
    assert (trainer.iteration, trainer.stop_reason) == (1, "first")
    assert recorder.journal[-2:] == ["end", "close"]


def test_an_interrupt_ends_after_the_iteration_and_in_place_of_the_end(parts):
    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt):
        parts.trainer(on("rollout_end", lambda trainer, _: trainer.interrupt()), recorder).train()
    assert recorder.journal == ["start", "rollout 0", "iteration 1", "interrupt after 1", "close"]


class Raises(Callback):
    """Raises an error at an event of the second iteration."""

    def __init__(self, event, error):
        self.error = error
        setattr(self, event, self.fail)

    def fail(self, trainer, *args):
        if (trainer.doing == "updating" and trainer.iteration == 1) or trainer.iteration == 2:
            raise self.error


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
@pytest.mark.parametrize("event", ["on_iteration_end", "on_training_end"])
def test_after_an_error_of_a_callback_the_whole_iteration_can_be_saved(event, error, parts):
    recorder = Recorder()
    trainer = parts.trainer(Raises(event, error), recorder, total_steps=20)
    with pytest.raises(type(error)):
        trainer.train()
    assert recorder.journal[-2:] == ["interrupt after 2", "close"]
    assert trainer.metrics["rollout/return_mean"] == 1.5  # of the episodes 1 and 2


@pytest.mark.parametrize(
    ("where", "error", "last"),
    [
        ("on_rollout_end", ZeroDivisionError(), "rollout 1"),
        ("collecting", ZeroDivisionError(), "interrupt after 1"),
        ("collecting", DataError("an action is not finite"), "iteration 1"),
        ("collecting", DivergedError("so is a weight"), "iteration 1"),
        ("on_iteration_end", DataError("an action is not finite"), "iteration 2"),
        ("on_iteration_end", DivergedError("so is a weight"), "iteration 2"),
    ],
)
def test_after_an_error_in_an_update_or_of_what_diverged_nothing_is_saved(where, error, last, parts):
    recorder = Recorder()
    trainer = parts.trainer(recorder, *([] if where == "collecting" else [Raises(where, error)]))
    collect = trainer.collector.collect

    def fail(*args, **kwargs):
        if where == "collecting" and trainer.iteration == 1:
            raise error
        return collect(*args, **kwargs)

    trainer.collector.collect = fail
    with pytest.raises(type(error)):
        trainer.train()
    assert recorder.journal[-2:] == [last, "close"]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_training_that_diverged_is_stopped(bad, parts):
    class Diverging(parts.likelihood):
        def update(self, rollout):
            loss = super().update(rollout)["train/loss"]
            return {"train/loss": loss, "train/entropy": torch.tensor(bad if self.iteration == 2 else 1.0)}

    recorder = Recorder()
    with pytest.raises(DivergedError, match=rf"train/entropy is {bad} in iteration 2; fix: lower"):
        parts.trainer(recorder, algorithm=Diverging).train()
    assert recorder.journal[-2:] == ["rollout 1", "close"]


def test_global_random_streams_follow_from_the_iteration(parts):
    whole, second = Recorder(), Recorder()
    parts.trainer(whole, total_steps=20).train()
    later = parts.trainer(second, total_steps=20)
    later.go_on_from({"iteration": 1, "env_steps": 10})
    random.seed(99)
    later.train()
    assert second.draws == whole.draws[1:]
    assert len({draw for draws in whole.draws for draw in draws}) == 6


def test_state_goes_on_where_it_was_saved(parts):
    whole = parts.trainer(total_steps=40)
    whole.train()
    first = parts.trainer(total_steps=20)
    first.train()
    second = parts.trainer(total_steps=40)
    second.load_state_dict(first.state_dict())
    second.algorithm.policy.load_state_dict(first.algorithm.policy.state_dict())
    assert (second.iteration, second.collector.iteration, second.env_steps) == (2, 2, 20)
    second.train()
    assert list(second.collector.recent) == list(whole.collector.recent)
    assert same_weights(second.algorithm, whole.algorithm)


def test_state_of_callbacks_returns_to_them_even_to_two_of_a_class(parts):
    class Counter(Callback):
        def __init__(self, count):
            self.count = count

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    saved = parts.trainer(Counter(1), Counter(2)).state_dict()
    fresh = [Counter(0), Counter(0), Counter(7)]
    parts.trainer(*fresh).load_state_dict(saved)
    assert [callback.count for callback in fresh] == [1, 2, 7]


class TwoRanks(Engine):
    """The other rank takes 6 steps more, and passes ``others``, one after another, where this one gathers."""

    world_size = 2

    def __init__(self, *others, rank=0):
        self.rank = rank
        self.others = iter(others)

    def gather_objects(self, thing):
        return [thing, thing + 6] if isinstance(thing, int) else [thing, next(self.others)]


GOES_ON = None
EPISODE = Episode(5.0, 1, True)


def test_numbers_are_pooled_over_ranks(parts):
    recorder = Recorder()
    trainer = parts.trainer(recorder, total_steps=16)
    trainer.engine = TwoRanks(
        GOES_ON, ([EPISODE] * 3, {"rollout/return_mean": 5.0, "rollout/env_steps": 16.0}), GOES_ON
    )
    trainer.train()
    assert trainer.env_steps == 26
    assert recorder.metrics[0]["rollout/return_mean"] == 4.0  # one episode of return 1, three of 5
    assert recorder.metrics[0]["rollout/env_steps"] == 26


@pytest.mark.parametrize(
    ("reason", "last"), [("enough", ["end", "close"]), (INTERRUPTED, ["interrupt after 1", "close"])]
)
def test_a_stop_or_an_interrupt_on_another_rank_ends_training(reason, last, parts):
    recorder = Recorder()
    trainer = parts.trainer(recorder)
    trainer.engine = TwoRanks(GOES_ON, ([EPISODE], {}), reason)
    with pytest.raises(KeyboardInterrupt) if reason == INTERRUPTED else contextlib.nullcontext():
        trainer.train()
    assert (trainer.iteration, trainer.stop_reason) == (1, reason)
    assert recorder.journal[-2:] == last


@pytest.mark.parametrize(("iteration", "reason"), [(1, INTERRUPTED), (2, "total_steps")])
def test_an_interrupt_while_ranks_exchange_their_reasons_is_heard_at_the_next_exchange(iteration, reason, parts):
    """Waiting for a slow rank may take most of the time."""

    class Meets(Engine):
        def gather_objects(self, thing):
            if isinstance(thing, str | None) and trainer.iteration == iteration:
                trainer.interrupt()
            return [thing]

    trainer = parts.trainer(total_steps=30 if reason == INTERRUPTED else 20)
    trainer.engine = Meets()
    with pytest.raises(KeyboardInterrupt) if reason == INTERRUPTED else contextlib.nullcontext():
        trainer.train()
    assert (trainer.iteration, trainer.stop_reason) == (2, reason)


@pytest.mark.parametrize(("rank", "count"), [(0, 2), (1, 0)])
def test_recent_episodes_of_a_checkpoint_are_those_of_rank_0(rank, count, parts):
    first = parts.trainer(total_steps=20)
    first.train()
    resumed = parts.trainer(total_steps=40)
    resumed.engine = TwoRanks(rank=rank)
    resumed.load_state_dict(first.state_dict())
    assert len(resumed.collector.recent) == count


def test_ten_useless_updates_in_a_row_end_training(parts):
    """Half of them have skipped steps, of the others nothing is left; the tenth of all updates is good."""

    class Skips(parts.likelihood):  # type: ignore[name-defined, misc]
        def update(self, rollout):
            skipped = {"train/skipped_steps": torch.tensor(1.0)} if self.iteration % 2 else {}
            return super().update(rollout) | ({} if self.iteration == 10 else skipped)

    drops = on("rollout_end", lambda trainer, _: setattr(trainer.buffer, "all_dropped", trainer.iteration % 2 == 0))
    trainer = parts.trainer(drops, total_steps=1000, algorithm=Skips)
    with pytest.raises(DivergedError, match="numbers of 10 updates in a row were not finite"):
        trainer.train()
    assert trainer.iteration == 19


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (Callback(), r"expected a list; fix: callbacks=\["),
        ([Callback], "is no Callback; fix:"),
        ([print], r"on_iteration_end\(self, trainer, rollout, metrics\); _on_step of Stable-Baselines3 is on_step"),
    ],
)
def test_callbacks_come_as_a_list_of_instances(callbacks, message):
    with pytest.raises(ConfigError, match=message):
        check_callbacks(callbacks)


def yields(self, trainer, rollout, metrics):
    yield


async def waits(self, trainer, rollout):
    pass


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        (
            "on_iteration_end",
            lambda self: None,
            r"Mine\.on_iteration_end\(\): .*; fix: def on_iteration_end\(self, trainer, rollout",
        ),
        ("on_training_end", lambda self, a, b: None, r"missing .*'b'; fix: def on_training_end\(self, trainer\)$"),
        (
            "_on_step",
            lambda self: True,
            r"no event, and is never called; did you mean 'on_step'\?.*trainer\.stop\('reason'\)",
        ),
        ("on_iteration_ends", lambda self, *a: None, r"did you mean 'on_iteration_end'\?; events: on_training_start, "),
        ("on_epoch", lambda self, *a: None, "Mine.on_epoch is no event"),
        (
            "on_iteration_end",
            yields,
            r"on_iteration_end has yield or async, and would not run; fix: def on_it",
        ),
        ("on_rollout_end", waits, r"on_rollout_end has yield or async"),
        (
            "on_iteration_end",
            None,
            r"Mine.on_iteration_end = None: expected a method; fix: def on_iteration_end\(self, ",
        ),
    ],
)
def test_methods_that_would_not_be_called_are_refused_before_training(name, method, message):
    mine = type("Mine", (type("Base", (Callback,), {name: method}),), {})
    with pytest.raises(ConfigError, match=message):
        gw.train("CartPole-v1", total_steps=1, callbacks=[mine()])
    besides = type(
        "Mine", (Callback,), {"on_step": lambda *all_of_them: None, "on_x": 3, "_on_done": print, "_log": print}
    )
    assert len(check_callbacks([besides()])) == 1
