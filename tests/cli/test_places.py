"""Any terminal or none, any path, any clock."""

import json
import logging
import os
import pty
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from forked import Script

from groupwise import cli, plugins
from groupwise.errors import SlowPathWarning
from groupwise.system import prepare
from groupwise.training.checkpoint import saved_counts

NAME = "rün €[/x] [red]'a\""
SHORT = "--algorithm ppo --total-steps 64 --env.num-envs 4 --algorithm.num-steps 16 --evaluation.episodes 2"
ASCII = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
NO_HOME = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"), "/proc/none")
BACKWARDS = """
import datetime, time
now = [time.time()]
def back(*args):
    now[0] -= 3600
    return now[0]
class Back(datetime.datetime):
    @classmethod
    def now(cls, zone=None):
        return cls.fromtimestamp(back(), zone)
time.time = back
datetime.datetime = Back
"""


BUFFERED = {"PYTHONUNBUFFERED": ""}
"""As most have it: what an output cannot take is then tried again at the end of the process."""


def run(folder: Path, *words: str, code: str = "", **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """The end of a command, or of Python code."""
    env = os.environ | BUFFERED | {"OMP_NUM_THREADS": "1"} | options.pop("env", {})
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    program = ["-c", code] if code else ["-m", "groupwise", *words]
    return subprocess.run([sys.executable, *program], cwd=folder, env=env, check=False, **options)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_ascii_no_home_a_full_stderr_a_clock_that_goes_back_and_a_strange_path(tmp_path: Path):
    folder = tmp_path / "földer [/x] b"
    folder.mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(BACKWARDS)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    with Path("/dev/full").open("wb") as full:
        words = ["train", "CartPole-v1", "--run-dir", NAME, *SHORT.split()]
        done = run(folder, *words, env=ASCII | NO_HOME | {"PYTHONPATH": path}, stderr=full)
    assert done.returncode == 0
    lines = done.stdout.decode("ascii").splitlines()
    assert lines[0].startswith("Done in ")
    assert lines[-1] == "Next:  groupwise eval 'r\\xfcn \\u20ac[/x] [red]'\"'\"'a\"'"
    assert saved_counts(folder / NAME / "checkpoints/latest")["steps"] == 64


@pytest.mark.slow
def test_the_other_commands_on_a_strange_path_in_ascii(tmp_path: Path):
    commands = [
        ["train", "CartPole-v1", "--run-dir", NAME, "--logging.progress", "bar", *SHORT.split()],
        ["resume", NAME, "--total-steps", "128"],
        ["eval", NAME, "--episodes", "2", "--video"],
        ["compare", f"ü [x]={NAME}"],
    ]
    code = f"from groupwise.cli import main\nprint([main(words) for words in {commands!r}])"
    done = run(tmp_path, code=code, env=ASCII)
    assert done.stdout.splitlines()[-1] == b"[0, 0, 0, 0]", done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_without_any_open_stream(tmp_path: Path):
    command = f"{sys.executable} -m groupwise train CartPole-v1 --run-dir run {SHORT} <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, check=False).returncode == 0
    assert (tmp_path / "run/summary.json").exists()


@pytest.mark.slow
def test_a_terminal_that_is_closed_saves_the_run(tmp_path: Path):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "groupwise", "train", "CartPole-v1", "--algorithm", "ppo", "--speed", "off"]
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", take, *command, "--run-dir", "run", "--total-steps", "10000000"],
        cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=os.environ | BUFFERED,
    )  # fmt: skip
    os.close(theirs)
    metrics = tmp_path / "run/metrics.jsonl"
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2):
        os.read(ours, 65536)  # else the run would wait for the terminal
    os.close(ours)
    try:
        assert process.wait(60) == 130
    finally:
        process.kill()
    steps = json.loads(metrics.read_text().splitlines()[-1])["env_steps"]
    assert saved_counts(tmp_path / "run/checkpoints/latest")["steps"] == steps
    assert json.loads((tmp_path / "run/summary.json").read_text())["stopped"] == "interrupted"


def test_settings_are_printed_in_ascii_and_commands_can_be_pasted(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["config", "CartPole-v1", "--run-dir", "rün"]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out)["run_dir"] == "rün"
    assert plugins.command("resume", Path("runs/a b")) == "groupwise resume 'runs/a b'"


def test_warnings_and_log_lines_show_control_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    factory = logging.getLogRecordFactory()
    try:
        for _ in range(2):  # twice is as once
            prepare()
        handler = logging.StreamHandler(sys.stderr)
        log = logging.getLogger("a_library")
        log.addHandler(handler)
        log.warning("the model %s", "\x1b[2J of [/x]")
        log.removeHandler(handler)
        assert "\\x1b[2J of [/x]\n" in capsys.readouterr().err
        shown = warnings.formatwarning("title \x1b]0;owned\x07", UserWarning, "a.py", 3)
        assert shown == "a.py:3: UserWarning: title \\x1b]0;owned\\x07\n"
        shown = warnings.formatwarning("slow", SlowPathWarning, cli.__file__, 3, "warnings.warn(")
        assert shown == "groupwise: SlowPathWarning: slow\n"  # without a line of source code
    finally:
        logging.setLogRecordFactory(factory)


def test_resume_with_nothing_left_prints_nothing_if_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    log, path = logging.getLogger("groupwise"), str(tmp_path / "run")
    level = log.level
    assert cli.main(["train", "CartPole-v1", *SHORT.split(), "--run-dir", path]) == 0
    capsys.readouterr()
    try:
        with warnings.catch_warnings():
            assert cli.main(["resume", path, "-q"]) == 0
            assert capsys.readouterr() == ("", "")
            assert cli.main(["resume", path, "-q", "--total-steps", "128"]) == 0
    finally:
        log.setLevel(level)
    out, err = capsys.readouterr()
    assert (out[:8], err) == ("Done in ", "")
    assert cli.main(["resume", path]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Done in ")
    assert "nothing was left to train (total_steps); fix: a larger total_steps" in err


CHATTY = """
import logging
import warnings

import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

log = logging.getLogger("groupwise.mine")


class Chatty(CartPoleEnv):
    def reset(self, **options):
        warnings.warn("a warning")
        log.warning("a message")
        log.debug("a detail")
        return super().reset(**options)


gymnasium.register("Chatty-v0", Chatty, max_episode_steps=50)
"""


def printed(calls: list[list[str]], folder: Path, **options: bool) -> tuple[str, str]:
    """What commands print, one after the other, and their exit codes: at stdout, and at stderr."""
    code = f"""
import warnings
from groupwise.cli import main
warnings.resetwarnings()
for hidden in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
    warnings.simplefilter("ignore", hidden)  # as in a new interpreter
print([main(words) for words in {calls!r}])
"""
    script = Script(code, folder=folder, **options)
    script.processes[0].join(280)
    err = script.errors(0)
    return script.finish(1), err


@pytest.mark.slow
def test_quiet_prints_one_line_and_errors_and_verbose_every_iteration(tmp_path: Path):
    (tmp_path / "chatty.py").write_text(CHATTY)
    chatty = "train Chatty-v0 --plugin chatty.py --total-iterations 3 --evaluation.episodes 2 --algorithm.num-steps 8"
    words = chatty.split()
    calls = [[*words, "-q", "--run-dir", "a"]] * 2
    more = ["--plugin", "chatty.py", "--total-iterations"]
    calls += [["resume", "a", "-q", *more, "4"], ["resume", "a", "--fork", "b", "-q", *more, "5"]]
    out, err = printed(calls, tmp_path, pictures=True)
    *lines, codes = out.splitlines()
    assert [line.partition(" in ")[0] for line in lines] == ["Done"] * 3
    assert [line.partition(" Run folder: ")[2][-1:] for line in lines] == ["a", "a", "b"]
    assert codes == "[0, 2, 0, 0]"
    [error] = err.splitlines()
    assert "run folder 'a' is taken" in error
    out, err = printed([[*words, "-v"]], tmp_path)
    assert out.splitlines()[-1] == "[0]"
    assert err.count(" iterations   return") == 3
    assert "DEBUG groupwise.mine: a detail" in err
    assert "a warning" in err
