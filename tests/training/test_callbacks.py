import io
import json
import time
from threading import Event

import numpy as np
import pytest
import torch
from at_events import fail, on
from rich.console import Console

import groupwise as gw
from groupwise.config.run import StopCfg
from groupwise.report.folder import RunFolder
from groupwise.training import callbacks as saving
from groupwise.training.callbacks import Evaluate, MetricsLog, Progress, SaveCheckpoints, StopEarly
from groupwise.training.checkpoint import Identity, load_checkpoint, write_checkpoint
from groupwise.training.evaluation import EvaluationResult
from groupwise.training.trainer import Callback

HERE = Identity("Countdown", "observations", "actions")


def scores(*returns):
    queue = iter(returns)
    return lambda: EvaluationResult((float(next(queue)),), (1,))


def test_evaluation_comes_every_interval_and_at_the_end_and_the_best_is_kept(parts, tmp_path):
    seen = []
    hears = on("evaluation_end", lambda trainer, result: seen.append((trainer.env_steps, result.return_mean)))
    parts.trainer(Evaluate(scores(1.0, 5.0, 3.0), 20, tmp_path / "best", HERE), hears, total_steps=50).train()
    assert seen == [(20, 1.0), (40, 5.0), (50, 3.0)]
    seen.clear()
    parts.trainer(Evaluate(scores(1.0, 1.0, 1.0), 3, tmp_path / "often", HERE), hears, total_steps=30).train()
    assert [steps for steps, _ in seen] == [10, 20, 30]  # an interval shorter than an iteration
    best = load_checkpoint(tmp_path / "best", HERE)
    assert best.state.pop("seconds") > 0
    assert best.state == {"iteration": 4, "env_steps": 40, "epochs": 0.0, "position": 0, "return_mean": 5.0}
    assert best.policy["count"] == 4  # the weights of then, not those of the end
    assert "algorithm" not in best.state


def steps_of(checkpoints):
    """A callback that adds the steps of each checkpoint to a list."""
    return on("checkpoint", lambda _, path: checkpoints.append(load_checkpoint(path, HERE).state["env_steps"]))


@pytest.mark.parametrize(("total_steps", "steps"), [(50, [20, 40, 50]), (40, [20, 40])])
def test_checkpoints_come_every_interval_and_at_the_end(total_steps, steps, parts, tmp_path):
    checkpoints = []
    saves = SaveCheckpoints(tmp_path / "latest", 20, HERE, 1)
    parts.trainer(steps_of(checkpoints), saves, total_steps=total_steps).train()
    assert checkpoints == steps  # the last one is not written twice
    assert load_checkpoint(tmp_path / "latest", HERE).state["env_steps"] == total_steps


class Release(Callback):
    """Lets checkpoints after the first be written from an iteration on."""

    def __init__(self, monkeypatch, at):
        self.at = at
        self.released = Event()
        monkeypatch.setattr(saving, "write_checkpoint", self.write)

    def write(self, folder, *args):
        assert not folder.exists() or self.released.wait(60)
        write_checkpoint(folder, *args)

    def on_iteration_end(self, trainer, rollout, metrics):
        if trainer.iteration == self.at:
            self.released.set()


def test_training_goes_on_while_a_checkpoint_is_written(parts, tmp_path, monkeypatch):
    checkpoints, saves = [], SaveCheckpoints(tmp_path / "latest", 20, HERE, 9)
    release = Release(monkeypatch, at=5)
    parts.trainer(steps_of(checkpoints), release, saves, total_steps=60).train()  # waits for ever if training does
    assert checkpoints == [20, 40, 60]
    older = load_checkpoint(tmp_path / "latest.1", HERE)
    assert older.policy["count"] == 4  # the weights of then, though they are written in iteration 5


def test_the_time_of_evaluations_and_checkpoints_is_logged(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "write_checkpoint", lambda *args: time.sleep(0.02) or write_checkpoint(*args))
    times = []
    keeps = on("iteration_end", lambda trainer, rollout, metrics: times.append(metrics))
    saves = SaveCheckpoints(tmp_path / "latest", 20, HERE, 1)
    evaluate = Evaluate(lambda: time.sleep(0.02) or scores(1.0)(), 20, tmp_path / "best", HERE)
    parts.trainer(evaluate, MetricsLog(tmp_path / "metrics.jsonl", saves), keeps, saves, total_steps=40).train()
    assert [metrics.get("time/evaluate_seconds", 0.0) >= 0.02 for metrics in times] == [False, True, False, True]
    assert times[2]["time/save_seconds"] >= 0.02  # for the first checkpoint, of iteration 2, training waits


def test_the_best_policy_knows_the_place_in_the_data_over_all_ranks(parts, tmp_path):
    trainer = parts.trainer(Evaluate(scores(1.0), 20, tmp_path / "best", HERE), total_steps=20)
    trainer.collector.position, trainer.engine.world_size = 3, 2  # as one of two ranks
    trainer.train()
    assert load_checkpoint(tmp_path / "best", HERE).state["position"] == 6


def test_the_first_checkpoint_is_on_disk_before_training_goes_on(parts, tmp_path):
    """A run that logged more, but has no checkpoint, counts as one that lost it."""

    def there(trainer, *_):
        assert (tmp_path / "latest").exists() == (trainer.iteration >= 2)

    saves = SaveCheckpoints(tmp_path / "latest", 20, HERE, 1)
    parts.trainer(saves, on("rollout_end", there), total_steps=40).train()


def test_a_checkpoint_is_complete_after_an_error(parts, tmp_path, monkeypatch):
    def failing(trainer, *_):
        if trainer.iteration == 5:
            raise gw.errors.DataError("broken rollout")

    saves = SaveCheckpoints(tmp_path / "latest", 20, HERE, 1)
    with pytest.raises(gw.errors.DataError, match="broken rollout"):
        parts.trainer(Release(monkeypatch, at=5), saves, on("rollout_end", failing), total_steps=80).train()
    assert load_checkpoint(tmp_path / "latest", HERE).state["env_steps"] == 40


def test_every_iteration_is_in_the_file_when_it_ends(parts, tmp_path):
    path, lines_seen = tmp_path / "metrics.jsonl", []

    reads = on("iteration_end", lambda *_: lines_seen.append([json.loads(x) for x in path.read_text().splitlines()]))
    adds = on("iteration_end", lambda trainer, rollout, metrics: metrics.update({"mine/number": 3.0}))
    parts.trainer(adds, MetricsLog(path), reads, total_steps=30).train()
    assert [len(lines) for lines in lines_seen] == [1, 2, 3]
    last = lines_seen[-1][-1]
    assert (last["iteration"], last["env_steps"], last["mine/number"]) == (3, 30, 3.0)


def test_numbers_of_a_callback_can_be_read_again_and_others_are_refused(parts, tmp_path, caplog):
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
    set_to = {f"{number:099}": 1.0 for number in range(10_000)}
    with pytest.raises(
        gw.errors.RunFolderError, match=r"10,\d+ metrics of iteration 1 .* more than 1,048,576 bytes.*; fix: "
    ):
        parts.trainer(adds, MetricsLog(folder.metrics), total_steps=10).train()
    assert len(folder.read_metrics()) == 1
    assert caplog.messages == []  # lines of an earlier run are no missing ones


@pytest.mark.parametrize(("metric", "threshold", "reached"), [("return", 9.0, "9"), ("success_rate", 0.9, "1")])
@pytest.mark.parametrize("rounded", [0.0, 1e-14], ids=["exact", "a sum with weights"])
def test_stops_at_the_score(metric, threshold, reached, rounded, parts, tmp_path):
    scores = [(1.0, False), (9.0 - rounded, True)]
    results = iter([EvaluationResult((score,), (1,), successes=(success,)) for score, success in scores])
    stops = StopEarly(StopCfg(threshold=threshold), metric)
    trainer = parts.trainer(Evaluate(lambda: next(results), 10, tmp_path / "best", HERE), stops)
    trainer.train()
    assert trainer.env_steps == 20
    assert trainer.stop_reason == f"score: {metric} {reached} reached the threshold {threshold:g}"


def test_a_run_that_reached_its_score_is_finished(tmp_path):
    def again(**stop):
        settings = json.loads((run.path / "config.json").read_text())
        (run.path / "config.json").write_text(json.dumps(settings | {"stop": settings["stop"] | stop}))
        return gw.resume(run.path)

    settings = {"num_envs": 4, "evaluation": {"interval": 64, "episodes": 2}, "logging": {"progress": "none"}}
    run = gw.train(
        "CartPole-v1", "ppo", total_steps=10_000, stop={"threshold": 1.0}, run_dir=tmp_path / "run", **settings
    )
    steps = run.summary["env_steps"]
    assert again().summary["env_steps"] == steps < 10_000
    assert again().summary["stopped"] == run.summary["stopped"]
    fork = gw.resume(gw.fork(run.path, tmp_path / "fork", env={"max_episode_steps": 20}))
    assert fork.summary["env_steps"] > steps
    assert again(threshold=None).summary["stopped"] == "total_steps"


def test_stops_when_time_is_over(parts):
    trainer = parts.trainer(StopEarly(StopCfg(time_limit=1e-9)))
    trainer.train()
    assert (trainer.env_steps, trainer.stop_reason) == (10, "time: the limit of 1e-09 s is over")


@pytest.mark.parametrize(("interval", "count"), [(0.0, 4), (3600.0, 1)])
def test_plain_lines_come_at_the_interval_and_at_the_end(interval, count, parts, tmp_path):
    out = io.StringIO()
    progress = Progress("auto", interval, console=Console(file=out, width=40))
    parts.trainer(Evaluate(scores(2.5, 2.5), 20, tmp_path / "best", HERE), progress, total_steps=40).train()
    lines = out.getvalue().splitlines()
    assert len(lines) == count  # a file is no terminal, and a narrow one wraps no line
    assert "100%          40 / 40 steps" in lines[-1]
    assert "return" in lines[-1]
    assert "eval    2.500" in lines[-1]


def test_a_terminal_gets_a_bar_or_a_line_for_each_iteration(parts):
    out = {mode: io.StringIO() for mode in ("iterations", "auto")}
    for mode, file in out.items():
        console = Console(file=file, force_terminal=True, width=120)
        parts.trainer(Progress(mode, 1.0, console=console), total_steps=40).train()
    assert len(out["iterations"].getvalue().splitlines()) == 4
    assert "40/40" in out["auto"].getvalue()
    assert "steps/s" in out["auto"].getvalue()


def test_bar_is_closed_after_an_error(parts):
    failing = on("rollout_end", fail(RuntimeError("broken callback")))
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(RuntimeError, match="broken callback"):
        parts.trainer(Progress("bar", 1.0, console=console), failing).train()
    assert console.file.getvalue().endswith("\x1b[?25h")  # the cursor is shown again


@pytest.mark.parametrize("installed", [True, False])
def test_a_notebook_without_ipywidgets_gets_lines(monkeypatch, installed):
    monkeypatch.setattr(saving, "find_spec", lambda name: (name == "ipywidgets" and installed) or None)
    progress = Progress("auto", console=Console(file=io.StringIO(), force_jupyter=True))
    assert (progress.bar is not None) is installed
