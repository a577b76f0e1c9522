"""The learning curve."""

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.report.scores import interval_of
from groupwise.system import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAINING, EVALUATION = "#4c72b0", "#c44e52"


def plot_curve(
    metrics: Sequence[Mapping[str, Any]],
    path: Path,
    title: str,
    xlabel: str = "environment steps",
    ylabel: str = "episode return",
) -> None:
    """Write a PNG of return against steps: training, and evaluations with 95 % intervals.

    A second panel shows the success rate, where the environment reports success.

    Args:
        metrics: entries of ``metrics.jsonl``; nothing is drawn for keys that none of them has.
    """
    save_figure(curve_figure(metrics, title, xlabel, ylabel, size=(7.0, 4.2)), path)


def curve_figure(
    metrics: Sequence[Mapping[str, Any]],
    title: str,
    xlabel: str,
    ylabel: str,
    size: tuple[float, float],
    kind: "type[Figure] | None" = None,
) -> "Figure":
    """The figure of ``plot_curve``.

    Args:
        size: of a panel, in inches.
        kind: of figure; None: matplotlib's own.
    """
    from matplotlib.figure import Figure

    panels = {"return_mean": ylabel}
    if any("rollout/success_rate" in entry or "eval/success_rate" in entry for entry in metrics):
        panels["success_rate"] = "success rate"
    if metrics and all(_is_success(entry) for entry in metrics):
        del panels["return_mean"]
    width, height = size
    figure = (kind or Figure)(figsize=(width, height * len(panels)), dpi=130, layout="constrained")
    every = list(figure.subplots(len(panels), squeeze=False).flat)
    for axes, (name, label) in zip(every, panels.items(), strict=True):
        _draw(axes, metrics, name)
        axes.set(xlabel=xlabel, ylabel=label, title=title if axes is every[0] else "")
        against_steps(axes)
    if (handles := every[0].get_legend_handles_labels())[0]:
        figure.legend(*handles, frameon=False, loc="outside lower center", ncols=2)
    return figure


def _is_success(entry: Mapping[str, Any]) -> bool:
    """Whether the return is the success rate itself, as of a reward that is 1 for success."""
    pairs = [(f"{of}/return_mean", f"{of}/success_rate") for of in ("rollout", "eval")]
    return any(rate in entry for _, rate in pairs) and all(entry.get(mean) == entry.get(rate) for mean, rate in pairs)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a PNG."""
    files.write(path, to_png(figure))


def to_png(figure: "Figure") -> bytes:
    """The figure as PNG."""
    png = BytesIO()
    figure.savefig(png, format="png")
    return png.getvalue()


def against_steps(axes: "Axes") -> None:
    """Format axes of curves against steps."""
    from matplotlib.ticker import EngFormatter

    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _draw(axes: "Axes", metrics: Sequence[Mapping[str, Any]], name: str) -> None:
    """A score in training and in evaluations."""
    training = [entry for entry in metrics if f"rollout/{name}" in entry]
    if training:
        steps, scores = ([entry.get(key, 0) for entry in training] for key in ("env_steps", f"rollout/{name}"))
        marker = "o" if len(steps) == 1 else None  # a line of one point would be invisible
        axes.plot(steps, scores, color=TRAINING, linewidth=1.6, marker=marker, label="training, sampled")
    evaluations = [entry for entry in metrics if f"eval/{name}" in entry]
    if evaluations:
        steps, scores = ([entry.get(key, 0) for entry in evaluations] for key in ("env_steps", f"eval/{name}"))
        unknown = (math.nan, math.nan)
        lows, highs = zip(*(interval_of(entry, name) or unknown for entry in evaluations), strict=True)
        below = [score - low for score, low in zip(scores, lows, strict=True)]
        above = [high - score for score, high in zip(scores, highs, strict=True)]
        episodes = max(entry.get("eval/episodes", 0) for entry in evaluations)
        label = f"evaluation (mean of {episodes:.0f}, 95 % interval)" if episodes else "evaluation"
        axes.errorbar(
            steps, scores, yerr=(below, above), color=EVALUATION, fmt="o-", markersize=4, linewidth=1, capsize=2.5,
            label=label,
        )  # fmt: skip
