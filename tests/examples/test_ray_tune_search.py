"""The example of Ray Tune, in a process of its own: Ray takes over signals."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "ray_tune_search.py"


@pytest.mark.slow
def test_trials_report_their_evaluations(tmp_path):
    pytest.importorskip("ray.tune")
    # Ray reads these when it is imported
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_USAGE_STATS_ENABLED": "0"}
    words = [sys.executable, SCRIPT, "--trials", "2", "--total-steps", "5000", "--run-dir", tmp_path / "search"]
    done = subprocess.run(words, env=os.environ | token, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    score, best = re.search(r"^the best of 2 trials reached (\S+): (.*)$", done.stdout, re.MULTILINE).groups()
    scores = {path.parent: final_score(path) for path in (tmp_path / "search").glob("*/run/metrics.jsonl")}
    assert len(scores) == 2
    assert scores[Path(best)] == max(scores.values()) == pytest.approx(float(score), abs=0.06)


def final_score(path):
    """Return of the last evaluation."""
    return json.loads(path.read_text().splitlines()[-1])["eval/return_mean"]
