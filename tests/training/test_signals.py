"""Signals at any moment: the run ends soon, nothing that was learned is lost, and a resumed run goes on exactly."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from text_runs import DIGITS, save_model

import groupwise as gw
from groupwise import run as running
from groupwise.report.folder import RunFolder
from groupwise.training.checkpoint import load_checkpoint, saved_counts
from groupwise.training.trainer import STOP

ROUNDS = int(os.environ.get("TORTURE_ROUNDS", "1"))
CONTROL = ["CartPole-v1", "--algorithm", "ppo", "--total-steps", "30000", "--speed", "off"]


class Hangs(gymnasium.Env[Any, Any]):
    """From step 300 on a step takes a minute; then a signal comes first."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        Hangs.count += 1
        if Hangs.count > 300:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return np.zeros(3, np.float32), float(action), Hangs.count % 10 == 0, False, {}


@pytest.mark.timeout(0)  # pytest's own time limit takes SIGALRM
def test_after_a_signal_a_hung_environment_is_left_and_the_last_iteration_is_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(running, "SECONDS_TO_FINISH", 1)
    monkeypatch.setattr(Hangs, "count", 0)
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt, match="saved after step 256"):
        gw.train(
            Hangs, gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64), num_envs=4, total_steps=9999,
            run_dir=tmp_path / "run", evaluation={"interval": 9999, "episodes": 1}, logging={"progress": "none"},
        )  # fmt: skip
    assert time.perf_counter() - start < 20
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.alarm(0) == 0


class SlowUpdateAndSave(gw.Callback):
    """The update after a signal, and what saves then, take longer than a collection may."""

    saved = False

    def on_rollout_end(self, trainer: gw.Trainer, rollout: TensorDict) -> None:
        assert trainer.doing == "updating"
        os.kill(os.getpid(), signal.SIGHUP)
        self._wait()

    def on_interrupt(self, trainer: gw.Trainer) -> None:
        self._wait()
        self.saved = True

    def _wait(self) -> None:
        end = time.monotonic() + 1.2
        while time.monotonic() < end:
            time.sleep(0.01)


@pytest.mark.timeout(0)
def test_an_update_and_a_checkpoint_may_take_longer(parts: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(running, "SECONDS_TO_FINISH", 1)
    slow = SlowUpdateAndSave()
    trainer = parts.trainer(slow)
    with running.finishing_on_signal(trainer), pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert (trainer.iteration, slow.saved) == (1, True)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(ROUNDS))
@pytest.mark.parametrize("kind", ["control", pytest.param("text", marks=pytest.mark.text)])
def test_signals_at_random_moments(tmp_path: Path, kind: str, seed: int):
    if kind == "control":
        stop_at_random(tmp_path, CONTROL, 2, seed)
        return
    rows = [json.dumps({"prompt": " ".join(DIGITS[:n]), "answer": "1"}) for n in range(1, 9)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
    settings = {
        "task": {"data": "prompts.jsonl", "eval_data": "prompts.jsonl", "eval_overlap": "keep", "rewards": [{"name": "exact"}]},
        "model": {"path": str(save_model(tmp_path / "model"))},
        "num_prompts": 4, "sampling": {"max_new_tokens": 8}, "total_steps": 6000,
    }  # fmt: skip
    (tmp_path / "text.json").write_text(json.dumps(settings))
    stop_at_random(tmp_path, ["text.json"], 1, seed)


def stop_at_random(folder: Path, target: list[str], count: int, seed: int) -> None:
    """Stop runs of ``groupwise train`` by this many signals, and compare with a run that was not stopped."""
    rng = random.Random(seed)
    whole, stopped = folder / "whole", folder / "stopped"
    start = time.monotonic()
    assert _command(folder, "train", *target, "--run-dir", whole).wait() == 0
    seconds = time.monotonic() - start
    for number in range(count):
        again = ("resume", stopped) if RunFolder(stopped).config.exists() else ("train", *target, "--run-dir", stopped)
        process = _command(folder, *again)
        time.sleep(rng.uniform(0.3, 0.8) * seconds)
        process.send_signal(rng.choice(STOP))
        code = process.wait(90)  # 30 s are promised on an idle machine
        assert code in (0, 130) or code < 0, (number, code)  # done, interrupted, or before training
    if RunFolder(stopped).config.exists():
        assert _command(folder, "resume", stopped).wait() == 0
        first, second = (load_checkpoint(path / "checkpoints/latest").policy for path in (whole, stopped))
        assert all(torch.equal(value, second[name]) for name, value in first.items())
        assert (
            saved_counts(stopped / "checkpoints/latest")["steps"] == saved_counts(whole / "checkpoints/latest")["steps"]
        )
        numbers = [entry["iteration"] for entry in RunFolder(stopped).read_metrics()]
        assert numbers == list(range(1, len(numbers) + 1))


def _command(folder: Path, *words: Any) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "groupwise", *map(str, words)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
