"""The display of a run while it trains."""

import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tensordict import TensorDict

from groupwise.training import callbacks as progress_module
from groupwise.training.callbacks import BLOCKS, Evaluate, Progress, sparkline
from groupwise.training.checkpoint import Identity
from groupwise.training.evaluation import EvaluationResult
from groupwise.training.trainer import Callback, Trainer

HERE = Identity("Countdown", "observations", "actions")


def scores(*returns: float) -> Any:
    queue = iter(returns)
    return lambda: EvaluationResult((float(next(queue)),), (1,))


@pytest.mark.parametrize(("interval", "count"), [(0.0, 4), (3600.0, 1)])
def test_plain_lines_come_at_the_interval_and_at_the_end(interval: float, count: int, parts: Any, tmp_path: Path):
    out = io.StringIO()
    progress = Progress("auto", interval, console=Console(file=out, width=40))
    parts.trainer(Evaluate(scores(2.5, 2.5), 20, tmp_path / "best", HERE), progress, total_steps=40).train()
    lines = out.getvalue().splitlines()
    assert len(lines) == count  # a file is no terminal, and a narrow one wraps no line
    assert "100%          40 / 40 steps" in lines[-1]
    assert "return" in lines[-1]
    assert "eval    2.500" in lines[-1]


def test_there_may_be_a_line_for_each_iteration(parts: Any):
    out = io.StringIO()
    parts.trainer(Progress("iterations", console=Console(file=out, force_terminal=True)), total_steps=40).train()
    assert len(out.getvalue().splitlines()) == 4


def test_bar_is_drawn_on_a_terminal(parts: Any):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    parts.trainer(Progress("auto", 1.0, console=console), total_steps=20).train()
    assert "20/20" in out.getvalue()
    assert "steps/s" in out.getvalue()


def test_bar_is_closed_after_an_error(parts: Any):
    class Failing(Callback):
        def on_rollout_end(self, trainer: Trainer, rollout: TensorDict) -> None:
            raise RuntimeError("broken callback")

    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(RuntimeError, match="broken callback"):
        parts.trainer(Progress("bar", 1.0, console=console), Failing()).train()
    assert console.file.getvalue().endswith("\x1b[?25h")  # the cursor is shown again


class NoGradient(Callback):
    def on_iteration_end(self, trainer: Trainer, rollout: TensorDict, metrics: dict[str, Any]) -> None:
        metrics["train/grad_norm"] = 0.0


def test_panel_shows_the_course_the_best_evaluation_and_troubles(parts: Any, tmp_path: Path):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    evaluate = Evaluate(scores(5.0, 2.5), 20, tmp_path / "best", HERE)
    parts.trainer(NoGradient(), evaluate, Progress("auto", console=console), total_steps=40).train()
    shown = out.getvalue()
    assert any(block in shown for block in BLOCKS)
    assert "best evaluation 5.000 at step 20" in shown
    assert "trouble: Gradient norm (see: groupwise doctor)" in shown


def test_a_terminal_without_unicode_has_no_blocks(parts: Any):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="strict")
    parts.trainer(Progress("bar", console=Console(file=out, force_terminal=True, width=120)), total_steps=40).train()
    out.flush()
    assert b"40/40" in raw.getvalue()
    assert b"returns" not in raw.getvalue()


@pytest.mark.parametrize("installed", [True, False])
def test_a_notebook_without_ipywidgets_gets_lines(monkeypatch: pytest.MonkeyPatch, installed: bool):
    monkeypatch.setattr(progress_module, "find_spec", lambda name: (name == "ipywidgets" and installed) or None)
    progress = Progress("auto", console=Console(file=io.StringIO(), force_jupyter=True))
    assert (progress.panel is not None) is installed


def test_a_long_run_is_shown_in_bounded_memory(parts: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress_module, "MAX_ENTRIES", 8)
    progress = Progress("bar", console=Console(file=io.StringIO(), force_terminal=True, width=120))
    assert progress.panel is not None
    monkeypatch.setattr(progress_module, "sparkline", lambda values: str(len(values)))
    parts.trainer(progress, total_steps=10 * 100).train()
    *_, line = progress.panel.get_renderables()
    assert 4 <= int(str(line).split()[1]) <= 8


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=100))
def test_sparklines_have_any_numbers(values: list[float]):
    assert len(sparkline(values)) <= min(30, len(values))
    assert set(sparkline(values)) <= set(BLOCKS)


def test_a_sparkline_follows_the_numbers():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == BLOCKS
    assert sparkline([*range(60)]) == sparkline([*range(30)])  # means of pairs
    assert sparkline([3.0, 3.0]) == BLOCKS[0] * 2
    assert sparkline([]) == ""
