"""Whole runs on environments that fail in their processes, and evaluations that do."""

import multiprocessing
import os
import random
import signal
import time

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import groupwise as gw
from groupwise.errors import EnvError

GROUP_SIZE = 4


class Unreliable(gymnasium.Env):
    """In another process than the test's, about one step in 400 raises, dies or hangs."""

    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.faults = random.Random(os.urandom(8))
        return self.np_random.normal(size=2).astype(np.float32), {}

    def step(self, action):
        if multiprocessing.parent_process() is not None:
            fault = self.faults.random()
            if fault < 1 / 1000:
                raise RuntimeError("the wheel came off")
            if fault < 2 / 1000:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault < 2.5 / 1000:
                time.sleep(1000)
        return self.np_random.normal(size=2).astype(np.float32), float(action), False, False, {}


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
def test_groups_are_whole_and_no_process_stays_whatever_fails(unreliable, tmp_path, on_env_error):
    before = {process.pid for process in multiprocessing.active_children()}
    groups = WholeGroups()
    cfg = gw.GRPOCfg(group_size=GROUP_SIZE, num_steps=32, collection={"on_env_error": on_env_error})
    run = gw.train(
        gw.EnvCfg(id="Unreliable-v0", num_envs=8, max_episode_steps=16, vectorization="async", timeout=2.0),
        cfg,
        total_steps=2000 * int(os.environ.get("TORTURE_ROUNDS", "1")),
        run_dir=tmp_path / "run",
        logging={"progress": "none"},
        evaluation={"interval": 10**9, "episodes": 2},
        callbacks=[groups],
    )
    assert {process.pid for process in multiprocessing.active_children()} <= before
    assert groups.groups == sum(row["rollout/groups"] for row in run.metrics()) > 0
    assert sum(row["rollout/env_errors"] for row in run.metrics()) > 0


class Switch(gymnasium.Env):
    """Raises in every step while ``broken`` is more than 0, which each error lowers."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)
    broken = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(size=1).astype(np.float32), {}

    def step(self, action):
        if Switch.broken > 0:
            Switch.broken -= 1
            raise RuntimeError("the wheel came off")
        return np.zeros(1, np.float32), 1.0, False, False, {}


class Break(gw.Callback):
    def __init__(self, errors):
        self.errors = errors

    def on_iteration_end(self, trainer, rollout, metrics):
        Switch.broken = self.errors


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
        callbacks=[Break(errors)],
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
