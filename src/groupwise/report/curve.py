"""The learning curve."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.report.scores import half_width_95

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINING, EVALUATION = "#4c72b0", "#c44e52"


def plot_curve(
    metrics: Sequence[dict[str, Any]],
    path: Path,
    title: str,
    xlabel: str = "environment steps",
    ylabel: str = "episode return",
) -> None:
    """Write a PNG of return against steps: training, and evaluations with 95 % intervals.

    Args:
        metrics: entries of ``metrics.jsonl``; nothing is drawn for keys that none of them has.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    steps, returns = _column(metrics, "rollout/return_mean")
    if steps:
        marker = "o" if len(steps) == 1 else None  # a line of one point would be invisible
        axes.plot(steps, returns, color=TRAINING, linewidth=1.6, marker=marker, label="training, sampled")
    steps, returns = _column(metrics, "eval/return_mean")
    if steps:
        deviations, episodes = (_column(metrics, f"eval/{name}")[1] for name in ("return_std", "episodes"))
        halves = [half_width_95(std, int(count)) for std, count in zip(deviations, episodes, strict=True)]
        label = f"evaluation, {max(episodes):.0f} episodes (mean, 95 % interval)"
        axes.errorbar(
            steps, returns, yerr=halves, color=EVALUATION, fmt="o-", markersize=4, linewidth=1, capsize=2.5,
            label=label,
        )  # fmt: skip
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    against_steps(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="best")
    figure.savefig(path)


def against_steps(axes: "Axes") -> None:
    """Format axes of curves against steps."""
    from matplotlib.ticker import EngFormatter

    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _column(metrics: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(entry["env_steps"], entry[key]) for entry in metrics if key in entry]
    return [x for x, _ in points], [y for _, y in points]
