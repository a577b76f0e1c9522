"""Processes for the user's code end with their parent, and with their children."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from groupwise.system import context, limiting, start

PARENT = """
import os, re, subprocess, sys, time
from groupwise import system as processes

def work(how):
    child = subprocess.Popen(["sleep", "1000"])
    print(os.getpid(), child.pid, flush=True)
    if how == "holds":
        re.match("(a+)+b", "a" * 99)
    if how == "hangs":
        time.sleep(1000)

if __name__ == "__main__":
    process = processes.start(work, sys.argv[1], name="work")
    if sys.argv[2] == "kill":
        process.join(3)
        processes.kill(process)
    elif sys.argv[2] == "wait":
        time.sleep(1000)
"""


def is_running(pid):
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return bool(state) and not state.startswith("Z")  # what has ended waits for init to collect it


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal at the end of a pipe")
@pytest.mark.parametrize(
    ("work", "parent"), [("holds", "wait"), ("hangs", "kill"), ("ends", "kill")], ids=["killed", "hangs", "ends"]
)
def test_neither_a_process_nor_its_child_outlives_the_parent(tmp_path, work, parent):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, script, work, parent], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        if parent == "wait":
            os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
    deadline = time.monotonic() + 15
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = [pid for pid in pids if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


class Endless:
    def __del__(self):
        while True:
            pass


def for_ever():
    Endless()  # the first error ends up in it
    while True:
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(30)
def test_a_limit_of_time_holds_where_the_end_of_an_object_swallows_the_error():
    with pytest.raises(TimeoutError, match="CPU time"), limiting(0.1):
        for_ever()


def test_where_no_process_may_be_started_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    with pytest.raises(RuntimeError, match=r"fix: concurrent\.futures\.ProcessPoolExecutor, or for environments"):
        start(print, name="work")


def test_threads_that_start_processes_leave_the_variables_as_they_were(monkeypatch):
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    seen = []

    def begin(process):
        seen.append(os.environ["PYTHONSAFEPATH"])
        time.sleep(0.01)

    monkeypatch.setattr(type(context().Process()), "start", begin)
    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(start, print, name="work") for _ in range(8)]:
            job.result()
    assert seen == ["1"] * 8
    assert "PYTHONSAFEPATH" not in os.environ
