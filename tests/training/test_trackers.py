"""Whatever happens to a tracker, training continues as without it, and one warning says so."""

import json
import logging
import sys
import threading
import time
import warnings
from pathlib import Path
from unittest.mock import MagicMock, call

import pytest
from at_events import on
from run_folders import logged, same_weights

import groupwise as gw
from groupwise.training import trackers
from groupwise.training.trackers import Report, make_tracker

FAKE = """
import json, os, threading, time
BROKEN = os.environ.get("BROKEN", "")
CALLS = []
def write(*what):
    with open("log", "a") as log: print(json.dumps(what), file=log)
def fails(where, item=1):
    if BROKEN == where and item > 64: raise OSError(f"the server [/x] \\x1b[2J is down at {where}")
    if BROKEN == f"hang in {where}": threading.Event().wait()
class Settings:
    def __init__(self, **settings): vars(self).update(settings)
def setup():
    found = {name: os.environ.get(f"WANDB_{key}") for name, key in [("project", "PROJECT"), ("run_name", "NAME"), ("run_id", "RUN_ID")]}
    return type("Setup", (), {"settings": Settings(mode=os.environ.get("WANDB_MODE", "online"), **found)})
def login(prompt): return BROKEN != "no key"
class Run:
    def log(self, metrics, step): fails("log", step); write(step, len(metrics) > 5)
    def finish(self): fails("finish", 99); write("finished")
def init(**kwargs):
    fails("init", 99)
    write(kwargs["project"], len(kwargs["id"]), kwargs["config"]["seed"])
    CALLS.append(kwargs)
    return Run()
"""
TINY = {
    "algorithm": gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64),
    "num_envs": 4, "total_steps": 192, "seed": 4,
    "evaluation": {"episodes": 2}, "logging": {"progress": "none"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fake_wandb(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/wandb.py").write_text(FAKE)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield
    sys.modules.pop("wandb", None)


@pytest.fixture(scope="module")
def untracked(tmp_path_factory):
    return gw.train("CartPole-v1", run_dir=tmp_path_factory.mktemp("runs") / "untracked", **TINY)


def assert_same(run, other):
    assert same_weights(run, other)
    assert logged(run) == logged(other)


@pytest.mark.parametrize(
    ("broken", "message", "lines"),
    [
        ("no key", "ConfigError: no API key; fix: wandb login, or mode='offline' (WANDB_MODE=offline)", 0),
        ("init", "the server [/x] \\x1b[2J is down at init", 0),
        ("log", "the server [/x] \\x1b[2J is down at log", 3),
        ("finish", "the server [/x] \\x1b[2J is down at finish", 4),
        ("hang in init", "it is still busy after 0.2 s", 0),
        ("hang in log", "it is still busy after 0.2 s", 1),
        ("hang in finish", "it is still busy after 0.2 s", 4),
        ("missing", "MissingExtraError: 'wandb' is not installed; fix: pip install -e '.[track]' in the checkout", 0),
    ],
)
def test_a_broken_tracker_is_one_warning(broken, message, lines, untracked, monkeypatch, caplog):
    monkeypatch.setenv("BROKEN", broken)
    monkeypatch.setattr(trackers, "_SECONDS_TO_CLOSE", 0.2 if "hang" in broken else 30.0)
    if broken == "missing":
        monkeypatch.setattr("groupwise.errors.find_spec", lambda module: None)
    start = time.perf_counter()
    with caplog.at_level(logging.WARNING):
        run = gw.train(
            "CartPole-v1", run_dir="mine", **TINY | {"logging": {"report_to": ["wandb"], "progress": "none"}}
        )
    assert_same(run, untracked)
    (line,) = [record.getMessage() for record in caplog.records if "metrics" in record.getMessage()]
    assert line.startswith("wandb gets no more metrics (")
    assert message in line
    assert line.endswith("training goes on, metrics.jsonl has all")
    assert len(Path("log").read_text().splitlines() if Path("log").exists() else []) == lines
    assert time.perf_counter() - start < 20


def test_trackers_get_every_iteration(untracked):
    track = {"report_to": ["tensorboard", "wandb"], "progress": "none"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensorboard's own, on import
        run = gw.train("CartPole-v1", run_dir="mine", **TINY | {"logging": track})
    assert_same(run, untracked)
    assert len(list((run.path / "tensorboard").iterdir())) == 1
    lines = [json.loads(line) for line in Path("log").read_text().splitlines()]
    assert lines == [["groupwise", 32, 4], [64, True], [128, True], [192, True], ["finished"]]


def tracked_run(folder="arms"):
    return gw.config.TrackedRun(Path(folder), "0123456789abcdef", {"seed": 4, "env": {"id": "x", "sizes": [64, 64]}})


def sent_to_wandb(**parameters):
    cfg = gw.config.LoggingCfg(report_to=[{"name": "wandb", **parameters}]).report_to[0]
    tracker = make_tracker(cfg, tracked_run())
    tracker.open(0)
    return sys.modules["wandb"].CALLS[-1]


def test_wandb_takes_what_is_set_then_its_variables_then_ours(monkeypatch):
    plain = sent_to_wandb()
    assert (plain["project"], plain["name"], plain["id"], plain["dir"]) == (
        "groupwise", "arms", "0123456789abcdef", "arms",
    )  # fmt: skip
    assert [plain[name] for name in ("entity", "group", "tags", "mode")] == [None] * 4  # wandb fills in its own
    for name in ("PROJECT", "NAME", "RUN_ID", "DIR"):
        monkeypatch.setenv(f"WANDB_{name}", f"their {name.lower()}")
    theirs = sent_to_wandb()
    assert (theirs["project"], theirs["name"], theirs["id"], theirs["dir"]) == (
        "their project", "their name", "their run_id", "their dir",
    )  # fmt: skip
    given = {"project": "p", "entity": "e", "group": "g", "tags": ["a", "b"], "mode": "disabled"}
    ours = sent_to_wandb(run_name="n", **given)
    assert {name: ours[name] for name in ("name", *given)} == {"name": "n", **given, "tags": ("a", "b")}


@pytest.mark.parametrize("by_variable", [False, True])
def test_wandb_offline_needs_no_key(by_variable, monkeypatch):
    monkeypatch.setenv("BROKEN", "no key")
    if by_variable:
        monkeypatch.setenv("WANDB_MODE", "offline")
    assert sent_to_wandb(**{} if by_variable else {"mode": "offline"})["project"] == "groupwise"
    with pytest.raises(gw.errors.ConfigError, match="no API key"):
        sent_to_wandb(mode="online")


def test_the_tracker_of_the_docs_gets_every_iteration(registry, monkeypatch):
    mlflow = MagicMock()
    mlflow.search_runs.return_value = []
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    page = (Path(__file__).parents[2] / "docs/report.md").read_text()
    (block,) = [block for block in page.split("```") if "class MLflow:" in block]
    exec(block.removeprefix("python").partition("gw.train(")[0], {"__name__": "page"})
    gw.train("CartPole-v1", run_dir="mine", **TINY | {"logging": {"report_to": ["mlflow"], "progress": "none"}})
    assert [entry.kwargs["step"] for entry in mlflow.log_metrics.mock_calls] == [64, 128, 192]
    assert [name for name, *_ in mlflow.mock_calls[:3]] == ["set_experiment", "search_runs", "start_run"]
    assert mlflow.mock_calls[-1] == call.end_run()
    first = mlflow.start_run.mock_calls[0].kwargs["tags"]
    mlflow.search_runs.return_value = [MagicMock(info=MagicMock(run_id="theirs"))]
    gw.resume("mine", 256)
    assert mlflow.start_run.mock_calls[-1] == call("theirs", run_name="mine", tags=first)


def test_a_slow_tracker_delays_no_iteration_and_gets_all(parts):
    trained, steps, slow = threading.Event(), [], MagicMock()

    def log(metrics, step):
        assert trained.wait(60)  # an iteration that waited for it would wait for ever
        steps.append(step)

    def end(trainer):
        assert steps == []
        trained.set()

    slow.log = log
    parts.trainer(Report("slow", slow), on("training_end", end), total_steps=60).train()
    assert steps == [10, 20, 30, 40, 50, 60]


@pytest.mark.parametrize("first", [True, False])
def test_the_iteration_after_which_a_callback_failed_is_sent_once(first, parts):
    tracker, steps = MagicMock(), []
    tracker.log = lambda metrics, step: steps.append(step)

    def fail(trainer, rollout, metrics):
        if trainer.iteration == 3:
            raise OSError("no room")

    callbacks = [on("iteration_end", fail), Report("mine", tracker)]
    with pytest.raises(OSError, match="no room"):
        parts.trainer(*(callbacks if first else callbacks[::-1]), total_steps=60).train()
    assert steps == [10, 20, 30]


def test_iterations_that_wait_for_a_tracker_are_limited(parts, monkeypatch, caplog):
    monkeypatch.setattr(trackers, "_MAX_WAITING", 3)
    slow = MagicMock(log=lambda metrics, step: time.sleep(1.0))
    parts.trainer(Report("slow", slow), total_steps=90).train()
    warnings = [record.getMessage().partition(";")[0] for record in caplog.records]
    assert warnings == ["slow gets no more metrics (3 iterations wait for it)"]
