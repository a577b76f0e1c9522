"""A run from which nothing can be learned says so: once while it runs, and in its summary."""

import logging
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import groupwise as gw
from groupwise.cli.train import print_run


class Steady(gymnasium.Env[Any, Any]):
    """Three steps; ``pays`` is the reward of action 1."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, pays: float = 0.0) -> None:
        self.pays = pays

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left, self.obs = 3, self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.obs, {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self.obs, self.pays * float(action), self.left == 0, False, {}


def trained(path: Path, algorithm: gw.config.AlgorithmCfg, pays: float = 0.0) -> gw.Run:
    quiet: dict[str, Any] = {"logging": {"progress": "none"}, "evaluation": {"episodes": 2}, "max_episode_steps": 3}
    return gw.train(lambda: Steady(pays), algorithm, num_envs=4, total_steps=48, run_dir=path, seed=0, **quiet)


def test_a_run_without_any_gradient_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
):
    run = trained(tmp_path / "run", gw.GRPOCfg(group_size=2, num_steps=6, num_epochs=2))
    assert run.summary["updates_without_gradient"] == run.summary["iterations"] > 1
    assert run.summary == gw.Run.load(run.path, env=Steady).summary
    said = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [message[:23] for message in said] == ["update 1 learns nothing"]
    assert print_run(run) == 0
    assert (
        "Nothing was learned: the gradient of every update was 0 (docs/troubleshooting.md)." in capsys.readouterr().out
    )


@pytest.mark.parametrize("algorithm", [gw.GRPOCfg(group_size=2, num_steps=6), gw.PPOCfg(num_steps=6)])
def test_a_run_with_a_gradient_does_not(
    algorithm: gw.config.AlgorithmCfg,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
):
    run = trained(tmp_path / "run", algorithm, pays=1.0)
    assert run.summary.get("updates_without_gradient", 0) < run.summary["iterations"]
    assert not caplog.records
    assert print_run(run) == 0
    assert "Nothing was learned" not in capsys.readouterr().out
