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
    """``length`` steps that see noise; the last action is what the next reward depends on."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length=20):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.last = 0, 0
        return self.look(), {}

    def step(self, action):
        self.count += 1
        reward, self.last = self.pay(int(action)), int(action)
        return self.look(), reward, self.count == self.length, False, {}

    def look(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def pay(self, action):
        return float(action)


class Alternating(Steps):
    """Pays for another action than the last one, but shows nothing: only chance does well."""

    def look(self):
        return np.zeros(2, np.float32)

    def pay(self, action):
        return float(action != self.last)


class Unpaid(Steps):
    def pay(self, action):
        return 0.0


class Guessing(Steps):
    """One guess, right in a quarter of the attempts."""

    def step(self, action):
        right = bool(self.np_random.random() < 0.25)
        return self.look(), float(right), True, False, {"is_success": right}


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_reward_that_is_constant(tmp_path, algorithm):
    short = {"name": algorithm, "num_steps": 32}
    found = trained(tmp_path, "MountainCar-v0", short, num_envs=8, max_episode_steps=20)
    assert found["Return"].verdict == "bad"
    assert found["Return"].text == "Between -20 and -20 in training."
    assert ("Groups without signal" in found) == (algorithm == "grpo")


def test_a_reward_that_is_never_earned(tmp_path):
    found = trained(tmp_path, Unpaid, gw.GRPOCfg(num_steps=32), num_envs=4)
    assert found["Return"].verdict == "bad"
    assert found["Groups without signal"].verdict == "bad"


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_learning_rate_that_is_too_high(tmp_path, algorithm):
    high = {"name": algorithm, "learning_rate": 0.3, "num_steps": 64}
    found = trained(tmp_path, "CartPole-v1", high, num_envs=8)
    assert "Lower learning_rate" in found["KL of an update"].advice
    assert not any("higher learning_rate" in finding.advice for finding in found.values())


def test_a_policy_that_decides_too_early(tmp_path):
    high = {"name": "ppo", "learning_rate": 0.1, "num_steps": 64, "minibatch_size": 128}
    found = trained(tmp_path, "CartPole-v1", high, num_envs=8, total_steps=4_000)
    assert found["Entropy"].verdict == "bad"


def test_a_policy_that_never_decides(tmp_path):
    bonus = {"name": "ppo", "ent_coef": 5.0, "num_steps": 32, "minibatch_size": 64}
    found = trained(tmp_path, "CartPole-v1", bonus, num_envs=8, total_steps=4_000)
    assert "A lower ent_coef" in found["Entropy"].advice


def test_an_update_that_moves_too_far(tmp_path):
    found = trained(tmp_path, "CartPole-v1", {"name": "grpo", "learning_rate": 0.05, "minibatch_size": 32})
    assert found["KL of an update"].verdict == "bad"
    assert "Lower learning_rate" in found["KL of an update"].advice


def test_a_learning_rate_that_is_too_low(tmp_path):
    found = trained(tmp_path, "CartPole-v1", {"name": "ppo", "learning_rate": 1e-7}, total_steps=4_000)
    assert "a higher learning_rate" in found["KL of an update"].advice


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


def test_an_evaluation_that_training_does_not_hold_for(tmp_path):
    cfg = gw.GRPOCfg(num_steps=64, learning_rate=1e-5)
    found = trained(tmp_path, Alternating, cfg, num_envs=8)
    assert "evaluation.deterministic" in found["Evaluation against training"].advice


@pytest.mark.parametrize("normalize", [False, True])
def test_observations_of_wild_scale(tmp_path, normalize):
    def cartpole():
        env = gymnasium.make("CartPole-v1")
        return gymnasium.wrappers.TransformObservation(env, lambda obs: 1e4 * obs, env.observation_space)

    found = trained(tmp_path, cartpole, "ppo", policy={"normalize_obs": normalize})
    assert ("Scale of observations" in found) == (not normalize)


def longer_than_siblings(prompts, completions, **columns):
    """A judge of siblings who prefers the longer ones: on average it pays the same, however long they are."""
    scores = []
    for prompt, completion in zip(prompts, completions, strict=True):
        siblings = [len(other) for other, asked in zip(completions, prompts, strict=True) if asked == prompt]
        scores.append(
            sum(len(completion) > n for n in siblings) / len(siblings)
            - sum(len(completion) < n for n in siblings) / len(siblings)
        )
    return scores


def test_completions_that_grow_without_a_gain(tmp_path):
    cfg = gw.GRPOCfg(group_size=8, learning_rate=3e-3)
    settings = {"total_steps": 6_000, "sampling": {"max_new_tokens": 48}}
    train_text(copying(longer_than_siblings), save_model(tmp_path / "model"), tmp_path / "run", cfg, **settings)
    found = found_in(tmp_path / "run")
    assert "does not rise with it" in found["Length"].advice


def test_a_reward_that_is_the_same_for_all_members(tmp_path):
    def same(prompts, completions, **columns):
        return [0.5] * len(completions)

    train_text(copying(same), save_model(tmp_path / "model"), tmp_path / "run")
    found = found_in(tmp_path / "run")
    assert "Nothing to compare" in found["Spread of rewards"].advice
    assert "Groups without signal" in found


def test_a_reward_that_dominates(tmp_path):
    def in_percent(prompts, completions, **columns):
        return [10.0 * len(set(completion)) for completion in completions]

    def ends(prompts, completions, **columns):
        return [float(len(completion) < 4) for completion in completions]

    train_text(copying([in_percent, ends]), save_model(tmp_path / "model"), tmp_path / "run")
    found = found_in(tmp_path / "run")
    assert "in_percent dominates, ends hardly counts" in found["Sizes of rewards"].advice


@pytest.mark.parametrize(
    ("env", "algorithm", "steps"),
    [
        ("CartPole-v1", "ppo", 40_000),
        pytest.param("CartPole-v1", "grpo", 40_000, marks=pytest.mark.learn),
        pytest.param("Pendulum-v1", "ppo", 40_000, marks=pytest.mark.learn),
        pytest.param("Acrobot-v1", "ppo", 100_000, marks=pytest.mark.learn),
        pytest.param("MountainCarContinuous-v0", "ppo", 20_000, marks=pytest.mark.learn),
    ],
)
def test_nothing_is_found_in_healthy_runs(tmp_path, env, algorithm, steps):
    assert trained(tmp_path, env, algorithm, total_steps=steps, evaluation={"episodes": 10}) == {}


def test_nothing_is_found_in_a_healthy_run_of_texts(tmp_path):
    def near_three(prompts, completions, **columns):
        return [-abs(len(completion) - 3) for completion in completions]

    cfg = gw.GRPOCfg(group_size=4, learning_rate=3e-3)
    settings = {"total_steps": 3_000, "sampling": {"max_new_tokens": 16}}
    train_text(copying(near_three), save_model(tmp_path / "model"), tmp_path / "run", cfg, **settings)
    assert found_in(tmp_path / "run") == {}
