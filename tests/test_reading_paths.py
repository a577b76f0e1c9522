"""How much code one training iteration runs through. Limits may only be lowered: a change that needs more has to save elsewhere."""

import json
from pathlib import Path

from forked import run_script

TOOL = Path(__file__).parents[1] / "tools" / "step_path.py"
LIMITS = {
    "control ppo": {"files": 20, "functions": 126, "lines": 834},
    "control grpo": {"files": 22, "functions": 140, "lines": 975},
    "text": {"files": 26, "functions": 166, "lines": 1418},
}


def test_reading_paths_do_not_grow():
    found = [json.loads(line) for line in run_script(TOOL).splitlines() if line.startswith("{")]
    for (path, limits), counts in zip(LIMITS.items(), found, strict=True):
        assert all(counts[what] <= limit for what, limit in limits.items()), (path, counts)
