"""Whole runs whose rewards and tools have processes of their own."""

import multiprocessing
import time

import pytest
from text_runs import copying, save_model, train

from groupwise.errors import RewardError

pytestmark = pytest.mark.slow

TIMEOUT = 2.0


def test_a_whole_run_survives_a_reward_that_hangs_once_and_leaves_no_process(tmp_path, caplog):
    flag = tmp_path / "hung"

    def reward(completions, **_):
        if not flag.exists():
            flag.touch()
            time.sleep(1000)
        return [float(len(completion)) for completion in completions]

    task = copying(reward, reward_timeout=TIMEOUT)
    run = train(task, save_model(tmp_path / "model"), tmp_path / "run", evaluation={"interval": 10**9, "prompts": 2})
    rows = run.metrics()
    assert [row["rollout/unscorable"] for row in rows] == [16.0] + [0.0] * (len(rows) - 1)
    assert "took longer than 2 s" in caplog.text
    assert not [process for process in multiprocessing.active_children() if "reward" in process.name]


def test_a_run_whose_reward_always_hangs_stops_and_can_be_resumed(tmp_path):
    def reward(completions, **_):
        time.sleep(1000)

    task = copying(reward, reward_timeout=0.5)
    evaluation = {"interval": 10**9, "prompts": 2}
    with pytest.raises(RewardError, match=r"more than 20% of the scores of 10 calls failed") as caught:
        train(task, save_model(tmp_path / "model"), tmp_path / "run", evaluation=evaluation, total_steps=1000)
    assert "saved after step" in caught.value.__notes__[-1]
    assert not [process for process in multiprocessing.active_children() if "reward" in process.name]


def test_a_run_with_a_tool_that_hangs_goes_on_and_leaves_no_process(tmp_path, caplog):
    flag = tmp_path / "hung"

    def tool(text):
        if not flag.exists():
            flag.touch()
            time.sleep(1000)
        return "1"

    def reward(completions, **_):
        return [float(len(completion)) for completion in completions]

    task = copying(reward, tool=tool, tool_timeout=TIMEOUT)
    model = save_model(tmp_path / "model", positions=256)
    train(task, model, tmp_path / "run", evaluation={"interval": 10**9, "prompts": 2})
    assert "the tool took longer than 2 s" in caplog.text
    assert not [process for process in multiprocessing.active_children() if "tool" in process.name]
