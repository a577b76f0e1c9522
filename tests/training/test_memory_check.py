"""Rollouts that cannot fit in memory are refused with the sum."""

import gymnasium
import numpy as np
import pytest

import groupwise as gw
from groupwise.training import build as memory_check

QUIET = {"evaluation": {"episodes": 1}, "logging": {"progress": "none"}, "total_steps": 32}


@pytest.mark.parametrize(
    ("algorithm", "env", "message"),
    [
        # 10 ** 12 x (40 + 250) bytes = 290 * 10 ** 12 / 2 ** 30 GiB
        (
            {"group_size": 10**12},
            {},
            r"at least 270,083\.5 GiB: algorithm\.group_size=1,000,000,000,000 x at least 290 bytes",
        ),
        # 8 x (10 ** 13 + 1) x 40 bytes
        (
            {"num_steps": 10**13},
            {},
            r"2,980,232\.2 GiB: env\.num_envs=8 x \(algorithm\.num_steps=10,000,000,000,000 \+ 1\) x 40",
        ),
        (
            {"name": "ppo", "num_steps": 99},
            {"num_envs": 10**11},
            r"372,529\.0 GiB: env\.num_envs=100,000,000,000 x \(.*=99 \+ 1\)",
        ),
    ],
)
def test_impossible_numbers_are_refused_before_anything_is_made(tmp_path, algorithm, env, message):
    with pytest.raises(gw.errors.ConfigError, match=message):
        gw.train(gw.EnvCfg(id="CartPole-v1", **env), algorithm, run_dir=tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists()


class Picture(gymnasium.Env):
    """Shows an image of 30,000 bytes."""

    observation_space = gymnasium.spaces.Box(0, 255, (100, 100, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros((100, 100, 3), np.uint8), {}


@pytest.mark.parametrize(
    ("there", "error", "match"),
    [
        (2_000_000, NotImplementedError, ""),  # of step(): memory is no reason to refuse
        (500_000, gw.errors.ConfigError, r"env\.num_envs=2 x \(algorithm\.num_steps=16 \+ 1\) x 30052 bytes"),
    ],
)
def test_the_size_of_an_observation_counts(tmp_path, monkeypatch, there, error, match):
    monkeypatch.setattr(memory_check, "total_memory", lambda device=None: there)
    # 2 x 17 slots of 30,000 bytes, 8 of the action, 4 each of reward and log-probability, 4 masks and 3 ids, value and
    # next_value: 2 x 17 x 30,052 = 1,021,768 bytes
    settings = {"num_envs": 2, "max_episode_steps": 5, "run_dir": tmp_path / "run", **QUIET}
    with pytest.raises(error, match=match):
        gw.train(Picture, {"name": "ppo", "num_steps": 16}, **settings)


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory_check, "_CGROUP_LIMIT", limit)
    physical = memory_check.total_memory()
    limit.write_text("1048576\n")
    assert memory_check.total_memory() == 1048576
    limit.write_text("max\n")
    assert memory_check.total_memory() == physical


def test_groups_of_completions_count_too(tmp_path):
    # 8 x 10 ** 11 x 290 bytes
    match = r"216,066\.8 GiB: num_prompts=8 x algorithm\.group_size=100,000,000,000 x at least 290 bytes"
    task = gw.TextTask(["a"], reward=lambda prompts, completions: [0.0])
    with pytest.raises(gw.errors.ConfigError, match=match):
        gw.train(task, {"group_size": 10**11}, model="absent", run_dir=tmp_path / "run")
