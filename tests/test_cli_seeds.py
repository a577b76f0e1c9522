import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import groupwise
from groupwise import cli, config


@pytest.fixture
def api(monkeypatch):
    """Stands in for ``groupwise.api`` and keeps the configs that were to be trained."""
    configs = []

    def train(cfg):
        configs.append(cfg)
        return SimpleNamespace(path=Path("runs/x"), summary={})

    fake = ModuleType("groupwise.api")
    fake.train_from_config = train
    monkeypatch.setitem(sys.modules, "groupwise.api", fake)
    monkeypatch.setattr(groupwise, "api", fake, raising=False)
    return configs


@pytest.fixture
def processes(monkeypatch):
    """Stands in for the processes of the seeds: each writes its summary, and an unlucky one fails."""
    started: list[list[str]] = []

    def run(command, *, stdout, env, **options):
        assert env["OMP_NUM_THREADS"] == "1"
        started.append(command)
        seed = int(command[command.index("--seed") + 1])
        folder = Path(command[command.index("--run-dir") + 1])
        if seed == 13:
            stdout.write("out of luck")
            return SimpleNamespace(returncode=2)
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"return_mean": 100.0 + seed, "env_steps": 77}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    return started


def test_seeds_train_in_a_process_and_a_folder_each(api, capsys, processes, tmp_path):
    folder = tmp_path / "many"
    argv = ["train", "CartPole-v1", "--seeds", "0-1,5", "--algorithm.gamma", "0.5", "--run-dir", str(folder)]
    assert cli.main(argv) == 0
    assert sorted(command[command.index("--seed") + 1] for command in processes) == ["0", "1", "5"]
    assert sorted(path.name for path in folder.glob("seed_?")) == ["seed_0", "seed_1", "seed_5"]
    [settings] = {command[command.index("train") + 1] for command in processes}
    assert config.load_config(settings) == config.resolve("CartPole-v1", {"gamma": 0.5})
    out = capsys.readouterr().out
    assert "105" in out
    assert api == []


def test_seed_command_lines_are_valid(api, processes, tmp_path):
    folder = tmp_path / "many"
    assert cli.main(["train", "CartPole-v1", "--seeds", "2", "--run-dir", str(folder)]) == 0
    [command] = processes
    assert command[:3] == [sys.executable, "-m", "groupwise"]
    assert cli.main(command[3:]) == 0
    [cfg] = api
    assert (cfg.seed, cfg.run_dir) == (2, folder / "seed_2")


def test_a_failed_seed_shows_in_the_exit_code_and_points_to_its_log(capsys, processes, tmp_path):
    assert cli.main(["train", "CartPole-v1", "--seeds", "12-13", "--run-dir", str(tmp_path / "many")]) == 1
    out = capsys.readouterr().out
    assert "seed 13: failed" in out
    assert "seed 12: done" in out
    assert (tmp_path / "many" / "seed_13.log").read_text() == "out of luck"


def test_seeds_never_share_a_folder_with_others(capsys, processes, tmp_path):
    assert cli.main(["train", "CartPole-v1", "--seeds", "0-1", "--run-dir", str(tmp_path)]) == 2
    assert "is taken" in capsys.readouterr().err
    assert processes == []
