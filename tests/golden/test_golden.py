"""The reference path gives the numbers it has always given, to the bit."""

import json

import pytest
import recorded

GOLDEN = json.loads(recorded.FILE.read_text(encoding="utf-8"))
CONTROL, TEXT = recorded.control_cases(), recorded.text_cases()


@pytest.fixture(autouse=True)
def _same_machine():
    if recorded.machine() != GOLDEN["machine"]:
        pytest.skip("this machine or this torch rounds differently from the one that the numbers come from")


def check(name, case):
    found, golden = recorded.compute(case), GOLDEN[name]
    assert found["metrics"] == golden["metrics"]
    assert found["parameters"] == golden["parameters"]


@pytest.mark.parametrize("name", CONTROL)
def test_control(name):
    check(name, CONTROL[name])


@pytest.mark.parametrize("name", TEXT)
def test_text(name):
    check(name, TEXT[name])


def test_every_case_is_recorded():
    assert GOLDEN.keys() - {"machine"} == CONTROL.keys() | TEXT.keys()
