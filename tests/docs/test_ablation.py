"""The ablation's table is what its script makes of the committed runs."""

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_follows_from_the_committed_runs():
    spec = importlib.util.spec_from_file_location("ablation", ROOT / "benchmarks" / "ablation.py")
    assert spec is not None
    assert spec.loader is not None
    ablation = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ablation)
    results = json.loads(ablation.RESULT.read_text())
    assert ablation.TABLE.read_text(encoding="utf-8") == ablation.table(results)
    seeds = {task.name: task.seeds for task in ablation.TASKS}
    for task, variants in results.items():
        assert {len(runs) for runs in variants.values()} == {seeds[task]}, "a variant is recorded with all its seeds"
