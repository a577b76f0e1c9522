"""The table of what a language model learned is what its script makes of the committed runs."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def text_learn(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("text_learn", ROOT / "benchmarks" / "text_learn.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_current(text_learn):
    results = json.loads(text_learn.RESULTS.read_text())
    assert text_learn.table(results) == text_learn.TABLE.read_text()
    assert len(results["seeds"]) >= 3


def test_no_held_out_sum_stands_in_a_training_prompt(text_learn):
    train, held_out = text_learn.questions()
    asked = {row["prompt"].splitlines()[-1] for row in held_out}
    assert len(asked) == 192
    seen = {line.partition("=")[0] + "=" for row in train for line in row["prompt"].splitlines()}
    assert not asked & seen
