"""One process trains in a run folder."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

import groupwise as gw
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


@contextmanager
def holding(path: Path, how: str = "") -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(path), how]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"{process.pid}\n"
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_second_process_is_refused_by_name_until_the_first_ends(tmp_path: Path):
    run = gw.train(
        "CartPole-v1", gw.PPOCfg(num_steps=16, num_epochs=1, minibatch_size=64), num_envs=4, total_steps=64, speed="off",
        logging={"progress": "none"}, run_dir=tmp_path / "run", evaluation={"episodes": 1},
    )  # fmt: skip
    before = {path.name for path in run.path.iterdir()}
    with holding(run.path) as process:
        who = rf"in use by process {process.pid} on '{socket.gethostname()}'; fix"
        with pytest.raises(gw.errors.RunFolderError, match=who):
            gw.resume(run.path, total_steps=128)
        assert len(run.metrics()) == 1
    assert gw.resume(run.path, total_steps=128).summary["env_steps"] == 128
    assert {path.name for path in run.path.iterdir()} == before


def test_one_process_does_not_train_in_a_folder_twice_either(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    for _ in range(2):
        with (
            folder.locked(),
            pytest.raises(gw.errors.RunFolderError, match=f"process {os.getpid()} on "),
            folder.locked(),
        ):
            pass
    assert (folder.path / LOCK).read_bytes() == b"", "nobody trains now"


def test_a_lock_is_held_as_long_as_its_process_lives_even_if_a_child_outlives_it(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    assert not folder.is_training
    with holding(folder.path, "with a child") as process:
        assert folder.is_training
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert (folder.path / LOCK).read_bytes() != b"", "it was killed"
        assert not folder.is_training
        with folder.locked():
            pass


@pytest.mark.slow
def test_a_look_at_the_lock_keeps_nobody_out(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    done = Event()

    def look() -> None:
        while not done.is_set():
            _ = folder.is_training

    with ThreadPoolExecutor(4) as pool:
        looking = [pool.submit(look) for _ in range(4)]
        for _ in range(100):
            with folder.locked():
                pass
        done.set()
    assert [thread.result() for thread in looking] == [None] * 4
