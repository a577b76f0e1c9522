"""The display of a run while it trains."""

import io
from pathlib import Path
from typing import Any

import pytest
from at_events import fail, on
from rich.console import Console

from groupwise.training import callbacks as progress_module
from groupwise.training.callbacks import Evaluate, Progress
from groupwise.training.checkpoint import Identity
from groupwise.training.evaluation import EvaluationResult

HERE = Identity("Countdown", "observations", "actions")


def score() -> EvaluationResult:
    return EvaluationResult((2.5,), (1,))


@pytest.mark.parametrize(("interval", "count"), [(0.0, 4), (3600.0, 1)])
def test_plain_lines_come_at_the_interval_and_at_the_end(interval: float, count: int, parts: Any, tmp_path: Path):
    out = io.StringIO()
    progress = Progress("auto", interval, console=Console(file=out, width=40))
    parts.trainer(Evaluate(score, 20, tmp_path / "best", HERE), progress, total_steps=40).train()
    lines = out.getvalue().splitlines()
    assert len(lines) == count  # a file is no terminal, and a narrow one wraps no line
    assert "100%          40 / 40 steps" in lines[-1]
    assert "return" in lines[-1]
    assert "eval    2.500" in lines[-1]


def test_a_terminal_gets_a_bar_or_a_line_for_each_iteration(parts: Any):
    out = {mode: io.StringIO() for mode in ("iterations", "auto")}
    for mode, file in out.items():
        console = Console(file=file, force_terminal=True, width=120)
        parts.trainer(Progress(mode, 1.0, console=console), total_steps=40).train()
    assert len(out["iterations"].getvalue().splitlines()) == 4
    assert "40/40" in out["auto"].getvalue()
    assert "steps/s" in out["auto"].getvalue()


def test_bar_is_closed_after_an_error(parts: Any):
    failing = on("rollout_end", fail(RuntimeError("broken callback")))
    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(RuntimeError, match="broken callback"):
        parts.trainer(Progress("bar", 1.0, console=console), failing).train()
    assert console.file.getvalue().endswith("\x1b[?25h")  # the cursor is shown again


@pytest.mark.parametrize("installed", [True, False])
def test_a_notebook_without_ipywidgets_gets_lines(monkeypatch: pytest.MonkeyPatch, installed: bool):
    monkeypatch.setattr(progress_module, "find_spec", lambda name: (name == "ipywidgets" and installed) or None)
    progress = Progress("auto", console=Console(file=io.StringIO(), force_jupyter=True))
    assert (progress.bar is not None) is installed
