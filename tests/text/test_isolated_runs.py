"""Whole runs whose rewards and tools have processes of their own."""

import multiprocessing
import time

import pytest
from text_runs import copying, save_model, train

from groupwise.errors import RewardError

pytestmark = pytest.mark.slow
EVALUATION = {"interval": 10**9, "prompts": 2}


def lengths(completions, **_):
    return [float(len(completion)) for completion in completions]


def once_hanging(flag, function):
    """``function``, whose first call never ends."""

    def called(*args, **columns):
        if not flag.exists():
            flag.touch()
            time.sleep(1000)
        return function(*args, **columns)

    return called


def assert_nothing_runs():
    assert not [p for p in multiprocessing.active_children() if "reward" in p.name or "tool" in p.name]


def test_a_whole_run_survives_a_reward_that_hangs_once_and_leaves_no_process(model, tmp_path, caplog):
    task = copying(once_hanging(tmp_path / "hung", lengths), reward_timeout=2.0)
    rows = train(task, model, tmp_path / "run", evaluation=EVALUATION).metrics()
    assert [row["rollout/unscorable"] for row in rows] == [16.0] + [0.0] * (len(rows) - 1)
    assert "took longer than 2 s" in caplog.text
    assert_nothing_runs()


def test_a_run_whose_reward_always_hangs_stops_and_can_be_resumed(model, tmp_path):
    def reward(completions, **_):
        time.sleep(1000)

    task = copying(reward, reward_timeout=0.5)
    with pytest.raises(RewardError, match=r"more than 20% of the scores of 10 calls failed") as caught:
        train(task, model, tmp_path / "run", evaluation=EVALUATION, total_steps=1000)
    assert "saved after step" in caught.value.__notes__[-1]
    assert_nothing_runs()


def test_a_run_with_a_tool_that_hangs_goes_on_and_leaves_no_process(tmp_path, caplog):
    task = copying(lengths, tool=once_hanging(tmp_path / "hung", lambda text: "1"), tool_timeout=2.0)
    train(task, save_model(tmp_path / "model", positions=256), tmp_path / "run", evaluation=EVALUATION)
    assert "the tool took longer than 2 s" in caplog.text
    assert_nothing_runs()
