"""The example of a game of several turns: what it leaves on disk, what it says, and that it learns."""

import re
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from forked import run_script
from scripts import ROOT

from groupwise.cli.main import main

SCRIPT = ROOT / "examples" / "text_game.py"
NUMBER = r"(\d\.\d\d)"
RESULT = (
    rf"^untrained: {NUMBER} of .*\ntrained:   {NUMBER} sampled, {NUMBER} with the likeliest words\npossible:  1\.00$"
)


def test_what_it_leaves_and_says(tmp_path, monkeypatch, capsys):
    out = run_script(SCRIPT, "--total-iterations", "2", folder=tmp_path)
    assert re.search(RESULT, out, re.MULTILINE)
    *_, start, end, look = [line for line in out.splitlines() if line.startswith(("Guess", "[end]", "Episodes"))]
    assert start == "Guess a number from 1 to 7 ."
    assert re.fullmatch(r"\[end\] .*: reward [01] in [123] turns", end)
    address = urlsplit(look.removeprefix("Episodes before and after: "))
    [run] = (tmp_path / "runs").iterdir()
    page = tmp_path / url2pathname(address.path)
    assert page == run.resolve() / "report.html"
    text = page.read_text()
    assert f'id="{address.fragment}"' in text
    titles = re.findall(r"<h3>Iteration (\d): best, middle and worst episode</h3>", text)
    assert titles == ["1", "2"]  # the first one is of the model before its first update
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "runs"]
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert main(["sample", f"runs/{run.name}", "--plugin", str(SCRIPT)]) == 0  # the game is found by its name
    assert "[end] " in capsys.readouterr().out


@pytest.mark.learn
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [100, 101, 102, 103, 104])
def test_it_finds_each_number(seed, tmp_path):
    out = run_script(SCRIPT, "--seed", seed, "--run-dir", tmp_path / "run", folder=tmp_path, seconds=850)
    untrained, sampled, greedy = map(float, re.search(RESULT, out, re.MULTILINE).groups())
    assert untrained < 0.3
    assert sampled > 0.6
    assert greedy == 1.0
