"""How much code one training iteration runs through. Limits may only be lowered: a change that needs more has to save elsewhere."""

import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools" / "step_path.py"
LIMITS = {
    "control ppo": {"files": 20, "functions": 127, "lines": 841},
    "control grpo": {"files": 22, "functions": 141, "lines": 1008},
    "text": {"files": 26, "functions": 170, "lines": 1459},
}


def test_reading_paths_do_not_grow():
    done = subprocess.run([sys.executable, TOOL], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for (path, limits), counts in zip(LIMITS.items(), found, strict=True):
        assert all(counts[what] <= limit for what, limit in limits.items()), (path, counts)
