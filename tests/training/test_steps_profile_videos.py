"""Callbacks of every step, profiles and videos during training."""

import json

import gymnasium
import pytest
import torch
from at_events import on
from gymnasium.envs.classic_control import CartPoleEnv
from run_folders import same_weights

import groupwise as gw
from groupwise import cli
from groupwise.errors import EnvError
from groupwise.training import build as env_evaluator
from groupwise.training.trackers import Profiler

QUIET = {"evaluation": {"episodes": 2}, "logging": {"progress": "none"}}


class Steps(gw.Callback):
    """Adds up what every step returned."""

    def __init__(self):
        self.reward, self.calls, self.actions = 0.0, 0, set()

    def on_step(self, trainer, action, step):
        self.calls += 1
        self.reward += float(step.reward.sum())
        self.actions |= set(action.tolist())
        assert step.obs.shape == (4, 4)
        assert len(action) == len(step.terminated) == 4


@pytest.mark.parametrize(
    ("algorithm", "vectorization"),
    [({"name": "ppo"}, "sync"), ({"name": "ppo"}, "torch"), ({"name": "grpo", "group_size": 2}, "auto")],
)
def test_every_step_is_heard_and_nothing_else(algorithm, vectorization, tmp_path):
    env = gw.EnvCfg(id="CartPole-v1", num_envs=4, vectorization=vectorization)
    runs = []
    for callbacks in ([Steps()], []):
        out = tmp_path / str(len(callbacks))
        settings = {"total_steps": 200, "run_dir": out, "callbacks": callbacks, **QUIET}
        runs.append(gw.train(env, algorithm | {"num_steps": 32}, **settings))
        if callbacks:
            heard = callbacks[0]
    assert heard.reward == runs[0].summary["env_steps"]  # CartPole gives 1 at each step
    assert heard.actions == {0, 1}
    assert same_weights(*runs)


def test_a_ready_environment_has_as_many_rows_as_the_settings(tmp_path):
    def rows(count):
        return gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * count)

    algorithm, settings = gw.PPOCfg(num_steps=16, num_epochs=1), {"run_dir": tmp_path / "run", "total_steps": 32}
    with pytest.raises(EnvError, match="SyncVectorEnv has 2 rows, but num_envs is 4"):
        gw.train(rows(2), algorithm, num_envs=4, **settings)
    run = gw.train(rows(2), algorithm, **settings)
    assert run.cfg.env.num_envs == 2
    with pytest.raises(EnvError, match="SyncVectorEnv has 4 rows, but num_envs is 2"):
        gw.resume(run.path, 64, env=rows(4))
    assert gw.Run.load(run.path, env=rows(1)).cfg == run.cfg  # a loaded policy may act in any number


def test_a_ready_environment_is_left_as_it_was(tmp_path):
    env = gw.make_env(gw.EnvCfg(id="CartPole-v1", num_envs=4))
    heard, settings = Steps(), {"total_steps": 32, "run_dir": tmp_path / "run", **QUIET}
    gw.train(env, {"name": "ppo", "num_steps": 8}, callbacks=[heard], **settings)
    assert heard.calls == 8
    env.reset(seed=0)
    env.step(torch.zeros(4, dtype=torch.int64))
    assert heard.calls == 8


def test_what_cannot_be_heard_or_profiled_is_refused(parts, capsys):
    with pytest.raises(gw.errors.ConfigError, match="on_step is called for steps of environments"):
        parts.trainer(Steps()).train()
    with pytest.raises(gw.errors.ConfigError, match="Profiler writes into the run folder; fix: "):
        parts.trainer(Profiler()).train()
    assert cli.main(["train", "CartPole-v1", "--seeds", "0-1", "--profile", "2"]) == 2
    assert "--profile is of a single run, got --seeds too; fix:" in capsys.readouterr().err


def test_a_profile_of_some_iterations_lands_in_the_run_folder(tmp_path, capsys):
    run = str(tmp_path / "run")
    small = ["--algorithm", "ppo", "--env.num-envs", "2", "--algorithm.num-steps", "8", "--evaluation.episodes", "2"]
    assert cli.main(["train", "CartPole-v1", *small, "--total-steps", "80", "--profile", "2", "--run-dir", run]) == 0
    trace = json.loads((tmp_path / "run/profile/trace.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert "aten::addmm" in names
    assert "aten::addmm" in (tmp_path / "run/profile/operators.txt").read_text()
    assert f"Profile of 2 iterations: {run}/profile/trace.json" in capsys.readouterr().err


def test_the_first_iteration_is_not_recorded_and_a_short_run_writes_what_there_is(parts, tmp_path):
    recorded = []

    def mark(trainer, rollout):
        with torch.profiler.record_function(f"iteration {trainer.iteration + 1}"):
            recorded.append(trainer.iteration + 1)

    for iterations, total_steps, expected in ((2, 50, [2, 3]), (9, 30, [2, 3])):
        folder = tmp_path / str(iterations)
        recorded.clear()
        trainer = parts.trainer(on("rollout_end", mark), Profiler(iterations), total_steps=total_steps)
        trainer.run_dir = folder
        trainer.train()
        assert recorded == list(range(1, total_steps // 10 + 1))
        events = json.loads((folder / "profile/trace.json").read_text())["traceEvents"]
        found = {event["name"] for event in events if event.get("name", "").startswith("iteration ")}
        assert found == {f"iteration {number}" for number in expected}


@pytest.mark.parametrize(
    ("total_steps", "printed"),
    [(30, "Profile of 2 iterations: "), (10, "no profile: no iteration ended after the first")],
)
def test_a_profile_says_how_many_iterations_it_has(total_steps, printed, parts, tmp_path, capsys):
    profiler = Profiler(9)
    for name in ("first", "second"):  # one object for both, as a resumed run has it
        trainer = parts.trainer(profiler, total_steps=total_steps)
        trainer.run_dir = tmp_path / name
        trainer.train()
        assert printed in capsys.readouterr().err
        assert (tmp_path / name / "profile").exists() == (total_steps > 10)


def test_videos_that_were_asked_for_and_cannot_be_are_told_once(tmp_path, caplog, pictures):
    evaluation = {"interval": 16, "episodes": 2, "video_interval": 1}
    cfg = {"algorithm": {"name": "ppo", "num_steps": 8}, "num_envs": 2, "evaluation": evaluation}
    settings = {"logging": {"progress": "none"}, "run_dir": tmp_path / "run"}
    run = gw.train(CartPoleEnv, **cfg, **settings, total_steps=48)  # made without a render_mode
    told = [record.getMessage() for record in caplog.records if "render" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("evaluation.video_interval = 1: no video: ")
    assert "fix: " in told[0]
    assert not (run.path / "videos").exists()


def test_every_second_evaluation_is_filmed_also_after_a_resume(tmp_path, monkeypatch):
    filmed = []
    monkeypatch.setattr(env_evaluator, "film", lambda policy, cfg, env, path, seed: filmed.append(path.name))
    evaluation = {"interval": 16, "episodes": 2, "video_interval": 2}
    cfg = {"algorithm": {"name": "ppo", "num_steps": 8}, "num_envs": 2, "evaluation": evaluation}
    settings = {"logging": {"progress": "none"}, "run_dir": tmp_path / "run"}
    run = gw.train("CartPole-v1", **cfg, **settings, total_steps=48)
    assert filmed == ["step_32.gif", "policy.gif"]
    filmed.clear()
    gw.resume(run.path, 96)
    assert filmed == ["step_64.gif", "step_96.gif", "policy.gif"]
    assert (run.path / "videos").is_dir()
