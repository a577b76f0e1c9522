"""What a run shows while it trains."""

import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text
from tensordict import TensorDict

from groupwise.report.page.health import examine
from groupwise.system.terminal import SafeStream, printable
from groupwise.training.base import Callback
from groupwise.training.evaluation import EvaluationResult

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from groupwise.training.trainer import Trainer

BLOCKS = "▁▂▃▄▅▆▇█"
MAX_ENTRIES = 1000
"""Iterations that the panel keeps."""


class Panel(Bar):
    """A bar; below it the returns of training as a sparkline, the best evaluation, and what goes wrong."""

    def __init__(self, console: "Console") -> None:
        self._metrics: list[dict[str, float]] = []
        self._stride = 1
        """Iterations from one entry to the next: doubled whenever there are too many."""
        self._best: tuple[float, int] | None = None
        self._troubles: list[str] = []
        columns = (BarColumn(15), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        super().__init__(*columns, console=console, refresh_per_second=5)
        self._task = self.add_task("")

    def begin(self, trainer: "Trainer") -> None:
        """Show it."""
        super().update(self._task, total=trainer.budget.total, completed=trainer.done)
        self.start()

    def add_evaluation(self, trainer: "Trainer", evaluation: EvaluationResult) -> None:
        """Keep the best score, and examine the metrics so far."""
        if self._best is None or evaluation.return_mean > self._best[0]:
            self._best = evaluation.return_mean, trainer.env_steps
        self._troubles = [finding.title for finding in examine(self._metrics) if finding.verdict == "bad"]

    def advance_to(self, trainer: "Trainer", metrics: Mapping[str, float], text: str) -> None:
        """Show an iteration."""
        if trainer.iteration % self._stride == 0:
            self._metrics.append({**metrics, "env_steps": trainer.env_steps, "iteration": trainer.iteration})
        if len(self._metrics) > MAX_ENTRIES:
            self._metrics = [entry for entry in self._metrics if entry["iteration"] % (2 * self._stride) == 0]
            self._stride *= 2
        super().update(self._task, completed=min(trainer.done, trainer.budget.total), description=text)

    def get_renderables(self) -> "Iterable[RenderableType]":
        """The bar, and the lines below it."""
        yield from super().get_renderables()
        returns = [entry["rollout/return_mean"] for entry in self._metrics if "rollout/return_mean" in entry]
        parts = [f"returns {sparkline(returns)}"] if returns and self.console.encoding.startswith("utf") else []
        if self._best is not None:
            parts.append(f"best evaluation {_score(self._best[0]).strip()} at step {self._best[1]:,}")
        if parts:
            yield Text("   ".join(parts), no_wrap=True)
        if self._troubles:
            yield Text(f"trouble: {', '.join(self._troubles)} (see: groupwise doctor)", style="yellow", no_wrap=True)


class Progress(Callback):
    """Shows progress: a live panel, or a line every ``interval`` seconds and at the end.

    Args:
        mode: ``auto`` is the panel on a terminal, and in a notebook that has ipywidgets, and lines elsewhere; ``iterations`` is a
            line for each.
        title: printed first.
    """

    def __init__(
        self,
        mode: Literal["auto", "bar", "lines", "iterations"],
        interval: float = 5.0,
        title: str = "",
        console: "Console | None" = None,
    ) -> None:
        from rich.console import Console

        stderr: Any = SafeStream(sys.stderr)
        self.console = console or Console(file=stderr)
        self.interval = 0.0 if mode == "iterations" else interval
        self.title = title
        notebook = self.console.is_jupyter and find_spec("ipywidgets") is not None
        live = mode == "bar" or (mode == "auto" and (self.console.is_terminal or notebook))
        self.panel = Panel(self.console) if live else None
        self._shown = 0.0
        self._evaluation: EvaluationResult | None = None

    def on_training_start(self, trainer: "Trainer") -> None:
        """Print the title, and show the empty panel."""
        self._shown = time.perf_counter()
        if self.title:
            self._print(self.title)
        if self.panel is not None:
            self.panel.begin(trainer)

    def on_evaluation_end(self, trainer: "Trainer", evaluation: EvaluationResult) -> None:
        """Keep the score for the next line."""
        self._evaluation = evaluation
        if self.panel is not None:
            self.panel.add_evaluation(trainer, evaluation)

    def on_iteration_end(self, trainer: "Trainer", rollout: TensorDict, metrics: dict[str, float]) -> None:
        """Update the panel, or print a line when it is time."""
        if self.panel is not None:
            self.panel.advance_to(trainer, metrics, " ".join(self._text(metrics).split()))
        elif trainer.is_done() or time.perf_counter() - self._shown >= self.interval:
            self._shown = time.perf_counter()
            self._print_line(trainer, metrics)

    def _print_line(self, trainer: "Trainer", metrics: Mapping[str, float]) -> None:
        done, total = min(trainer.done, trainer.budget.total), trainer.budget.total
        left = int((total - done) * trainer.seconds / max(done, 1e-9))
        steps = f"{round(trainer.done, 2):>12,} / {total:,} {trainer.budget.unit}"
        self._print(f"{done / total:5.0%}{steps}   {self._text(metrics)}   {left // 60}:{left % 60:02} left")

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self.panel is not None:
            self.panel.refresh()  # in a notebook, stopping does not show the last iteration
            self.panel.stop()

    def _text(self, metrics: Mapping[str, float]) -> str:
        parts = []
        if "rollout/return_mean" in metrics:
            parts.append(f"return {_score(metrics['rollout/return_mean'])}")
        if "rollout/success_rate" in metrics:
            parts.append(f"success {metrics['rollout/success_rate']:4.0%}")
        if self._evaluation is not None:
            parts.append(f"eval {_score(self._evaluation.return_mean)}")
            if self._evaluation.success_rate is not None:
                parts.append(f"eval success {self._evaluation.success_rate:4.0%}")
        speed = metrics["time/steps_per_second"]
        rate = f"{speed / 1000:.1f}k" if speed >= 1000 else f"{speed:.0f}"
        return "   ".join([*parts, f"{rate} steps/s"])

    def _print(self, line: str) -> None:
        self.console.print(printable(line), highlight=False, markup=False, emoji=False, soft_wrap=True)
        self.console.file.flush()


def _score(value: float) -> str:
    """One decimal for large returns, three for small ones."""
    return f"{value:8.1f}" if abs(value) >= 10 else f"{value:8.3f}"


def sparkline(values: Sequence[float], width: int = 30) -> str:
    """The course of some numbers in at most ``width`` characters, each the mean of as many numbers."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    borders = [len(finite) * part // count for part in range(count + 1)] if count else []
    means = [fmean(finite[start:end]) for start, end in pairwise(borders)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)
