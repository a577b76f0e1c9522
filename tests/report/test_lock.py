"""One process trains in a run folder."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

import pytest

import groupwise as gw
from groupwise.report import lock as module
from groupwise.report.folder import LOCK, RunFolder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="flock")

HOLDER = """
import os, sys, time
from pathlib import Path
from groupwise.report.folder import RunFolder

with RunFolder(Path(sys.argv[1])).locked():
    holder = os.getpid()
    if sys.argv[2] != "with a child" or os.fork() == 0:  # the child says so itself: before that it may not have begun
        print(holder, flush=True)
    time.sleep(60)
"""


def hold(path: Path, how: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), how], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"{process.pid}\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def elsewhere(path: Path) -> None:
    """A lock of a process on another machine."""
    path.mkdir()
    (path / LOCK).write_text(json.dumps({"pid": 7, "host": "elsewhere"}))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT", 0.05)
    monkeypatch.setattr(module, "PATIENCE", 1.0)


def test_a_second_process_is_refused_by_name_until_the_first_ends(tmp_path: Path):
    run = gw.train(
        "CartPole-v1", gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64), num_envs=4, total_steps=64, speed="off",
        logging={"progress": "none"}, run_dir=tmp_path / "run", evaluation={"episodes": 1},
    )  # fmt: skip
    before = {path.name for path in run.path.iterdir()}
    process = hold(run.path)
    try:
        with pytest.raises(
            gw.RunFolderError, match=rf"process {process.pid} on '{socket.gethostname()}' trains in it; fix"
        ):
            gw.resume(run.path, total_steps=128)
        assert len(run.metrics()) == 1
    finally:
        end(process)
    assert gw.resume(run.path, total_steps=128).summary["env_steps"] == 128
    assert {path.name for path in run.path.iterdir()} == before


def test_one_process_does_not_train_in_a_folder_twice_either(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        with pytest.raises(gw.RunFolderError, match=f"process {os.getpid()} on "), folder.locked():
            pass
        assert (folder.path / LOCK).exists()
    with folder.locked():
        pass
    assert (folder.path / LOCK).read_bytes() == b"", "nobody trains now"


def test_a_child_that_outlives_a_killed_process_does_not_keep_the_lock(tmp_path: Path):
    process = hold(tmp_path / "run", "with a child")
    try:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with RunFolder(tmp_path / "run").locked():
            pass
    finally:
        end(process)


def test_a_lock_is_held_as_long_as_its_process_lives(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    assert not folder.is_training
    process = hold(folder.path)
    try:
        assert folder.is_training
    finally:
        end(process)
    assert (folder.path / LOCK).read_bytes() != b"", "it was killed"
    assert not folder.is_training


@pytest.mark.slow
def test_a_look_at_the_lock_keeps_nobody_out(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    done = Event()

    def look() -> None:
        while not done.is_set():
            _ = folder.is_training

    looking = [Thread(target=look) for _ in range(4)]
    for thread in looking:
        thread.start()
    for _ in range(100):
        with folder.locked():
            pass
    done.set()
    for thread in looking:
        thread.join()


def test_a_process_elsewhere_trains_while_it_gives_signs_of_life(tmp_path: Path):
    elsewhere(tmp_path / "run")
    assert RunFolder(tmp_path / "run").is_training
    os.utime(tmp_path / "run" / LOCK, (0, 0))
    assert not RunFolder(tmp_path / "run").is_training


@pytest.mark.usefixtures("impatient")
def test_a_process_elsewhere_that_gives_signs_of_life_keeps_the_lock(tmp_path: Path):
    elsewhere(tmp_path / "run")
    renewing = subprocess.Popen(
        [sys.executable, "-c", "import os, sys, time\nwhile True: os.utime(sys.argv[1]); time.sleep(0.05)",
         str(tmp_path / "run" / LOCK)],
    )  # fmt: skip
    try:
        time.sleep(0.5)
        with (
            pytest.raises(gw.RunFolderError, match="process 7 on 'elsewhere' trains in it"),
            RunFolder(tmp_path / "run").locked(),
        ):
            pass
    finally:
        renewing.kill()
        renewing.wait()


@pytest.mark.usefixtures("impatient")
def test_one_that_gives_none_loses_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    elsewhere(tmp_path / "run")
    with RunFolder(tmp_path / "run").locked():
        assert "process 7 on 'elsewhere'; waiting up to 1 s" in caplog.text
        lock = tmp_path / "run" / LOCK
        assert json.loads(lock.read_text()) == {"pid": os.getpid(), "host": socket.gethostname()}
        before = lock.stat().st_mtime_ns
        time.sleep(0.5)
        assert lock.stat().st_mtime_ns > before  # this process gives signs of life, too


def test_a_file_that_is_no_lock_stops_nobody(tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).write_text("[")
    with RunFolder(tmp_path / "run").locked():
        pass
