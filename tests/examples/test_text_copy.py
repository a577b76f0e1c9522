"""The example of a language model: what it leaves on disk, what it says, and that it learns."""

import json
import re

import pytest
from forked import run_script
from scripts import ROOT

from groupwise.cli.main import main

SCRIPT = ROOT / "examples" / "text_copy.py"
NUMBER = r"(-?\d+(?:\.\d+)?)"
RESULT = rf"^return_mean={NUMBER} ci95=\[{NUMBER}, {NUMBER}\] pass@1={NUMBER} .* prompts=145 completions_per_prompt=1$"


def test_what_it_leaves_and_says(tmp_path, monkeypatch, capsys):
    out = run_script(SCRIPT, "--total-steps", "1000", folder=tmp_path)
    result, *samples, look = out.splitlines()[-4:]
    assert re.fullmatch(RESULT, result)
    assert [line.split(" -> ")[0] for line in samples] == ["123", "957"]
    # under runs/ is the run alone: the model that it begins with stays elsewhere, for groupwise sample
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "runs"]
    [run] = (tmp_path / "runs").iterdir()
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["rollout/sampler_kl"] < 1e-8
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *map(str, (tmp_path / "runs").glob("*"))]) == 0
    program, *command = look.removeprefix("Look:  ").split()
    assert program.endswith("groupwise")
    assert command == ["report", f"runs/{run.name}"]
    assert main(command) == 0
    assert (run / "report.html").exists()
    assert main(["sample", f"runs/{run.name}", "123"]) == 0


@pytest.mark.learn
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 110))
def test_it_copies_numbers_that_it_never_saw(seed, tmp_path):
    out = run_script(SCRIPT, "--seed", seed, "--run-dir", tmp_path / "run", folder=tmp_path, seconds=850)
    assert float(re.search(RESULT, out, re.MULTILINE)[4]) >= 0.95
