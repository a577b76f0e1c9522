"""Rules of health on real, short trainings: each fault is found, and its counterpart and healthy runs are not blamed."""

import gymnasium
import numpy as np
import pytest
from text_runs import copying, save_model
from text_runs import train as train_text

import groupwise as gw
from groupwise.report.folder import RunFolder
from groupwise.report.health import diagnose
from groupwise.training import build as env_evaluator

pytestmark = pytest.mark.slow

QUIET = {"logging": {"progress": "none"}}


def trained(folder, env, algorithm, **settings):
    """What is found on a training, by title."""
    short = {"total_steps": 2_000, "evaluation": {"episodes": 5}}
    gw.train(env, algorithm, run_dir=folder / "run", **short | settings, **QUIET)
    return found_in(folder / "run")


def found_in(path):
    """The findings that are not good, by title."""
    return {finding.title: finding for finding in diagnose(RunFolder.open(path)) if finding.verdict != "good"}


class Steps(gymnasium.Env):
    """``length`` steps that see noise, and pay for action 1."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=20):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self.look(), {}

    def step(self, action):
        self.count += 1
        return self.look(), self.pay(action), self.count == self.length, False, {}

    def look(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def pay(self, action):
        return float(action)


class Unpaid(Steps):
    def pay(self, action):
        return 0.0


class Guessing(Steps):
    """One guess, right in a quarter of the attempts."""

    def step(self, action):
        right = bool(self.np_random.random() < 0.25)
        return self.look(), float(right), True, False, {"is_success": right}


CARTPOLE = ("CartPole-v1", {"num_envs": 8})
SICK = {
    "a reward that is never earned": (
        Unpaid, {"num_envs": 4}, {"name": "grpo", "num_steps": 32}, {"Return": "Else the reward", "Groups without signal": ""},
    ),
    "a reward that is constant": (
        "MountainCar-v0", {"num_envs": 8, "max_episode_steps": 20}, {"name": "ppo", "num_steps": 32}, {"Return": "progress"},
    ),
    "a learning rate that is too high": (
        *CARTPOLE, {"name": "grpo", "learning_rate": 0.3, "num_steps": 64}, {"KL of an update": "Lower learning_rate"},
    ),
    "a policy that decides too early": (
        *CARTPOLE, {"name": "ppo", "learning_rate": 0.1, "num_steps": 64, "minibatch_size": 128}, {"Entropy": "too early"},
    ),
    "a policy that never decides": (
        *CARTPOLE, {"name": "ppo", "ent_coef": 5.0, "num_steps": 32, "minibatch_size": 64}, {"Entropy": "A lower ent_coef"},
    ),
    "a learning rate that is too low": (
        "CartPole-v1", {}, {"name": "ppo", "learning_rate": 1e-7}, {"KL of an update": "a higher learning_rate"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("env", "settings", "algorithm", "expected"), SICK.values(), ids=SICK)
def test_a_fault_is_found(tmp_path, env, settings, algorithm, expected):
    found = trained(tmp_path, env, algorithm, **{"total_steps": 4_000} | settings)
    for title, advice in expected.items():
        assert advice in found[title].advice
    if "Return" in expected:
        assert found["Return"].verdict == "bad"
        assert ("Groups without signal" in found) == ("Groups without signal" in expected)
    if "Lower learning_rate" in expected.values():
        assert not any("higher learning_rate" in finding.advice for finding in found.values())


@pytest.mark.parametrize("size", [2, 8])
def test_groups_that_are_too_small(tmp_path, size):
    found = trained(tmp_path, Guessing, gw.GRPOCfg(group_size=size, num_steps=64), num_envs=8)
    assert ("Groups without signal" in found) == (size == 2)
    if size == 2:
        assert "too small for these starts" in found["Groups without signal"].advice


@pytest.mark.parametrize("algorithm", [gw.PPOCfg(num_steps=500), gw.GRPOCfg(group_size=2, num_steps=500)])
def test_episodes_that_never_end(tmp_path, monkeypatch, algorithm):
    monkeypatch.setattr(env_evaluator, "DEFAULT_HORIZON", 50)
    found = trained(tmp_path, lambda: Steps(length=10**9), algorithm, num_envs=2, evaluation={"episodes": 1})
    assert "env.max_episode_steps" in found["Ends of episodes"].advice


@pytest.mark.parametrize("normalize", [False, True])
def test_observations_of_wild_scale(tmp_path, normalize):
    def cartpole():
        env = gymnasium.make("CartPole-v1")
        return gymnasium.wrappers.TransformObservation(env, lambda obs: 1e4 * obs, env.observation_space)

    found = trained(tmp_path, cartpole, "ppo", policy={"normalize_obs": normalize})
    assert ("Scale of observations" in found) == (not normalize)


def longer_than_siblings(prompts, completions, **columns):
    """A judge of siblings who prefers the longer ones: on average it pays the same, however long they are."""
    lengths = [*zip(prompts, map(len, completions), strict=True)]
    siblings = [[other for asked, other in lengths if asked == prompt] for prompt in prompts]
    return [
        float(np.mean([np.sign(length - other) for other in some]))
        for (_, length), some in zip(lengths, siblings, strict=True)
    ]


def same(prompts, completions, **columns):
    return [0.5] * len(completions)


def in_percent(prompts, completions, **columns):
    return [10.0 * len(set(completion)) for completion in completions]


def ends(prompts, completions, **columns):
    return [float(len(completion) < 4) for completion in completions]


def near_three(prompts, completions, **columns):
    return [-abs(len(completion) - 3) for completion in completions]


@pytest.mark.parametrize(
    ("reward", "size", "steps", "length", "expected"),
    [
        (longer_than_siblings, 8, 6_000, 48, {"Length": "does not rise with it"}),
        (same, 4, 1_000, 16, {"Spread of rewards": "Nothing to compare", "Groups without signal": ""}),
        ([in_percent, ends], 4, 1_000, 16, {"Sizes of rewards": "in_percent dominates, ends hardly counts"}),
        (near_three, 4, 3_000, 16, {}),
    ],
    ids=["longer without a gain", "the same for all", "one dominates", "healthy"],
)
def test_rewards_of_texts(tmp_path, reward, size, steps, length, expected):
    cfg = gw.GRPOCfg(group_size=size, learning_rate=3e-3)
    settings = {"total_steps": steps, "sampling": {"max_new_tokens": length}}
    train_text(copying(reward), save_model(tmp_path / "model"), tmp_path / "run", cfg, **settings)
    found = found_in(tmp_path / "run")
    for title, advice in expected.items():
        assert advice in found[title].advice
    assert expected or not found


@pytest.mark.parametrize(
    ("env", "algorithm", "steps"),
    [
        ("CartPole-v1", "ppo", 10_000),
        pytest.param("CartPole-v1", "ppo", 40_000, marks=pytest.mark.learn),
        pytest.param("CartPole-v1", "grpo", 40_000, marks=pytest.mark.learn),
        pytest.param("Pendulum-v1", "ppo", 40_000, marks=pytest.mark.learn),
        pytest.param("Acrobot-v1", "ppo", 100_000, marks=pytest.mark.learn),
        pytest.param("MountainCarContinuous-v0", "ppo", 20_000, marks=pytest.mark.learn),
    ],
)
def test_nothing_is_found_in_healthy_runs(tmp_path, env, algorithm, steps):
    assert trained(tmp_path, env, algorithm, total_steps=steps, evaluation={"episodes": 10}) == {}
