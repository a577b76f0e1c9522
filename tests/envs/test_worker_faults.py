"""Environments in worker processes that raise, die, hang or hold the interpreter."""

import os
import re
import signal
import subprocess
import sys
import time

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from groupwise.envs.rows import RowCfg, RowsGroupEnv
from groupwise.errors import EnvError

FINE, RAISES, DIES, HANGS, HOLDS, QUITS = range(6)
TIMEOUT = 2.0


class Faulty(gymnasium.Env):
    """Fails as its action, or the seed of its start, says."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(6)
    count = 0  # it steps without a start, too

    def reset(self, *, seed=None, options=None):
        fail(seed)
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        fail(action)
        self.count += 1
        return np.full(1, self.count, np.float32), 1.0, False, False, {}


def fail(kind):
    if kind == RAISES:
        raise RuntimeError("the wheel came off")
    if kind == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == QUITS:
        sys.exit("no licence")
    if kind == HANGS:
        time.sleep(1000)
    if kind == HOLDS:
        re.match("(a+)+b", "a" * 99)  # for years, and no other thread of the process runs meanwhile


@pytest.fixture
def make():
    made = []

    def make(on_error="report", num_workers=2):
        settings = {"on_error": on_error, "timeout": TIMEOUT}
        cfg = RowCfg(Faulty, "Faulty", Faulty.observation_space, Faulty.action_space, 9, **settings)
        made.append(RowsGroupEnv(cfg, 3, num_workers=num_workers))  # rows 0 | 1 and 2
        return made[-1]

    yield make
    for env in made:
        env.close()


def start(env, *seeds):
    """Start the rows that have a seed."""
    numbers = np.array([seed or 0 for seed in seeds], np.int64)
    return env.start(np.array([seed is not None for seed in seeds]), numbers, numbers)


def step(env, *actions):
    return env.step(torch.tensor(actions))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RAISES, DIES, HOLDS], ids=["raises", "dies", "holds"])
def test_rows_whose_process_fails_in_a_step_are_reported_and_start_again(make, kind):
    env = make()
    start(env, 10, 10, 10)
    began = time.monotonic()
    failed = step(env, FINE, FINE, kind)
    assert time.monotonic() - began < 10 * TIMEOUT
    lost = kind != RAISES  # with the process its other row, too
    assert failed.failed.tolist() == [False, lost, True]
    assert failed.reward.tolist() == [1.0, float(not lost), 0.0]
    again = step(env, FINE, FINE, FINE)
    assert again.failed is None
    assert again.reward.tolist() == [1.0, float(not lost), 0.0]  # rows that failed are paused
    start(env, None, 11, 11)
    assert step(env, FINE, FINE, FINE).obs.flatten().tolist() == [3.0, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [RAISES, DIES, HANGS], ids=["raises", "dies", "hangs"])
def test_rows_whose_process_fails_in_a_start_are_reported_by_the_next_step(make, kind):
    env = make()
    start(env, 10, 10, 10)
    start(env, None, None, kind)
    lost = kind != RAISES
    failed = step(env, FINE, FINE, FINE)
    assert failed.failed.tolist() == [False, lost, True]
    assert failed.reward.tolist() == [1.0, float(not lost), 0.0]
    assert step(env, FINE, FINE, FINE).failed is None


def test_a_row_that_starts_after_all_is_not_reported(make):
    env = make(num_workers=0)
    start(env, 10, 10, RAISES)
    assert step(env, FINE, FINE, FINE).failed.tolist() == [False, False, True]
    start(env, 10, 10, RAISES)
    start(env, None, None, 12)
    assert step(env, FINE, FINE, FINE).failed is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (DIES, "groupwise rows 1-2 of Faulty ended with exit code -9"),
        (HANGS, "groupwise rows 1-2 of Faulty took longer than 2 s; .*fix: a larger env.timeout"),
    ],
    ids=["dies", "hangs"],
)
def test_without_reports_a_lost_process_is_an_error_and_no_process_stays(make, kind, message):
    env = make("raise")
    start(env, 10, 10, 10)
    pids = [worker.child.process.pid for worker in env._rows._workers]
    with pytest.raises(EnvError, match=message):
        step(env, FINE, FINE, kind)
    assert subprocess.run(["ps", "-p", ",".join(map(str, pids))], capture_output=True).returncode == 1


@pytest.mark.parametrize("on_error", ["raise", "report"])
def test_an_environment_that_ends_the_program_is_heard(make, on_error):
    env = make(on_error)
    start(env, 10, 10, 10)
    with pytest.raises(EnvError, match=r"(?s)Faulty failed in groupwise rows 1-2.*SystemExit: no licence"):
        step(env, FINE, FINE, QUITS)
    with pytest.raises(EnvError, match="SystemExit: no licence"):
        start(env, None, None, QUITS)
