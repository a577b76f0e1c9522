"""Whole runs on environments that fail, or never end."""

import json
import logging
import multiprocessing
import os
import random
import signal
import time

import gymnasium
import pytest
import torch
from at_events import on
from plain_envs import Plain

import groupwise as gw
from groupwise.errors import EnvError
from groupwise.report.folder import kept_iterations
from groupwise.training import build
from groupwise.training.evaluation import EvaluationResult

GROUP_SIZE = 4


class Unreliable(Plain):
    """In another process than the test's, about one step in 150 raises, dies or hangs."""

    length = None

    def step(self, action):
        if multiprocessing.parent_process() is not None:
            fault = random.SystemRandom().random()
            if fault < 3 / 1000:
                raise RuntimeError("the wheel came off")
            if fault < 6 / 1000:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault < 7 / 1000:
                time.sleep(1000)
        return super().step(action)


class WholeGroups(gw.Callback):
    """No group is smaller than asked for."""

    groups = 0

    def on_rollout_end(self, trainer, rollout):
        valid = rollout["valid"]
        pairs = torch.stack([rollout["group_id"][valid], rollout["episode_id"][valid]]).unique(dim=1)
        members = torch.bincount(pairs[0])
        assert (members == GROUP_SIZE).all()
        self.groups += len(members)


@pytest.fixture
def unreliable():
    gymnasium.register("Unreliable-v0", Unreliable)
    yield
    del gymnasium.registry["Unreliable-v0"]


@pytest.mark.slow
@pytest.mark.parametrize("on_env_error", ["retry", "drop"])
def test_groups_are_whole_and_no_process_stays_whatever_fails(unreliable, tmp_path, on_env_error, monkeypatch):
    # which two faults in a row end, as they may; tests below are on evaluations that fail
    monkeypatch.setattr(build, "evaluate_policy", lambda *args, **options: EvaluationResult((1.0, 1.0), (1, 1)))
    before = {process.pid for process in multiprocessing.active_children()}
    groups = WholeGroups()
    cfg = gw.GRPOCfg(group_size=GROUP_SIZE, num_steps=32, collection={"on_env_error": on_env_error})
    run = gw.train(
        gw.EnvCfg(id="Unreliable-v0", num_envs=8, max_episode_steps=16, vectorization="async", timeout=2.0),
        cfg,
        total_steps=800 * int(os.environ.get("TORTURE_ROUNDS", "1")),
        run_dir=tmp_path / "run",
        logging={"progress": "none"},
        evaluation={"interval": 10**9, "episodes": 2},
        callbacks=[groups],
    )
    assert {process.pid for process in multiprocessing.active_children()} <= before
    assert groups.groups == sum(row["rollout/groups"] for row in run.metrics()) > 0
    assert sum(row["rollout/env_errors"] for row in run.metrics()) > 0


class Switch(Plain):
    """Raises in every step while ``broken`` is more than 0, which each error lowers."""

    length = None
    broken = 0

    def step(self, action):
        if Switch.broken > 0:
            Switch.broken -= 1
            raise RuntimeError("the wheel came off")
        return super().step(1)


def train_switch(folder, on_env_error, errors, interval):
    return gw.train(
        Switch,
        gw.GRPOCfg(group_size=2, num_steps=8, collection={"on_env_error": on_env_error}),
        num_envs=2,
        max_episode_steps=4,
        total_steps=64,
        run_dir=folder,
        logging={"progress": "none"},
        evaluation={"interval": interval, "episodes": 2},
        callbacks=[on("iteration_end", lambda *_: setattr(Switch, "broken", errors))],
    )


@pytest.fixture(autouse=True)
def mended():
    yield
    Switch.broken = 0


def test_training_stops_where_every_group_is_dropped(tmp_path):
    with pytest.raises(EnvError, match="every group of 3 iterations in a row was dropped, because Switch failed; fix"):
        train_switch(tmp_path / "run", "drop", errors=10**6, interval=10**9)


def test_an_evaluation_that_failed_is_played_again(tmp_path):
    run = train_switch(tmp_path / "run", "drop", errors=1, interval=16)
    assert [row["eval/return_mean"] for row in run.metrics()] == [4.0] * 4


def test_an_evaluation_that_fails_ends_a_run_whose_errors_are_raised(tmp_path):
    with pytest.raises(RuntimeError, match="the wheel came off"):
        train_switch(tmp_path / "run", "raise", errors=1, interval=16)


class Endless(Plain):
    length = None

    def step(self, action):
        return super().step(1)


SMALL = {"num_envs": 2, "total_steps": 32, "evaluation": {"episodes": 2, "interval": 16}}


def test_grpo_takes_a_limit_and_keeps_it(tmp_path, capsys):
    run = gw.train(Endless, gw.GRPOCfg(group_size=2, num_steps=8), run_dir=tmp_path / "run", **SMALL)
    note = (
        "Endless has no step limit: episodes of groups are truncated after 1,000 steps (algorithm.collection.horizon)."
    )
    text = "".join(capsys.readouterr())
    assert text.count("no step limit: episodes of groups") == 1
    assert note in text
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["algorithm"]["collection"]["horizon"] is None  # as given: it follows from the environment
    assert gw.Run.load(run.path, env=Endless).algorithm.cfg.collection.horizon == 1_000
    assert run.summary["training_return_mean"] == 1_000


@pytest.mark.parametrize(("collection", "limit"), [({"horizon": 5}, None), ({}, 5)])
def test_a_horizon_or_limit_of_the_user_stays(collection, limit, tmp_path):
    algorithm = gw.GRPOCfg(group_size=2, num_steps=8, collection=collection)
    run = gw.train(Endless, algorithm, max_episode_steps=limit, run_dir=tmp_path / "run", **SMALL)
    assert run.summary["training_return_mean"] == run.summary["return_mean"] == 5


@pytest.mark.slow
def test_evaluations_say_once_that_they_cut(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="groupwise"):
        run = gw.train(Endless, gw.PPOCfg(num_steps=4), run_dir=tmp_path / "run", **SMALL)
    (message,) = [record.getMessage() for record in caplog.records if "cut" in record.getMessage()]
    assert message.startswith(
        "2 of 2 evaluation episodes were cut after 1,000 steps, because Endless has no step limit"
    )
    assert (run.summary["return_mean"], run.summary["cut_episodes"]) == (1_000, 2)
    assert gw.evaluate(run, 3).cut_episodes == 3


def test_an_iteration_without_groups_is_skipped_and_training_goes_on(tmp_path):
    Switch.broken = 10**6
    run = gw.train(
        Switch,
        gw.GRPOCfg(group_size=2, num_steps=8, collection={"on_env_error": "drop"}),
        num_envs=2,
        max_episode_steps=4,
        total_steps=64,
        run_dir=tmp_path / "run",
        logging={"progress": "none"},
        evaluation={"interval": 10**9, "episodes": 2},
        callbacks=[on("rollout_end", lambda *_: setattr(Switch, "broken", 0))],
    )
    first, *others = run.metrics()
    assert first["rollout/groups"] == 0
    assert all(row["rollout/groups"] > 0 for row in others)
    assert [*kept_iterations(run.path / "groups")] == [run.metrics()[-1]["iteration"]]  # and not those of the first


@pytest.mark.parametrize("error", [gw.errors.DataError, gw.errors.DivergedError])
def test_new_environments_are_no_help_to_a_policy_that_cannot_be_evaluated(error, monkeypatch, tmp_path):
    tries = []

    def fails(*args, **settings):
        tries.append(args)
        raise error("an action is not finite")

    monkeypatch.setattr("groupwise.training.build.evaluate_policy", fails)
    cfg = gw.GRPOCfg(group_size=2, num_steps=8, collection={"on_env_error": "retry"})
    with pytest.raises(error, match="an action is not finite"):
        gw.train("CartPole-v1", cfg, num_envs=4, total_steps=64, evaluation={"interval": 1}, run_dir=tmp_path / "run")
    assert len(tries) == 1
