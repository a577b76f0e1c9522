"""Environments without a step limit."""

import json
import logging

import gymnasium
import numpy as np
import pytest

import groupwise as gw


class Endless(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0.0
        return np.array([self.np_random.uniform()], np.float32), {}

    def step(self, action):
        self.count += 1
        return np.array([self.count], np.float32), 1.0, False, False, {}


SMALL = {"num_envs": 2, "total_steps": 32, "evaluation": {"episodes": 2, "interval": 8}}


def test_grpo_takes_a_limit_and_keeps_it(tmp_path, capsys):
    run = gw.train(Endless, gw.GRPOCfg(group_size=2, num_steps=8), run_dir=tmp_path / "run", **SMALL)
    note = (
        "Endless has no step limit: episodes of groups are truncated after 1,000 steps (algorithm.collection.horizon)."
    )
    text = "".join(capsys.readouterr())
    assert text.count("no step limit: episodes of groups") == 1
    assert note in text
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["algorithm"]["collection"]["horizon"] == 1_000
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
    (said,) = [record.getMessage() for record in caplog.records if "cut" in record.getMessage()]
    assert said.startswith("2 of 2 evaluation episodes were cut after 1,000 steps, because Endless has no step limit")
    assert (run.summary["return_mean"], run.summary["cut_episodes"]) == (1_000, 2)
    assert gw.evaluate(run, 3).cut_episodes == 3


@pytest.mark.slow
def test_where_an_evaluation_cuts_does_not_depend_on_the_budget(tmp_path):
    stop = {"time_limit": 1e-9}  # after the first iteration
    settings = SMALL | {"total_steps": 300_000, "stop": stop, "speed": "off"}
    run = gw.train(Endless, gw.PPOCfg(num_steps=4), run_dir=tmp_path / "run", **settings)
    assert run.summary["return_mean"] == 1_000
    assert gw.resume(run.path, env=Endless, total_steps=900_000).summary["return_mean"] == 1_000
