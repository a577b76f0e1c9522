"""AgileRL's side of the pages, where AgileRL is installed."""

import re
import subprocess
from pathlib import Path

import pytest
from text_runs import save_model

import groupwise as gw

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "agent.md"
POPULATIONS = ROOT / "docs" / "evolution.md"
PEER = ROOT / ".venv-peers-agilerl" / "bin" / "python"
"""Made by ``make .venv-peers-agilerl/.done``."""


def test_their_example_runs(tmp_path, monkeypatch):
    pytest.importorskip("agilerl.utils.llm_utils")
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "my_model")
    namespace = {}
    ours, theirs = (
        re.search(rf"^```{name}\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[1]
        for name in ("python", "py")
    )
    exec(ours.partition("env =")[0], namespace)
    exec(theirs, namespace)


def population_blocks():
    """AgileRL's and ours."""
    return re.findall(r"^```py\n(.*?)^```", POPULATIONS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def shortened(block, **values):
    """The block with other budgets, each of which it names once."""
    for name, value in values.items():
        block, count = re.subn(rf"\b{name}=[\d_]+", f"{name}={value}", block)
        assert count == 1
    return block


@pytest.mark.slow
def test_their_population_runs(tmp_path):
    if not PEER.exists():
        pytest.skip("AgileRL is not installed")
    script = shortened(population_blocks()[0], max_steps=1, evo_steps=2048)
    script += "\nprint(len(pop), [agent.steps for agent in pop])\n"
    done = subprocess.run([PEER, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "4 [2048, 2048, 2048, 2048]"


@pytest.mark.slow
def test_our_population_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"gw": gw}
    exec(shortened(population_blocks()[1], rounds=1, round_steps=2048), namespace)
    assert [row["env_steps"] for row in namespace["population"].rows()] == [2048] * 4
