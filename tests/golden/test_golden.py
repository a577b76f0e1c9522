"""The reference path gives the numbers it has always given: to the bit on the machine that recorded them, else closely."""

import json

import pytest
import recorded

GOLDEN = json.loads(recorded.FILE.read_text(encoding="utf-8"))
CONTROL, TEXT = recorded.control_cases(), recorded.text_cases()
HERE = recorded.compute((recorded.machine,))
SENSITIVE = ("Pendulum-v1 ppo", "Pendulum-v1 grpo", "preset clip_cov")
"""Rounding grows in the simulator, or decides which steps are selected."""
SOLVING = ("preset lstd",)
"""LAPACK solves with other roundings on machines whose other arithmetic is the same."""


def check_case(name, case):
    golden = GOLDEN[name]
    same_machine = golden["machine"] == HERE
    if not same_machine and name in SENSITIVE:
        pytest.skip("this machine or this torch rounds differently from the one that the numbers come from")
    found = recorded.compute(case)
    if same_machine and name not in SOLVING:
        assert found["metrics"] == golden["metrics"]
        assert found["parameters"] == golden["parameters"]
    assert len(found["metrics"]) == len(golden["metrics"])
    for now, then in zip(found["metrics"], golden["metrics"], strict=True):
        assert now == pytest.approx(then, rel=1e-5 if same_machine else 2e-3, abs=1e-7 if same_machine else 2e-5)


@pytest.mark.parametrize("name", CONTROL)
def test_control(name):
    check_case(name, CONTROL[name])


@pytest.mark.parametrize("name", TEXT)
def test_text(name):
    check_case(name, TEXT[name])


def test_every_case_is_recorded():
    assert GOLDEN.keys() == CONTROL.keys() | TEXT.keys()
