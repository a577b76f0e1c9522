"""Rewards that raise, hang, fork, die or hold the interpreter."""

import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from text_runs import copying, train

from groupwise.config.run import RewardCfg, TextTaskCfg
from groupwise.errors import ConfigError, RewardError, ToolError
from groupwise.text import builtin_rewards
from groupwise.text.builtin_rewards import MathReward, RegexReward
from groupwise.text.rewards import RewardSet, make_reward
from groupwise.text.sandbox import MathVerifier
from groupwise.text.tools import ask, make_tool

TIMEOUT = 2.0


def lengths(completions, log_metric, **_):
    """The length of each; or what the first completion says."""
    match completions[0]:
        case "raises":
            raise ValueError("no number")
        case "hangs":
            time.sleep(1000)
        case "holds":
            re.match("(a+)+b", "a" * 99)  # for years, and no other thread of the process runs meanwhile
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
    log_metric("characters", sum(map(len, completions)))
    return [len(completion) for completion in completions]


async def slowly(completions, **_):
    return [1.0 for _ in completions]


def reward_set(*functions, timeout=TIMEOUT):
    return RewardSet([make_reward(RewardCfg(name="given"), function) for function in functions], timeout=timeout)


def score(rewards, *completions):
    columns = {"answer": ["4"] * len(completions)}
    return rewards.score(["p"] * len(completions), completions, [[0]] * len(completions), columns)


def test_an_isolated_reward_scores_and_logs_as_any_and_what_it_raises_ends_training():
    rewards = reward_set(lengths)
    assert score(rewards, "a", "bb").reward == (1, 2)
    assert score(rewards, "ccc").reward == (3,)
    assert rewards.take_logged() == {"characters": 3.0}
    with pytest.raises(RewardError, match=r"reward 'lengths' raised .*ValueError: no number; fix") as caught:
        score(rewards, "raises")
    assert 'raise ValueError("no number")' in caught.value.__cause__.__notes__[0]
    rewards.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hangs", "holds", "dies"])
def test_a_call_that_is_lost_gives_no_reward_and_the_next_one_works(how, caplog):
    rewards = reward_set(lengths, slowly)
    began = time.monotonic()
    scores = score(rewards, how, "a")
    assert time.monotonic() - began < 20 * TIMEOUT
    assert scores.parts == ((None, None), (1, 1))
    assert scores.reward == (None, None)  # a part of a reward is no reward
    why = "ended with exit code -9" if how == "dies" else "took longer than 2 s"
    assert f"reward 'lengths' failed for 2 of 2 completions: reward 'lengths' {why}" in caplog.text
    assert score(rewards, "a", "bb").reward == (2, 3)
    rewards.close()


def forks(completions, **_):
    child = subprocess.Popen(["sleep", "1000"])
    return [child.pid for _ in completions]


def is_running(pid):
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(int(pid))], capture_output=True, text=True).stdout
    return bool(state) and not state.startswith("Z")


def test_the_children_of_a_reward_end_with_its_process():
    rewards = reward_set(forks)
    (pid,) = score(rewards, "a").reward
    assert is_running(pid)
    rewards.close()
    end = time.monotonic() + 5
    while is_running(pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_cannot_be_sent_or_started_is_an_error():
    generator = (number for number in range(3))
    with pytest.raises(ConfigError, match=r"reward '<lambda>' cannot be sent to another process: .*; fix"):
        reward_set(lambda completions: [next(generator) for _ in completions])
    rewards = reward_set(Unloadable())
    with pytest.raises(ConfigError, match=r"(?s)^the process of reward 'Unloadable' does not start: .*no key"):
        score(rewards, "a")
    with pytest.raises(RewardError, match=r"reward 'refuses' raised RewardError: no service; fix: the function"):
        score(reward_set(refuses, timeout=None), "a")
    tool = make_tool(TextTaskCfg(tool="<given in Python>", tool_timeout=TIMEOUT), Unloadable())
    with pytest.raises(
        ConfigError, match=r"(?s)^the process of the tool does not start: .*; fix: a script needs `if __name"
    ):
        ask(tool, "a")


def refuses(completions, **_):
    raise RewardError("no service")


class Unloadable:
    def __call__(self, completions, **_):
        return [0.0] * len(completions)

    def __reduce__(self):
        return refuse, ()


def refuse():
    raise OSError("no key")


def test_a_pattern_that_takes_too_long_gives_no_reward(monkeypatch, caplog):
    monkeypatch.setattr(builtin_rewards, "_SECONDS_PER_SEARCH", 0.2)
    rewards = reward_set(RegexReward("(a|aa)+$"))
    assert rewards.functions[0].isolated is None
    assert score(rewards, "aa", "b", "a" * 99 + "b").reward == (1.0, 0.0, None)
    assert "reward 'RegexReward' failed for 1 of 3 completions: the pattern took longer than 0.2 s" in caplog.text


ENDLESS = "\\boxed{9^{9^{9^{9}}}}"


def math_set(**settings):
    return RewardSet([make_reward(RewardCfg(name="given"), MathReward(**settings))])


@pytest.mark.skipif(sys.platform == "win32", reason="limits of CPU time")
def test_a_comparison_has_cpu_time_and_is_no_failure_when_it_is_used_up(caplog, monkeypatch):
    monkeypatch.setattr("groupwise.text.sandbox._CLOCK", 50.0)  # other processes may leave it little of the CPU
    rewards, began = math_set(seconds=0.5), time.monotonic()
    assert score(rewards, ENDLESS, "\\boxed{2*2}", ENDLESS).reward == (0.0, 1.0, 0.0)
    assert time.monotonic() - began < 60
    assert not caplog.records
    rewards.close()


def test_a_comparison_whose_process_dies_gives_no_reward_and_is_tried_again(monkeypatch, caplog):
    rewards = math_set()
    assert score(rewards, "\\boxed{8/2}").reward == (1.0,)
    answer = MathVerifier._ask
    monkeypatch.setattr(MathVerifier, "_ask", lambda self, process, *_: process.kill() or answer(self, process, *_))
    caplog.set_level(logging.WARNING)
    assert score(rewards, "\\boxed{8/2}", "\\boxed{12/3}").reward == (1.0, None)  # the first one is remembered
    assert "the process that compares answers gave none" in caplog.text
    monkeypatch.undo()
    assert score(rewards, "\\boxed{12/3}").reward == (1.0,)
    rewards.close()


@pytest.mark.slow
def test_a_whole_run_survives_a_reward_that_hangs_once_and_leaves_no_process(model, tmp_path, caplog):
    hung = tmp_path / "hung"

    def once_hanging(completions, **_):
        if not hung.exists():
            hung.touch()
            time.sleep(1000)
        return [len(completion) for completion in completions]

    task = copying(once_hanging, reward_timeout=2.0)
    rows = train(task, model, tmp_path / "run", evaluation={"interval": 10**9, "prompts": 2}).metrics()
    assert [row["rollout/unscorable"] for row in rows] == [16.0] + [0.0] * (len(rows) - 1)
    assert "took longer than 2 s" in caplog.text
    assert not [process for process in multiprocessing.active_children() if "reward" in process.name]


def shout(text):
    match text:
        case "hangs":
            time.sleep(1000)
        case "raises":
            raise ValueError("no number")
        case "nothing":
            return None
    return text.upper()


def test_a_tool_that_hangs_is_answered_by_an_error():
    tool = make_tool(TextTaskCfg(tool="<given in Python>", tool_timeout=TIMEOUT), shout)
    assert (ask(tool, "yes"), ask(tool, "nothing")) == ("YES", None)
    with pytest.raises(ToolError, match=r"the tool raised RemoteError: ValueError: no number\n  its input: 'raises'"):
        ask(tool, "raises")
    assert ask(tool, "hangs") == "error: the tool took longer than 2 s"
    assert ask(tool, "yes") == "YES"
    tool.close()
    with pytest.raises(ValueError, match=r"tool_timeout=1\.0 has no effect without a tool"):
        TextTaskCfg(tool_timeout=1.0)
