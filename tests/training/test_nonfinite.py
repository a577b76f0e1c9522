"""Runs on environments with numbers that are not finite."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import groupwise as gw
from groupwise.training.evaluation import evaluate_policy

TINY: dict[str, Any] = {
    "num_envs": 4,
    "total_steps": 320,
    "max_episode_steps": 10,
    "evaluation": {"interval": 128, "episodes": 3},
    "logging": {"progress": "none"},
    "checkpoint_interval": 64,
}
ALGORITHMS: dict[str, Any] = {
    "ppo": (gw.PPOCfg, {"num_steps": 16, "num_epochs": 2, "minibatch_size": 32}),
    "grpo": (gw.GRPOCfg, {"num_steps": 16, "num_epochs": 2, "minibatch_size": 32, "group_size": 2}),
}


class Env(gymnasium.Env[Any, Any]):
    """Episodes of 10 steps. Where one starts above ``limit``, ``field`` of the third step is ``value``."""

    def __init__(self, field: str, value: float, limit: float = 1.0, box: bool = True) -> None:
        self.observation_space = gymnasium.spaces.Box(-10, 10, (2,), np.float32)
        self.action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32) if box else gymnasium.spaces.Discrete(2)
        self.field, self.value, self.limit = field, value, limit

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.start = self.np_random.normal(size=2).astype(np.float32)
        self.steps = 0
        return self.start, {}

    def step(self, action: Any) -> Any:
        assert np.isfinite(action).all()
        self.steps += 1
        bad = self.steps == 3 and self.start[0] > self.limit
        obs, reward = self.start + np.float32(self.steps / 10), float(np.sum(action))
        if bad and self.field == "obs":
            obs[1] = self.value
        return obs, self.value if bad and self.field == "reward" else reward, False, self.steps == 10, {}


@pytest.fixture(autouse=True)
def _in_a_fresh_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def train(name: str, env: Any, run_dir: str = "run", policy: Any = None, **algorithm: Any) -> gw.Run:
    cfg, settings = ALGORITHMS[name]
    return gw.train(env, cfg(**settings | algorithm), run_dir=run_dir, policy=policy, **TINY)


def is_finite(run: gw.Run) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in run.policy.state_dict().values())


def strictly(path: str) -> list[Any]:
    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    text = Path("run", path).read_text()
    return [json.loads(line, parse_constant=refuse) for line in (text.splitlines() if path.endswith("l") else [text])]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("field", ["obs", "reward"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_stop_names_environment_step_and_field(name: str, field: str, value: float):
    with pytest.raises(
        gw.errors.DataError, match=rf"^{field} of environment \d at step \d+ of the rollout is not finite: .*{value}"
    ):
        train(name, lambda: Env(field, value, limit=0.0))
    strictly("summary.json")


@pytest.mark.parametrize(("field", "box"), [("obs", True), ("reward", False)])
@pytest.mark.parametrize("mode", ["drop", "zero"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_drop_and_zero_go_on(name: str, mode: str, field: str, box: bool, caplog: pytest.LogCaptureFixture):
    run = train(name, lambda: Env(field, math.nan, box=box), on_nonfinite=mode)
    assert is_finite(run)
    assert run.summary["stopped"] == "total_steps"
    assert any(f"{field} of environment" in message for message in caplog.messages)
    assert all(math.isfinite(value) for entry in strictly("metrics.jsonl") for value in entry.values())
    assert "rollout/return_mean" in run.metrics()[-1]
    assert is_finite(gw.Run.load("run", env=lambda: Env(field, math.nan, box=box)))


def test_drop_leaves_the_whole_group_out_and_zero_leaves_nothing_out(caplog: pytest.LogCaptureFixture):
    seen: dict[str, Any] = {}

    class Look(gw.Callback):
        def __init__(self, mode: str) -> None:
            self.mode = mode

        def on_rollout_end(self, trainer: gw.Trainer, rollout: Any) -> None:
            seen[self.mode] = seen.get(self.mode, rollout.clone())

    cfg, settings = ALGORITHMS["grpo"]
    for mode in ("drop", "zero"):
        env = lambda: Env("reward", math.nan, limit=0.5)  # noqa: E731
        gw.train(env, cfg(**settings, on_nonfinite=mode), callbacks=[Look(mode)], **TINY | {"total_steps": 64})
    dropped, kept = seen["drop"], seen["zero"]
    bad = kept["valid"] & (kept["step"] == 2) & (kept["obs"][..., 0] > 0.7)  # 0.2 above the start
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
def test_a_tenth_rollout_of_which_nothing_is_left_ends_training(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(TINY, "total_steps", 64 * 20)
    monkeypatch.setitem(TINY, "evaluation", {"interval": 10**6, "episodes": 2})
    with pytest.raises(gw.errors.DivergedError, match="numbers of 10 updates in a row were not finite"):
        train(name, lambda: Env("reward", math.nan, limit=-99.0), on_nonfinite="drop", num_steps=10)
    assert len(strictly("metrics.jsonl")) == 9
    assert not any("members with different returns" in message for message in caplog.messages)


@pytest.mark.parametrize("reward", [1e38, -1e38])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_sums_of_finite_rewards_that_overflow_reach_no_statistics(name: str, reward: float):
    class Large(Env):
        def step(self, action: Any) -> Any:
            obs, _, *rest = super().step(action)
            return obs, reward * math.tanh(self.start[0]), *rest

    class Keep(gw.Callback):
        policy: Any

        def on_training_start(self, trainer: gw.Trainer) -> None:
            self.policy = trainer.algorithm.policy

    cfg, settings = ALGORITHMS[name]
    keep = Keep()
    with contextlib.suppress(gw.errors.DivergedError, gw.errors.DataError):
        gw.train(lambda: Large("", 0.0), cfg(**settings), policy={"normalize_reward": True}, callbacks=[keep], **TINY)
    assert all(bool(tensor.isfinite().all()) for tensor in keep.policy.state_dict().values())


def test_evaluations_stop_leave_episodes_out_or_take_0(parts: Any, monkeypatch: pytest.MonkeyPatch):
    import torch

    env = parts.env(2)
    step = env.step
    reward = torch.tensor([1.0, math.nan])
    monkeypatch.setattr(env, "step", lambda action: step(action)._replace(reward=reward.clone()))

    def play(mode: Any) -> Any:
        return evaluate_policy(parts.policy(), env, episodes=2, seed=0, max_steps=3, on_nonfinite=mode).returns

    with pytest.raises(gw.errors.DataError, match="return of evaluation episode 1 is not finite"):
        play("stop")
    assert play("drop") == (3.0,)
    assert play("zero") == (3.0, 0.0)


def test_a_rate_that_could_overflow_a_parameter_is_refused():
    with pytest.raises(
        gw.errors.ConfigError, match="learning_rate = 1e\\+39: input should be less than or equal to 1000"
    ):
        gw.PPOCfg(learning_rate=1e39)
