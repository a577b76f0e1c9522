"""The process that compares answers: limits hold, nothing is left running, and no answer is run as code."""

import os
import sys
from pathlib import Path

import pytest

from groupwise.errors import RewardError
from groupwise.text.sandbox import MathVerifier


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


def test_one_process_answers_many_calls_and_has_no_part_in_the_folder_or_the_terminal(tmp_path, monkeypatch):
    for name in ("math_verify", "json", "sympy", "groupwise"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')\nraise SystemExit")
    monkeypatch.chdir(tmp_path)
    verifier = MathVerifier(0.5)  # the imports, which take longer than this, do not count
    assert verifier._process is None
    verifier.close()
    assert verifier.same("1/2", "0.5") is True
    first = pid(verifier)
    assert os.getpgid(first) != os.getpgid(0)  # an interrupt by Ctrl-C does not reach it
    assert verifier.same("1/2", "2") is False
    assert verifier.same("1/2", "\\frac{") is False
    assert verifier.same("1/2", "2/4") is True
    assert pid(verifier) == first
    verifier.close()
    assert not is_running(first)
    assert not (tmp_path / "ran").exists()


def test_an_answer_that_an_interrupt_left_unread_is_not_that_to_the_next_question(verifier):
    assert verifier.same("1/2", "0.5") is True

    def interrupted():
        raise KeyboardInterrupt

    verifier._process.stdout.readline = interrupted
    with pytest.raises(KeyboardInterrupt):
        verifier.same("1/2", "0.5")
    assert verifier.same("1/2", "0.7") is False


def test_no_answer_is_run(tmp_path):
    verifier, proof = MathVerifier(5.0), tmp_path / "ran"
    call = f"__import__('os').mkdir('{proof}')"
    for answer in (call, f"1+{call}", f"open('{proof}', 'w')"):
        assert verifier.same("1", answer) is False
    assert not proof.exists()
    verifier.close()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_process_has_no_keys_of_the_user_and_limits_of_memory_files_and_processes(verifier, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert verifier.same("1/2", "0.5")
    process = Path("/proc", str(pid(verifier)))
    names = {line.partition("=")[0] for line in (process / "environ").read_text().split("\0") if line}
    assert names <= {"PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LC_CTYPE"}
    rows = (process / "limits").read_text().splitlines()[1:]
    hard = {row[:26].strip(): row[26:].split()[1] for row in rows}
    assert {name: hard[f"Max {name}"] for name in ("address space", "file size", "processes", "core file size")} == {
        "address space": str(4 * 2**30), "file size": "0", "processes": "0", "core file size": "0",
    }  # fmt: skip


def test_a_process_that_does_not_start_is_an_error_and_no_wrong_answer(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken package')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RewardError, match="does not start: ImportError: broken package"):
        MathVerifier(1.0).same("1/2", "0.5")
