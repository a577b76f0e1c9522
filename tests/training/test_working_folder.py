"""Environments that change the working folder: everything a run writes stays in its folder."""

import os
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import groupwise as gw
from groupwise import cli
from groupwise.config.run import EnvCfg
from groupwise.embodied.demos import record_demos
from groupwise.evolution.population import Population


class Moves(gymnasium.Env):
    """Goes to another folder when it is made, reset or stepped, as simulators do to find their files."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, where="init", to="elsewhere", render_mode=None):
        self.where, self.to, self.render_mode, self.count = where, to, render_mode, 0
        self.move("init")

    def move(self, where):
        if self.where == where and Path.cwd().name != "elsewhere":
            os.chdir(self.to)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.move("reset")
        self.count = 0
        return self.look(), {}

    def step(self, action):
        self.move("step")
        self.count += 1
        return self.look(), float(action), self.count == 10, False, {}

    def look(self):
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    gymnasium.register("Moves-v0", Moves)
    yield tmp_path
    del gymnasium.registry["Moves-v0"]


SETTINGS = {
    "evaluation": {"interval": 64, "episodes": 2, "video_interval": 1},
    "checkpoint_interval": 64,
    "num_envs": 2,
}


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize(
    ("where", "algorithm", "run_dir"), [("init", "ppo", None), ("reset", "grpo", "run"), ("step", "ppo", "run")]
)
def test_all_files_of_a_run_are_in_its_folder(where, algorithm, run_dir, here):
    settings = SETTINGS | ({"algorithm": gw.PPOCfg(num_steps=32)} if algorithm == "ppo" else {"algorithm": "grpo"})
    env = EnvCfg(id="Moves-v0", kwargs={"where": where})
    run = gw.train(env, run_dir=run_dir, total_steps=256, **settings)
    assert Path.cwd() == here / "elsewhere"
    folder = here / run_dir if run_dir else next((here / "runs").iterdir())
    assert run.path == folder
    written = {path.name for path in folder.iterdir()}
    assert written >= {
        "config.json",
        "metrics.jsonl",
        "summary.json",
        "checkpoints",
        "curve.svg",
        "policy.gif",
        "videos",
    }
    assert len(run.metrics()) == run.summary["iterations"]
    assert not list((here / "elsewhere").iterdir())
    assert gw.Run.load(folder).summary["env_steps"] >= 256


@pytest.mark.usefixtures("pictures")
def test_evaluation_export_and_resume_find_the_folder_that_was_named(here, capsys, monkeypatch):
    words = ["--algorithm", "ppo", "--algorithm.num-steps", "32", "--env.num-envs", "2", "--evaluation.episodes", "2"]
    assert cli.main(["train", "Moves-v0", *words, "--total-steps", "64", "--run-dir", "run"]) == 0
    assert f"groupwise eval {here / 'run'}" in capsys.readouterr().out
    monkeypatch.chdir(here)
    (here / "run" / "policy.gif").unlink(missing_ok=True)
    assert cli.main(["eval", "run", "--episodes", "2", "--video"]) == 0
    assert (here / "run" / "policy.gif").exists()
    assert f"video: {here / 'run' / 'policy.gif'}" in capsys.readouterr().out
    monkeypatch.chdir(here)
    assert cli.main(["export", "run", "--to", "safetensors", "--out", "policy.safetensors"]) == 0
    assert (here / "policy.safetensors").exists()
    monkeypatch.chdir(here)
    assert cli.main(["resume", "run", "--total-steps", "128"]) == 0
    assert gw.Run.load(here / "run").summary["env_steps"] == 128


def test_a_path_is_as_it_was_given_until_the_program_moves(here):
    env = EnvCfg(id="Moves-v0", kwargs={"where": ""})
    run = gw.train(env, run_dir="run", total_steps=64, num_envs=2)
    loaded = gw.Run.load("run")
    assert (run.path, loaded.path) == (Path("run"), Path("run"))
    os.chdir(here / "elsewhere")
    for one in (run, loaded):
        assert one.path == here / "run"
        assert one.metrics()[-1]["env_steps"] == run.summary["env_steps"]
        assert one.report() == here / "run" / "report.html"


def test_demonstrations_and_populations(here):
    found = record_demos("Moves-v0", lambda obs: 1, episodes=2, out="demos")
    assert (here / "demos" / "meta" / "info.json").exists()
    assert found.episodes == 2
    os.chdir(here)
    search = {"algorithm.learning_rate": [1e-3, 1e-2]}
    settings = {"population": 2, "rounds": 2, "round_steps": 64, "episodes": 2, "workers": 1, "run_dir": "all"}
    gw.evolve(Moves, gw.PPOCfg(num_steps=32), search=search, num_envs=2, **settings)
    assert len(list(Population.load(here / "all").rows())) >= 2
