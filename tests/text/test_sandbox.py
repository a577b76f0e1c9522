"""The process of its own: limits hold, errors are told, nothing is left running, and no answer is run."""

import os
import signal
import time

import pytest

from groupwise.text.sandbox import Sandbox, TooSlowError


@pytest.fixture
def sandbox():
    sandbox = Sandbox(1.0)
    yield sandbox
    sandbox.close()


def pid(sandbox):
    return sandbox._process.pid


def is_running(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_process_answers_many_calls(sandbox):
    assert sandbox.call("matches", "é+", "full", "éé") is True
    first = pid(sandbox)
    assert sandbox.call("matches", "a", "search", "line one\nline two") is False
    assert pid(sandbox) == first


def test_what_takes_too_long_is_ended_and_the_next_call_gets_another_process(sandbox):
    sandbox.call("matches", "a", "search", "a")
    first, began = pid(sandbox), time.monotonic()
    with pytest.raises(TooSlowError):
        sandbox.call("matches", "(a+)+$", "search", "a" * 50 + "!")
    assert time.monotonic() - began < 5
    assert not is_running(first)
    assert sandbox.call("matches", "a", "search", "a") is True


def test_starting_the_process_takes_none_of_a_call_s_time():
    sandbox = Sandbox(0.02)  # an interpreter starts in more than this
    assert sandbox.call("matches", "a", "search", "a") is True
    sandbox.close()


def test_errors_are_told_and_the_process_goes_on(sandbox):
    with pytest.raises(ValueError, match="missing"):
        sandbox.call("matches", "(", "search", "a")
    first = pid(sandbox)
    assert sandbox.call("matches", "a", "search", "a") is True
    assert pid(sandbox) == first


def test_a_process_that_somebody_else_ended_is_replaced(sandbox):
    sandbox.call("matches", "a", "search", "a")
    os.kill(pid(sandbox), signal.SIGKILL)
    time.sleep(0.1)
    assert sandbox.call("matches", "a", "search", "a") is True


def test_nothing_runs_before_the_first_call_and_after_the_last():
    sandbox = Sandbox(1.0)
    assert sandbox._process is None
    sandbox.close()
    sandbox.call("matches", "a", "search", "a")
    number = pid(sandbox)
    sandbox.close()
    assert not is_running(number)


def test_no_answer_is_run(sandbox, tmp_path):
    sandbox = Sandbox(5.0, warm_up=("same_mathematics", "1", "1"))
    proof = tmp_path / "ran"
    for answer in (
        f"__import__('os').mkdir('{proof}')",
        f"1+__import__('os').mkdir('{proof}')",
        f"open('{proof}', 'w')",
    ):
        assert sandbox.call("same_mathematics", "1", answer) is False
    assert not proof.exists()
    sandbox.close()
