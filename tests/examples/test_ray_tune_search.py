"""The example of Ray Tune, in a process of its own: Ray takes over signals."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import ROOT


@pytest.mark.slow
@pytest.mark.skipif("GROUPWISE_RAY" not in os.environ, reason="run by make test-ray")
def test_a_trial_reports_its_evaluations(tmp_path):
    pytest.importorskip("ray.tune")
    # Ray reads these when it is imported
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_USAGE_STATS_ENABLED": "0"}
    words = ["--trials", "1", "--total-steps", "1000", "--run-dir", tmp_path / "search"]
    command = [sys.executable, ROOT / "examples/ray_tune_search.py", *words]
    done = subprocess.run(command, env=os.environ | token, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    score, best = re.search(r"^the best of 1 trials reached (\S+): (.*)$", done.stdout, re.MULTILINE).groups()
    summary = json.loads((Path(best) / "summary.json").read_text())  # written at the end: the trial was not cut off
    assert summary["return_mean"] == pytest.approx(float(score), abs=0.06)
