import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from groupwise import cli, config
from groupwise.cli.train import train_seeds


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """What --quiet changes in this process."""
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    log = logging.getLogger("groupwise")
    before = log.level
    with warnings.catch_warnings():
        yield
    log.setLevel(before)


@dataclass(eq=False)
class Ended:
    exit_code: int

    def poll(self) -> int:
        return self.exit_code


@pytest.fixture
def processes(monkeypatch):
    """Stands in for the processes of the seeds: each writes its summary, and an unlucky one fails."""
    started: list[list[str]] = []

    def start(command, *, stdout, env, start_new_session, **options):
        assert env["OMP_NUM_THREADS"] == "1"
        assert start_new_session  # else who signals the whole group would end them at once, by a second signal
        started.append(command)
        seed = int(command[command.index("--seed") + 1])
        folder = Path(command[command.index("--run-dir") + 1])
        if seed == 13:
            stdout.write("out of luck")
            return Ended(2)
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"return_mean": 100.0 + seed, "env_steps": 77}))
        return Ended(0)

    monkeypatch.setattr(subprocess, "Popen", start)
    return started


LEARNER = """
import pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
folder.mkdir()
def finish(number, frame):
    (folder / "signals").open("a").write("x")
signal.signal(signal.SIGTERM, finish)
(folder / "config.json").write_text("{}")
while not (folder / "signals").exists():
    time.sleep(0.01)
time.sleep(0.2)
(folder / "saved").touch()
sys.exit(130)
"""
"""Stands in for a training: it takes a while to end after a signal."""


def test_seeds_train_in_a_process_and_a_folder_each(capsys, processes, tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()  # empty
    argv = ["train", "CartPole-v1", "--seeds", "0-1,5", "--algorithm.gamma", "0.5", "--run-dir", str(folder)]
    assert cli.main(argv) == 0
    assert sorted(command[command.index("--seed") + 1] for command in processes) == ["0", "1", "5"]
    assert sorted(path.name for path in folder.glob("seed_?")) == ["seed_0", "seed_1", "seed_5"]
    [settings] = {command[command.index("train") + 1] for command in processes}
    expected = config.resolve("CartPole-v1", {"gamma": 0.5}, logging={"progress": "lines"})  # into a file
    assert config.load_config(settings) == expected
    out = capsys.readouterr().out
    assert "105" in out


def test_quiet_seeds_print_the_table_only_and_their_commands_are_valid(capsys, processes, tmp_path):
    folder = tmp_path / "many"
    assert cli.main(["train", "CartPole-v1", "--seeds", "2", "--quiet", "--run-dir", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("seed  return_mean")
    assert config.load_config(folder / "settings.json").logging.progress == "none"
    [command] = processes
    assert command[:4] == [sys.executable, "-P", "-m", "groupwise"]
    assert cli.main(["config", *command[5:]]) == 0  # it takes what train takes
    settings = json.loads(capsys.readouterr().out)
    assert (settings["seed"], settings["run_dir"]) == (2, f"{folder}/seed_2")


def test_a_failed_seed_shows_in_the_exit_code_and_points_to_its_log(capsys, processes, tmp_path):
    words = ["train", "CartPole-v1", "--seeds", "12-13", "--run-dir", str(tmp_path / "many")]
    assert cli.main(words) == 1
    out = capsys.readouterr().out
    assert "seed 13: failed" in out
    assert "seed 12: done" in out
    assert (tmp_path / "many" / "seed_13.log").read_text() == "out of luck"
    assert cli.main(words) == 2
    assert "is taken" in capsys.readouterr().err
    assert len(processes) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_the_running_seeds_once_and_says_how_to_go_on_with_each(number, monkeypatch, capsys, tmp_path):
    folder, start = tmp_path / "many", subprocess.Popen

    def learn(command, **options):
        return start([sys.executable, "-S", "-c", LEARNER, command[command.index("--run-dir") + 1]], **options)

    def interrupt():
        while not (folder / "seed_3" / "config.json").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(subprocess, "Popen", learn)
    monkeypatch.setattr("groupwise.cli.train.num_cpus", lambda: 1)
    plugin = tmp_path / "my plugin.py"
    plugin.touch()
    before = signal.getsignal(number)
    waiting = threading.Thread(target=interrupt)
    waiting.start()
    argv = ["train", "CartPole-v1", "--seeds", "3-4", "--run-dir", str(folder), "--plugin", str(plugin)]
    assert cli.main(argv) == 130
    waiting.join()
    assert (folder / "seed_3" / "saved").exists()
    assert (folder / "seed_3" / "signals").read_text() == "x"
    assert not (folder / "seed_4").exists()
    printed = capsys.readouterr()
    assert "seed 3: interrupted\n" in printed.out
    assert printed.err.splitlines() == [
        "groupwise: interrupted; continue with:",
        f"  groupwise resume {folder}/seed_3 --plugin '{plugin}'",
        f"  groupwise train {folder}/settings.json --seed 4 --run-dir {folder}/seed_4 --plugin '{plugin}'",
    ]
    assert signal.getsignal(number) == before


def test_a_seed_that_a_signal_ends_before_it_trains_is_interrupted(monkeypatch, capsys, tmp_path):
    class Early(Ended):
        def terminate(self):
            self.exit_code = -signal.SIGTERM

    def start(command, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return Early(None)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("groupwise.cli.train.num_cpus", lambda: 1)
    with pytest.raises(KeyboardInterrupt, match=r"continue with:\n  .*groupwise train"):
        train_seeds(config.resolve("CartPole-v1", run_dir=tmp_path / "many"), [1])
    assert "seed 1: interrupted\n" in capsys.readouterr().out


def test_after_an_error_no_seed_goes_on_by_itself(monkeypatch, tmp_path):
    class Endless(Ended):
        def terminate(self):
            ended.append(self)

    ended, started = [], []

    def start(command, **options):
        if started:
            raise OSError("too many open files")
        started.append(Endless(None))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("groupwise.cli.train.num_cpus", lambda: 2)
    with pytest.raises(OSError, match="too many"):
        train_seeds(config.resolve("CartPole-v1", run_dir=tmp_path / "many"), [1, 2])
    assert ended == started


@pytest.mark.parametrize("seeds", ["3-1", "1,1", "a", "", "0-", "-3"])
def test_wrong_seeds_say_what_to_write(seeds, capsys):
    assert cli.main(["train", "CartPole-v1", f"--seeds={seeds}"]) == 2
    assert "; fix: " in capsys.readouterr().err


SMALL = "-q --run-dir runs --algorithm ppo --algorithm.num-steps 8 --total-steps 16 --env.num-envs 2 --evaluation.episodes 1"
SEARCH = '{"algorithm.learning_rate":[1e-3,2e-3]}'
EVOLVE = f"evolve CartPole-v1 --run-dir runs --algorithm ppo --algorithm.num-steps 8 --env.num-envs 2 --search {SEARCH}"
PYTHONS = {
    "async": (0, f"train CartPole-v1 {SMALL} --env.vectorization async"),
    "seeds": (0, f"train CartPole-v1 {SMALL} --seeds 0"),
    "evolve": (0, f"{EVOLVE} --population 2 --rounds 1 --round-steps 16 --episodes 1 --workers 1"),
    "serve": (2, f"serve model --python {sys.executable}"),  # which has no vLLM
}


@pytest.mark.slow
@pytest.mark.parametrize(("code", "words"), PYTHONS.values(), ids=PYTHONS)
def test_no_module_of_the_current_folder_is_imported_by_the_command_or_its_processes(code, words, tmp_path):
    command, folder = tmp_path / "bin" / "groupwise", tmp_path / "hostile"
    command.parent.mkdir()
    command.write_text("import sys\nfrom groupwise.cli import main\nif __name__ == '__main__':\n    sys.exit(main())")
    folder.mkdir()
    (folder / "vllm/entrypoints/openai").mkdir(parents=True)
    modules = "groupwise", "torch", "numpy", "json", "random", "signal", "subprocess", "multiprocessing", "gymnasium"
    for name in (*modules, "math_verify", "vllm/__init__", "vllm/entrypoints/openai/api_server"):
        (folder / f"{name}.py").write_text("open('ran', 'a').write(__name__)\nraise SystemExit(7)")
    program = [sys.executable, command, *words.split()]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, check=False)
    assert not (folder / "ran").exists(), (folder / "ran").read_text()
    assert done.returncode == code, done.stderr
    assert code == 0 or "No module named 'vllm'" in done.stderr
