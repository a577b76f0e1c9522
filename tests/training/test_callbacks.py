import json
import time
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from at_events import on
from tensordict import TensorDict

import groupwise as gw
from groupwise.report.folder import RunFolder
from groupwise.training import callbacks as saving
from groupwise.training.callbacks import Evaluate, MetricsLog, SaveCheckpoints, StopAtScore, TimeLimit
from groupwise.training.checkpoint import Identity, load_checkpoint, write_checkpoint
from groupwise.training.evaluation import EvaluationResult
from groupwise.training.trainer import Callback, Trainer

HERE = Identity("Countdown", "observations", "actions")


def scores(*returns: float) -> Any:
    queue = iter(returns)
    return lambda: EvaluationResult((float(next(queue)),), (1,))


class AtEvaluation(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []
        self.checkpoints: list[int] = []

    def on_evaluation_end(self, trainer: Trainer, evaluation: EvaluationResult) -> None:
        self.seen.append((trainer.env_steps, evaluation.return_mean))

    def on_checkpoint(self, trainer: Trainer, path: Path) -> None:
        self.checkpoints.append(load_checkpoint(path, HERE).state["env_steps"])


def test_evaluation_comes_every_interval_and_at_the_end_and_the_best_is_kept(parts: Any, tmp_path: Path):
    hears, often = AtEvaluation(), AtEvaluation()
    parts.trainer(Evaluate(scores(1.0, 5.0, 3.0), 20, tmp_path / "best", HERE), hears, total_steps=50).train()
    assert hears.seen == [(20, 1.0), (40, 5.0), (50, 3.0)]
    parts.trainer(Evaluate(scores(1.0, 1.0, 1.0), 3, tmp_path / "often", HERE), often, total_steps=30).train()
    assert [steps for steps, _ in often.seen] == [10, 20, 30]  # an interval shorter than an iteration
    best = load_checkpoint(tmp_path / "best", HERE)
    assert best.state == {"iteration": 4, "env_steps": 40, "epochs": 0.0, "position": 0, "return_mean": 5.0}
    assert best.policy["count"] == 4  # the weights of then, not those of the end
    assert "algorithm" not in best.state


def test_best_return_survives_a_resume(parts: Any, tmp_path: Path):
    first = parts.trainer(Evaluate(scores(5.0), 20, tmp_path / "best", HERE), total_steps=20)
    first.train()
    second = parts.trainer(Evaluate(scores(4.0), 20, tmp_path / "best", HERE), total_steps=40)
    second.load_state_dict(first.state_dict())
    second.train()
    assert load_checkpoint(tmp_path / "best").state["return_mean"] == 5.0


@pytest.mark.parametrize(("total_steps", "saved"), [(50, [20, 40, 50]), (40, [20, 40])])
def test_checkpoints_come_every_interval_and_at_the_end(total_steps: int, saved: list[int], parts: Any, tmp_path: Path):
    hears = AtEvaluation()
    parts.trainer(hears, SaveCheckpoints(tmp_path / "latest", 20, HERE, 1), total_steps=total_steps).train()
    assert hears.checkpoints == saved  # the last one is not written twice
    assert load_checkpoint(tmp_path / "latest", HERE).state["env_steps"] == total_steps


class Release(Callback):
    """Lets checkpoints after the first be written from an iteration on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.at = at
        self.released = Event()
        monkeypatch.setattr(saving, "write_checkpoint", self.write)

    def write(self, folder: Path, *args: Any) -> None:
        assert not folder.exists() or self.released.wait(60)
        write_checkpoint(folder, *args)

    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, float]) -> None:
        if trainer.iteration == self.at:
            self.released.set()


def test_training_goes_on_while_a_checkpoint_is_written(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hears = AtEvaluation()
    saves = SaveCheckpoints(tmp_path / "latest", 20, HERE, 9)
    release = Release(monkeypatch, at=5)
    parts.trainer(hears, release, saves, total_steps=60).train()  # waits for ever if training does
    assert hears.checkpoints == [20, 40, 60]
    older = load_checkpoint(tmp_path / "latest.1", HERE)
    assert older.policy["count"] == 4  # the weights of then, though they are written in iteration 5


def test_the_time_of_evaluations_and_checkpoints_is_logged(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def slow() -> EvaluationResult:
        time.sleep(0.02)
        return EvaluationResult((1.0,), (1,))

    monkeypatch.setattr(saving, "write_checkpoint", lambda *args: time.sleep(0.02) or write_checkpoint(*args))

    times: list[dict[str, float]] = []
    keeps = on("iteration_end", lambda trainer, rollout, metrics: times.append(metrics))
    saves = SaveCheckpoints(tmp_path / "latest", 20, HERE, 1)
    evaluate = Evaluate(slow, 20, tmp_path / "best", HERE)
    parts.trainer(evaluate, MetricsLog(tmp_path / "metrics.jsonl", saves), keeps, saves, total_steps=40).train()
    assert [metrics.get("time/evaluate_seconds", 0.0) >= 0.02 for metrics in times] == [False, True, False, True]
    assert (
        times[2]["time/save_seconds"] >= 0.02
    )  # the checkpoint of the second iteration, for which training waits: it is the first


def test_the_first_checkpoint_is_on_disk_before_training_goes_on(parts: Any, tmp_path: Path):
    """A run that logged more, but has no checkpoint, counts as one that lost it."""

    def there(trainer: Trainer, *_: Any) -> None:
        assert (tmp_path / "latest").exists() == (trainer.iteration >= 2)

    saves = SaveCheckpoints(tmp_path / "latest", 20, HERE, 1)
    parts.trainer(saves, on("rollout_end", there), total_steps=40).train()


def test_a_checkpoint_is_complete_after_an_error(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def failing(trainer: Trainer, *_: Any) -> None:
        if trainer.iteration == 5:
            raise gw.errors.DataError("broken rollout")

    saves = SaveCheckpoints(tmp_path / "latest", 20, HERE, 1)
    with pytest.raises(gw.errors.DataError, match="broken rollout"):
        parts.trainer(Release(monkeypatch, at=5), saves, on("rollout_end", failing), total_steps=80).train()
    assert load_checkpoint(tmp_path / "latest", HERE).state["env_steps"] == 40


def test_every_iteration_is_in_the_file_when_it_ends(parts: Any, tmp_path: Path):
    path, lines_seen = tmp_path / "metrics.jsonl", []

    reads = on("iteration_end", lambda *_: lines_seen.append([json.loads(x) for x in path.read_text().splitlines()]))
    adds = on("iteration_end", lambda trainer, rollout, metrics: metrics.update({"mine/number": 3.0}))
    parts.trainer(adds, MetricsLog(path), reads, total_steps=30).train()
    assert [len(lines) for lines in lines_seen] == [1, 2, 3]
    last = lines_seen[-1][-1]
    assert (last["iteration"], last["env_steps"], last["mine/number"]) == (3, 30, 3.0)


def test_numbers_of_a_callback_can_be_read_again_and_others_are_refused(
    parts: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    folder = RunFolder.create({}, tmp_path / "run")
    set_to = {"numpy": np.float32(1.5), "tensor": torch.ones(1), "yes": True, "nan": float("nan"), "env_steps": 7}

    adds = on("iteration_end", lambda trainer, rollout, metrics: metrics.update(set_to))
    parts.trainer(adds, MetricsLog(folder.metrics), total_steps=10).train()
    (entry,) = folder.read_metrics()
    assert (entry["numpy"], entry["tensor"], entry["yes"], entry["env_steps"]) == (1.5, 1.0, 1.0, 10)
    assert "nan" not in entry
    for value in ("1.5", None, [1.0, 2.0], torch.ones(2), np.ones(2)):
        set_to["mine/value"] = value
        with pytest.raises(TypeError, match=r"a callback set metrics\['mine/value'\] to .*expected a number; fix: "):
            parts.trainer(adds, MetricsLog(folder.metrics), total_steps=10).train()
    assert len(folder.read_metrics()) == 1
    assert caplog.messages == []  # lines of an earlier run are no missing ones


@pytest.mark.parametrize(("metric", "threshold", "reached"), [("return", 9.0, "9"), ("success_rate", 0.9, "1")])
def test_stops_at_the_score(metric: Any, threshold: float, reached: str, parts: Any, tmp_path: Path):
    results = iter(
        [EvaluationResult((1.0,), (1,), successes=(False,)), EvaluationResult((9.0,), (1,), successes=(True,))]
    )
    stops = StopAtScore(threshold, metric)
    trainer = parts.trainer(Evaluate(lambda: next(results), 10, tmp_path / "best", HERE), stops)
    trainer.train()
    assert trainer.env_steps == 20
    assert trainer.stop_reason == f"score: {metric} {reached} reached the threshold {threshold:g}"


def test_stops_when_time_is_over(parts: Any):
    trainer = parts.trainer(TimeLimit(0.0))
    trainer.train()
    assert (trainer.env_steps, trainer.stop_reason) == (10, "time: the limit of 0 s is over")
