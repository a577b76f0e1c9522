"""``make gpu`` as a dry run on a CPU: every part ends, and all of its cases are right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quick_python import quick_python

ROOT = Path(__file__).parents[2]
PARTS = {"text_speed": 3, "control_speed": 4, "idle": 2, "repeats": 3, "ranks": 4, "memory": 4, "agreement": 5}
PARTS |= {"deterministic": 2, "tests": 0, "doctor": 0}
"""Least cases of each part that this environment can run; the others need packages that it may lack."""


def gpu(folder, *words, python=sys.executable, **environment):
    environment = {"DEV": "cpu", "TINY": "1", "OUT": str(folder), "SECONDS": "1200"} | environment
    command = [python, ROOT / "tools" / "gpu.py", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    files = list(folder.glob("gpu_cpu_*.json"))
    return done, json.loads(files[0].read_text()) if files else None


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_part_is_right_on_a_cpu(tmp_path):
    with quick_python() as python:
        done, found = gpu(tmp_path, python=python)
    assert done.returncode == 0, done.stdout[-3000:]
    parts = {part["part"]: part for part in found["parts"]}
    for name, cases in PARTS.items():
        assert parts[name]["ok"], parts[name]
        assert parts[name]["cases"] >= cases
    for name in parts.keys() - PARTS.keys():
        assert parts[name]["ok"] or parts[name]["outcome"].startswith("skipped: not installed: "), parts[name]
    assert {case["ok"] for case in found["cases"]} == {True}
    assert all(case["part"] in parts for case in found["cases"])


def test_what_time_does_not_allow_is_listed(tmp_path):
    done, found = gpu(tmp_path, "repeats", "doctor", SECONDS="5")
    assert done.returncode == 0
    assert [(part["part"], part["outcome"]) for part in found["parts"]] == [
        ("repeats", "skipped: no time"),
        ("doctor", "skipped: no time"),
    ]
    assert "skipped: no time" in done.stdout.splitlines()[-4]


def test_a_part_that_fails_is_named_with_its_last_line(tmp_path):
    # the interpreter cannot import torch there
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    done, found = gpu(tmp_path, "doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    (part,) = found["parts"]
    assert not part["ok"]
    assert part["outcome"] == "exit code 1"
    assert "ImportError: broken" in part["log"]
    assert "NOT OK" in done.stdout


def test_an_unknown_part_is_refused(tmp_path):
    done, found = gpu(tmp_path, "repeat")
    assert done.returncode == 1
    assert found is None
    assert done.stderr.startswith("no such part: repeat; parts: text_speed, ")
