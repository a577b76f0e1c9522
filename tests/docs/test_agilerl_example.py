"""AgileRL's side of the page on loops by hand, where AgileRL is installed."""

import re
from pathlib import Path

import pytest
from text_runs import save_model

PAGE = Path(__file__).parents[2] / "docs" / "agent.md"


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
