"""Whatever happens to a tracker, training goes on as without it, and one warning says so."""

import hashlib
import json
import logging
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import groupwise as gw
from groupwise.training import trackers
from groupwise.training.trackers import Report

FAKE = """
import json, os, threading, time
BROKEN = os.environ.get("BROKEN", "")
def write(*what):
    with open("log", "a") as log: print(json.dumps(what), file=log)
def fails(where, item=1):
    if BROKEN == where and item > 64: raise OSError(f"the server [/x] \\x1b[2J is down at {where}")
    if BROKEN == f"hang in {where}": threading.Event().wait()
class Settings:
    mode = "online"
    def __init__(self, **settings): vars(self).update(settings)
def setup(): return type("Setup", (), {"settings": Settings()})
def login(prompt): return BROKEN != "no key"
class Run:
    def log(self, metrics, step): fails("log", step); write(step, len(metrics) > 5)
    def finish(self): fails("finish", 99); write("finished")
def init(**kwargs):
    fails("init", 99)
    write(kwargs["project"], len(kwargs["id"]), kwargs["config"]["seed"])
    return Run()
"""
TINY: dict[str, Any] = {
    "algorithm": gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64),
    "num_envs": 4, "total_steps": 192, "seed": 4,
    "evaluation": {"episodes": 2}, "logging": {"progress": "none"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fake_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield
    sys.modules.pop("wandb", None)


def learned(run: gw.Run) -> tuple[str, list[dict[str, float]]]:
    digest = hashlib.sha256()
    for value in run.policy.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest(), [{k: v for k, v in e.items() if not k.startswith("time/")} for e in run.metrics()]


@pytest.fixture(scope="module")
def untracked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return learned(gw.train("CartPole-v1", run_dir=tmp_path_factory.mktemp("runs") / "untracked", **TINY))


@pytest.mark.parametrize(
    ("broken", "said", "logged"),
    [
        ("no key", "ConfigError: no API key; fix: wandb login, or WANDB_MODE=offline", 0),
        ("init", "the server [/x] \\x1b[2J is down at init", 0),
        ("log", "the server [/x] \\x1b[2J is down at log", 3),
        ("finish", "the server [/x] \\x1b[2J is down at finish", 4),
        ("hang in init", "it is still busy after 0.2 s", 0),
        ("hang in log", "it is still busy after 0.2 s", 1),
        ("hang in finish", "it is still busy after 0.2 s", 4),
        ("missing", "MissingExtraError: 'wandb' is not installed; fix: pip install -e '.[track]' in the checkout", 0),
    ],
)
def test_a_broken_tracker_is_one_warning(
    broken: str,
    said: str,
    logged: int,
    untracked: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setenv("BROKEN", broken)
    monkeypatch.setattr(trackers, "_SECONDS_TO_CLOSE", 0.2 if "hang" in broken else 30.0)
    if broken == "missing":
        monkeypatch.setattr("groupwise.errors.find_spec", lambda module: None)
    start = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        run = gw.train(
            "CartPole-v1", run_dir="mine", **TINY | {"logging": {"report_to": ["wandb"], "progress": "none"}}
        )
    assert learned(run) == untracked
    (line,) = [record.getMessage() for record in caplog.records if "metrics" in record.getMessage()]
    assert line.startswith("W&B gets no more metrics (")
    assert said in line
    assert line.endswith("training goes on, metrics.jsonl has all")
    assert len(Path("log").read_text().splitlines() if Path("log").exists() else []) == logged
    assert time.perf_counter() - start < 20


def test_trackers_get_every_iteration(untracked: Any):
    track = {"report_to": ["tensorboard", "wandb"], "progress": "none"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own, on import
        run = gw.train("CartPole-v1", run_dir="mine", **TINY | {"logging": track})
    assert learned(run) == untracked
    assert len(list((run.path / "tensorboard").iterdir())) == 1
    lines = [json.loads(line) for line in Path("log").read_text().splitlines()]
    assert lines == [["groupwise", 32, 4], [64, True], [128, True], [192, True], ["finished"]]


class Slow:
    """Takes a while for everything."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.steps: list[int] = []

    def open(self, step: int) -> None:
        time.sleep(self.seconds)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        time.sleep(self.seconds)
        self.steps.append(step)

    def close(self) -> None:
        time.sleep(self.seconds)


def test_a_slow_tracker_delays_no_iteration_and_gets_all(parts: Any):
    slow, ends = Slow(0.3), []

    class Clock(gw.Callback):
        def on_training_end(self, trainer: gw.Trainer) -> None:
            ends.append(time.perf_counter() - start)

    start = time.perf_counter()
    parts.trainer(Report("slow", slow), Clock(), total_steps=60).train()
    assert slow.steps == [10, 20, 30, 40, 50, 60]
    assert ends[0] < 1.5 < 2.4 < time.perf_counter() - start


def test_iterations_that_wait_for_a_tracker_are_limited(
    parts: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(trackers, "_MAX_WAITING", 3)
    slow = Slow(1.0)
    parts.trainer(Report("slow", slow), total_steps=90).train()
    assert [record.getMessage().partition(";")[0] for record in caplog.records] == [
        "slow gets no more metrics (3 iterations wait for it)"
    ]
