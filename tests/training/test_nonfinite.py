"""Runs on environments with numbers that are not finite."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from plain_envs import Plain

import groupwise as gw
from groupwise.training.evaluation import evaluate_policy

TINY = {
    "num_envs": 4,
    "total_steps": 320,
    "evaluation": {"interval": 128, "episodes": 3},
    "logging": {"progress": "none"},
    "checkpoint_interval": 64,
}
ALGORITHMS = {
    "ppo": (gw.PPOCfg, {"num_steps": 16, "num_epochs": 2, "minibatch_size": 32}),
    "grpo": (gw.GRPOCfg, {"num_steps": 16, "num_epochs": 2, "minibatch_size": 32, "group_size": 2}),
}


class Env(Plain):
    """Where an episode starts above ``limit``, ``field`` of its third step is ``value``."""

    def __init__(self, field, value, limit=0.7, box=True):
        self.field, self.value, self.limit = field, value, limit
        if box:
            self.action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

    def step(self, action):
        assert np.isfinite(action).all()
        obs, reward, *ends = super().step(action)
        bad = self.field if self.steps == 3 and self.start[0] > self.limit else ""
        return (
            np.full(3, self.value, np.float32) if bad == "obs" else obs,
            self.value if bad == "reward" else reward,
            *ends,
        )


class BlankAtTheEnd(Env):
    """Its last observation is nothing, and so is what a policy would do next."""

    def __init__(self):
        super().__init__("", 0.0)

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs * np.nan if terminated or truncated else obs, reward, terminated, truncated, info


@pytest.fixture(autouse=True)
def _in_a_fresh_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(name, env, run_dir="run", policy=None, **algorithm):
    cfg, settings = ALGORITHMS[name]
    return gw.train(env, cfg(**settings | algorithm), run_dir=run_dir, policy=policy, **TINY)


def is_finite(run):
    return all(bool(tensor.isfinite().all()) for tensor in run.policy.state_dict().values())


def strictly(path):
    def refuse(constant):
        raise AssertionError(constant)

    text = Path("run", path).read_text()
    return [json.loads(line, parse_constant=refuse) for line in (text.splitlines() if path.endswith("l") else [text])]


@pytest.mark.parametrize(("field", "value"), [("obs", math.nan), ("reward", -math.inf)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_stop_names_environment_step_and_field(name, field, value):
    with pytest.raises(
        gw.errors.DataError, match=rf"^{field} of environment \d at step \d+ of the rollout is not finite: .*{value}"
    ):
        train(name, lambda: Env(field, value, limit=0.0))
    strictly("summary.json")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_no_step_follows_from_may_be_anything(name):
    assert is_finite(train(name, BlankAtTheEnd))


def test_a_network_with_a_memory_reads_that_too():
    cfg, env = gw.PPOCfg(**ALGORITHMS["ppo"][1]), SyncVectorEnv([BlankAtTheEnd] * 4)
    with pytest.raises(gw.errors.DataError, match=r"^obs of environment \d at step \d+ of the rollout is not finite"):
        gw.train(env, cfg, policy="recurrent", total_steps=320, logging={"progress": "none"})


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_what_no_step_follows_from_may_be_anything_in_every_autoreset_mode(mode):
    cfg, settings = ALGORITHMS["ppo"]
    env = SyncVectorEnv([BlankAtTheEnd] * 4, autoreset_mode=mode)
    assert is_finite(gw.train(env, cfg(**settings), run_dir="run", total_steps=320, logging={"progress": "none"}))


@pytest.mark.parametrize(("field", "box"), [("obs", True), ("reward", False)])
@pytest.mark.parametrize("mode", ["drop", "zero"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_drop_and_zero_go_on(name, mode, field, box, caplog):
    run = train(name, lambda: Env(field, math.nan, box=box), on_nonfinite=mode)
    assert is_finite(run)
    assert run.summary["stopped"] == "total_steps"
    assert any(f"{field} of environment" in message for message in caplog.messages)
    assert all(math.isfinite(value) for entry in strictly("metrics.jsonl") for value in entry.values())
    assert "rollout/return_mean" in run.metrics()[-1]


def test_drop_leaves_the_whole_group_out_and_zero_leaves_nothing_out(caplog):
    seen = {}

    class Look(gw.Callback):
        def __init__(self, mode):
            self.mode = mode

        def on_rollout_end(self, trainer, rollout):
            seen[self.mode] = seen.get(self.mode, rollout.clone())

    cfg, settings = ALGORITHMS["grpo"]
    for mode in ("drop", "zero"):
        env = lambda: Env("reward", math.nan, limit=0.5)  # noqa: E731
        gw.train(env, cfg(**settings, on_nonfinite=mode), callbacks=[Look(mode)], **TINY | {"total_steps": 64})
    dropped, kept = seen["drop"], seen["zero"]
    bad = kept["valid"] & (kept["step"] == 2) & (kept["obs"][..., 0] > 0.5)
    groups = kept["group_id"][bad].unique().tolist()
    count = int(kept["group_id"].max()) + 1
    assert 0 < len(groups) < count
    assert f"nan; {len(groups)} of {count} groups are left out of the loss (on_nonfinite='drop')" in caplog.messages[0]
    assert any(message.endswith("nan; 0 takes its place (on_nonfinite='zero')") for message in caplog.messages)
    for group in range(int(kept["group_id"].max()) + 1):
        members = kept["group_id"] == group
        assert kept["loss_mask"][members].all()
        assert dropped["loss_mask"][members].any() == (group not in groups)
    assert (dropped["reward"] == kept["reward"]).all()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_tenth_rollout_of_which_nothing_is_left_ends_training(name, monkeypatch, caplog):
    monkeypatch.setitem(TINY, "total_steps", 64 * 20)
    monkeypatch.setitem(TINY, "evaluation", {"interval": 10**6, "episodes": 2})
    with pytest.raises(gw.errors.DivergedError, match="numbers of 10 updates in a row were not finite"):
        train(name, lambda: Env("reward", math.nan, limit=-99.0), on_nonfinite="drop", num_steps=10)
    assert len(strictly("metrics.jsonl")) == 9
    assert not any("members with different returns" in message for message in caplog.messages)


@pytest.mark.parametrize(("name", "reward"), [("ppo", 1e38), ("grpo", -1e38)])
def test_sums_of_finite_rewards_that_overflow_reach_no_statistics(name, reward):
    class Large(Env):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, reward * math.tanh(self.start[0]), *rest

    class Keep(gw.Callback):
        policy: Any

        def on_training_start(self, trainer):
            self.policy = trainer.algorithm.policy

    cfg, settings = ALGORITHMS[name]
    keep = Keep()
    with contextlib.suppress(gw.errors.DivergedError, gw.errors.DataError):
        gw.train(lambda: Large("", 0.0), cfg(**settings), policy={"normalize_reward": True}, callbacks=[keep], **TINY)
    assert all(bool(tensor.isfinite().all()) for tensor in keep.policy.state_dict().values())


def test_evaluations_stop_leave_episodes_out_or_take_0(parts, monkeypatch):
    env = parts.env(2)
    step = env.step
    reward = torch.tensor([1.0, math.nan])
    monkeypatch.setattr(env, "step", lambda action: step(action)._replace(reward=reward.clone()))

    def play(mode):
        return evaluate_policy(parts.policy(), env, episodes=2, seed=0, max_steps=3, on_nonfinite=mode).returns

    with pytest.raises(gw.errors.DataError, match="return of evaluation episode 1 is not finite"):
        play("stop")
    assert play("drop") == (3.0,)
    assert play("zero") == (3.0, 0.0)
