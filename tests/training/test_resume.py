"""A run that was killed and resumed equals one that never stopped, bit for bit, as does one with other processes."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from at_events import interrupt_after, on
from forked import Script
from gymnasium.envs.classic_control import CartPoleEnv
from killed_runs import dies_at
from run_folders import logged, same_weights
from torch_pendulum import TorchPendulum

import groupwise as gw
from groupwise.config.load import objective_preset
from groupwise.report import folder as module
from groupwise.report.folder import RunFolder
from groupwise.training.build import EnvEvaluator
from groupwise.training.checkpoint import load_checkpoint, serialize

COMMON = {"evaluation": {"interval": 500, "episodes": 2}, "logging": {"progress": "none"}, "checkpoint_interval": 400}
RUNS = {
    "ppo": {
        "algorithm": gw.PPOCfg(num_steps=32, num_epochs=2, minibatch_size=64, schedule={"name": "linear"}),
        "policy": gw.PolicyCfg(normalize_obs=True, normalize_reward=True),
        "env": {"num_envs": 4},
    },
    "recurrent": {
        "algorithm": gw.PPOCfg(num_steps=16, num_epochs=2, minibatch_size=64),
        "policy": {"name": "recurrent", "hidden_size": 8, "hidden_sizes": (8,), "normalize_obs": True},
        "env": {"num_envs": 8},
    },
    "grpo": {
        "algorithm": gw.GRPOCfg(
            num_steps=50, num_epochs=2, group_size=4, kl_coef=0.1, sync_ref_model={"steps": 2, "mixup_alpha": 0.6}
        ),
        "env": {"num_envs": 4},
    },
}
RUNS["lstd"] = {
    "algorithm": gw.GRPOCfg(num_steps=50, num_epochs=2, group_size=4, **objective_preset("lstd").settings),
    "env": {"num_envs": 4},
}
SLOW = """
import sys, time
import groupwise as gw
from groupwise.config.load import objective_preset

class Slow(gw.Callback):
    def on_iteration_end(self, trainer, rollout, metrics):
        time.sleep(0.1)

gw.train(gw.RunCfg.model_validate_json(sys.argv[1]), callbacks=[Slow()])
"""


def settings(name, run_dir):
    cfg = gw.RunCfg.model_validate(COMMON | RUNS[name] | {"seed": 7, "total_steps": 1600})
    return cfg.model_copy(update={"run_dir": run_dir})


def assert_same_run(a, b):
    assert logged(a) == logged(b)
    for folder in ("latest", "best"):
        first, second = (load_checkpoint(path / "checkpoints" / folder) for path in (a, b))
        for checkpoint in (first, second):
            checkpoint.state.pop("seconds", None)
        assert serialize(first) == serialize(second)


@pytest.fixture(scope="module", params=["ppo", pytest.param("recurrent", marks=pytest.mark.slow), "grpo", "lstd"])
def uninterrupted(request, tmp_path_factory):
    return gw.train(settings(request.param, tmp_path_factory.mktemp(request.param) / "whole"))


def test_killed_and_resumed_equals_uninterrupted(uninterrupted, tmp_path):
    path = tmp_path / "killed"
    cfg = uninterrupted.cfg.model_copy(update={"run_dir": path})
    child = Script(SLOW, cfg.model_dump_json())
    deadline = time.monotonic() + 60
    wanted = 1 + next(e["iteration"] for e in logged(uninterrupted.path) if e["env_steps"] >= 800)
    while len(RunFolder(path).read_metrics()) < wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    child.kill()
    assert 0 < len(logged(path)) < len(logged(uninterrupted.path))
    assert RunFolder(path).read_summary() == {}

    run = gw.resume(path)
    assert_same_run(uninterrupted.path, path)
    assert run.summary["env_steps"] == uninterrupted.summary["env_steps"]


@pytest.mark.parametrize("which", [1, -1], ids=["in the middle", "of the last iteration"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_evaluation_that_did_not_end_is_made_up_for(uninterrupted, tmp_path, monkeypatch, which, error):
    evaluations = [entry["iteration"] for entry in logged(uninterrupted.path) if "eval/return_mean" in entry]
    evaluate, count = EnvEvaluator.__call__, itertools.count()

    def breaks(self):
        if next(count) == which % len(evaluations):
            raise error
        return evaluate(self)

    path = tmp_path / "run"
    cfg = uninterrupted.cfg.model_copy(update={"run_dir": path})
    with monkeypatch.context() as patch:
        patch.setattr(EnvEvaluator, "__call__", breaks)
        with pytest.raises(error):
            gw.train(cfg)
    assert logged(path)[-1]["iteration"] == evaluations[which]
    assert "eval/return_mean" not in logged(path)[-1]
    run = gw.resume(path)
    assert_same_run(uninterrupted.path, path)
    assert run.summary["return_mean"] == uninterrupted.summary["return_mean"]
    monkeypatch.setattr(EnvEvaluator, "__call__", None)  # once is enough
    gw.resume(path)


def test_an_evaluation_that_fails_again_is_left_out(tmp_path, monkeypatch, caplog):
    cfg, evaluate, count = settings("ppo", tmp_path / "run"), EnvEvaluator.__call__, itertools.count()

    def breaks(self):
        if next(count) < 2:
            raise RuntimeError("no display")
        return evaluate(self)

    monkeypatch.setattr(EnvEvaluator, "__call__", breaks)
    with pytest.raises(RuntimeError):
        gw.train(cfg)
    failed = logged(cfg.run_dir)[-1]["iteration"]
    run = gw.resume(cfg.run_dir)
    assert (
        f"the evaluation of iteration {failed} failed again, and is left out: RuntimeError('no display')" in caplog.text
    )
    assert run.summary["env_steps"] == 1664
    assert next(entry["iteration"] for entry in logged(run.path) if "eval/return_mean" in entry) > failed


class StopEarly(gw.Callback):
    """The user's, of the name of one of groupwise's."""

    count = 0

    def on_iteration_end(self, trainer, rollout, metrics):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_names_of_the_user_s_callbacks_are_free(tmp_path):
    own, again = StopEarly(), StopEarly()
    cfg = settings("ppo", tmp_path / "run").model_copy(update={"stop": gw.config.StopCfg(threshold=5.0)})
    run = gw.train(cfg, callbacks=[own])
    assert run.summary["stopped"].startswith("score: ")
    run = gw.resume(run.path, total_steps=3200, callbacks=[again])
    assert again.count == run.summary["iterations"] > own.count


def test_interrupted_and_resumed_equals_uninterrupted(uninterrupted, tmp_path):
    cfg = uninterrupted.cfg.model_copy(update={"run_dir": tmp_path / "interrupted"})
    with pytest.raises(KeyboardInterrupt):
        gw.train(cfg, callbacks=[interrupt_after(2)])
    gw.resume(tmp_path / "interrupted")
    assert_same_run(uninterrupted.path, tmp_path / "interrupted")


def test_a_run_killed_before_its_first_checkpoint_begins_again(uninterrupted, tmp_path):
    folder = RunFolder.create(json.loads(uninterrupted.cfg.model_dump_json()), tmp_path / "early")
    folder.metrics.write_text('{"iteration": 1, "env_steps": 128, "time/total_seconds": 1.0}\n{"iterat')
    gw.resume(folder.path)
    assert_same_run(uninterrupted.path, folder.path)


def test_a_finished_run_can_go_on(uninterrupted, tmp_path):
    path = Path(shutil.copytree(uninterrupted.path, tmp_path / "copy"))
    idle = gw.resume(path)
    # memory is of this process, which ran other tests since; the folder has its curve and video by now
    assert idle.summary == uninterrupted.summary | {"peak_memory_mib": idle.summary["peak_memory_mib"]}
    assert same_weights(idle, uninterrupted)

    seen = []  # a resumed run that is killed does not show its former end
    look = on("iteration_end", lambda *_: seen.append(RunFolder(path).summary.exists()))
    longer = gw.resume(path, total_steps=2200, callbacks=[look])
    assert set(seen) == {False}
    assert longer.summary["env_steps"] >= 2200
    assert longer.cfg.total_steps == RunFolder(path).read_config()["total_steps"] == 2200
    iterations = [entry["iteration"] for entry in longer.metrics()]
    assert iterations == list(range(1, len(iterations) + 1))


def test_checkpoints_do_not_change_what_is_learned(uninterrupted, tmp_path):
    changed = {"checkpoint_interval": 100, "run_dir": tmp_path / "often"}
    often = gw.train(uninterrupted.cfg.model_copy(update=changed))
    assert logged(often.path) == logged(uninterrupted.path)
    assert same_weights(often, uninterrupted)


def test_nothing_restarts_where_no_checkpoint_is_resumed(tmp_path):
    """A tenth of this run is 16 steps in every environment; cut there, no episode would ever end."""
    common = {key: value for key, value in COMMON.items() if key != "checkpoint_interval"}
    cfg = gw.PPOCfg(num_steps=8, num_epochs=1)
    run = gw.train(
        TorchPendulum, cfg, num_envs=8, max_episode_steps=40, total_steps=8 * 160, run_dir=tmp_path / "run", **common
    )
    assert sum(row["rollout/episodes"] for row in run.metrics()) == 8 * 4
    assert {row["rollout/length_mean"] for row in run.metrics() if "rollout/length_mean" in row} == {40.0}


def test_a_run_of_an_earlier_version_is_refused_in_a_line(uninterrupted, tmp_path):
    path = Path(shutil.copytree(uninterrupted.path, tmp_path / "old"))
    settings = json.loads((path / "config.json").read_text())
    del settings["provenance"]["format"]
    settings["stay_on_device"] = "auto"
    (path / "config.json").write_text(json.dumps(settings))
    for again in (gw.resume, gw.evaluate, gw.Run.load):
        with pytest.raises(gw.errors.RunFolderError, match=r"old was made by an earlier version .*format 1.*; fix: "):
            again(path)


class NeverSucceeds(CartPoleEnv):
    """Says so, which makes its success rate less than any of its returns."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated, truncated, info | {"is_success": False}


@pytest.mark.parametrize(
    "change", [{"env": {"max_episode_steps": 5}}, {"evaluation": {"metric": "success_rate"}}], ids=["env", "metric"]
)
def test_other_scores_choose_another_best(change, tmp_path, caplog):
    """All scores after the change are less than those before."""
    ppo = {"name": "ppo", "num_steps": 16, "minibatch_size": 64}
    common = {"num_envs": 4, "max_episode_steps": 50, "logging": {"progress": "none"}}
    evaluation = {"interval": 64, "episodes": 2}
    run = gw.train(NeverSucceeds, ppo, total_steps=192, run_dir=tmp_path / "run", evaluation=evaluation, **common)
    settings = json.loads((run.path / "config.json").read_text())
    for part, fields in change.items():
        settings[part] |= fields
    (run.path / "config.json").write_text(json.dumps(settings))
    again = gw.resume(run.path, env=NeverSucceeds, total_steps=384)
    name = next(f"{part}.{name}" for part, fields in change.items() for name in fields)
    assert f"{name} changed since the checkpoint: scores of earlier evaluations do not count any more" in caplog.text

    def best_steps():
        return load_checkpoint(RunFolder(run.path).best).state["env_steps"]

    assert best_steps() == again.summary["best_env_steps"] > 192
    evaluated = [entry["env_steps"] for entry in again.metrics() if "eval/return_mean" in entry]
    assert evaluated == [64, 128, 192, 256, 320, 384], "all of them stay in the metrics"
    caplog.clear()
    last = gw.resume(run.path, env=NeverSucceeds, total_steps=448)
    assert best_steps() == last.summary["best_env_steps"] > 192
    assert "changed since" not in caplog.text


SCRIPT = Path(__file__).parents[1] / "support" / "killed_runs.py"


@pytest.mark.torture
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(("kind", "at_changes", "at_moments"), [("control", 4, 1), ("text", 2, 1)])
def test_a_killed_run_ends_as_the_whole_one(kind, at_changes, at_moments, tmp_path):
    command = [sys.executable, str(SCRIPT), kind, str(tmp_path / "runs"), str(at_changes), str(at_moments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_kill_while_a_run_folder_is_made_leaves_one_that_training_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "provenance", lambda: {"format": module.FORMAT})
    settings = {"algorithm": {"name": "ppo"}, "seed": 0, "policy": {"a": "b" * 1000}}
    for number in range(1, 100):
        path = tmp_path / str(number)
        process = os.fork()
        if process == 0:
            dies_at(number, path)
            RunFolder.create(settings, path)
            os._exit(0)
        status = os.waitpid(process, 0)[1]
        if not RunFolder(path).config.exists():
            RunFolder.create(settings, path)
        assert RunFolder.open(path).read_config() == settings
        if status == 0:
            break
    assert number > 4
    assert {file.name for file in path.iterdir()} == {"config.json", module.LOCK}


@pytest.mark.slow
def test_processes_of_environments_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("groupwise.envs.make.num_cpus", lambda: 2)
    runs, quiet = [], {"logging": {"progress": "none"}, "evaluation": {"episodes": 2, "interval": 9999}}
    for way in ("sync", "async"):
        env = gw.EnvCfg(id="Acrobot-v1", num_envs=8, vectorization=way, max_episode_steps=40)
        runs.append(gw.train(env, "grpo", total_steps=400, run_dir=tmp_path / way, **quiet))
    assert logged(runs[0]) == logged(runs[1])
    assert same_weights(*runs)


def test_what_a_resumed_run_shows_is_not_stored(tmp_path):
    ppo = {"name": "ppo", "num_steps": 16, "minibatch_size": 16}
    run = gw.train("CartPole-v1", ppo, total_steps=16, num_envs=1, evaluation={"episodes": 1}, run_dir=tmp_path / "run")
    gw.resume(run.path, total_steps=32, progress="none")
    stored = json.loads((run.path / "config.json").read_text())
    assert (stored["total_steps"], stored["logging"]["progress"]) == (32, "auto")
