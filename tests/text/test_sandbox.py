"""The process that compares answers: limits hold, nothing is left running, and no answer is run as code."""

import os
import signal
import time

import pytest

from groupwise.text.sandbox import MathVerifier

ENDLESS = "9^{9^{9^{9}}}"


@pytest.fixture
def verifier():
    verifier = MathVerifier(1.0)
    yield verifier
    verifier.close()


def pid(verifier):
    return verifier._process.pid


def is_running(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_one_process_answers_many_calls(verifier):
    assert verifier.same("1/2", "0.5") is True
    first = pid(verifier)
    assert verifier.same("1/2", "2") is False
    assert verifier.same("1/2", "\\frac{") is False
    assert verifier.same("1/2", "2/4") is True
    assert pid(verifier) == first


def test_what_takes_too_long_is_wrong_and_the_next_call_works(verifier):
    began = time.monotonic()
    assert verifier.same("4", ENDLESS) is False
    assert time.monotonic() - began < 60
    assert verifier.same("4", "4.0") is True


def test_starting_the_process_takes_none_of_a_call_s_time():
    verifier = MathVerifier(0.5)  # the imports take longer than this
    assert verifier.same("2", "4/2") is True
    verifier.close()


def test_a_process_that_somebody_else_ended_is_replaced(verifier):
    verifier.same("1", "1")
    os.kill(pid(verifier), signal.SIGKILL)
    time.sleep(0.1)
    assert verifier.same("1", "2/2") is True


def test_nothing_runs_before_the_first_call_and_after_the_last():
    verifier = MathVerifier(1.0)
    assert verifier._process is None
    verifier.close()
    verifier.same("1", "1")
    number = pid(verifier)
    verifier.close()
    assert not is_running(number)


def test_no_answer_is_run(tmp_path):
    verifier = MathVerifier(5.0)
    proof = tmp_path / "ran"
    for answer in (
        f"__import__('os').mkdir('{proof}')",
        f"1+__import__('os').mkdir('{proof}')",
        f"open('{proof}', 'w')",
    ):
        assert verifier.same("1", answer) is False
    assert not proof.exists()
    verifier.close()
