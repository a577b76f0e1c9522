"""The learning curve."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO, StringIO
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from groupwise import system as files
from groupwise.report.folder import interval_of

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


def line(axes: "Axes", steps: Sequence[float], scores: Sequence[float], **look: Any) -> None:
    """Draw scores against steps; a line of one point, which would be invisible, as a dot."""
    axes.plot(steps, scores, marker="o" if len(steps) == 1 else None, **look)


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
    if training := points(metrics, f"rollout/{name}"):
        line(axes, *_columns(training), color=TRAINING, linewidth=1.6, label="training, sampled")
    if evaluated := points(metrics, f"eval/{name}"):
        entries = [entry for entry in metrics if f"eval/{name}" in entry]
        ends = [interval_of(entry, name) or (math.nan, math.nan) for entry in entries]
        errors = [[score - low, high - score] for (_, score), (low, high) in zip(evaluated, ends, strict=True)]
        episodes = max(entry.get("eval/episodes", 0) for entry in entries)
        label = f"evaluation (mean of {episodes:.0f}, 95 % interval)" if episodes else "evaluation"
        axes.errorbar(
            *_columns(evaluated), yerr=list(zip(*errors, strict=True)), color=EVALUATION, fmt="o-", markersize=4,
            linewidth=1, capsize=2.5, label=label,
        )  # fmt: skip


def points(metrics: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """Environment steps and values of a metric."""
    return [(entry.get("env_steps", 0), float(entry[key])) for entry in metrics if key in entry]


# Figures as SVG inside the page: text and axes have the colour of the page's text

_INK = "#010203"
"""Drawn in place of the page's own colour, and replaced by it."""
_STYLE: Any = {
    "text.parse_math": False,  # names of runs may have dollar signs
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), _INK
    ),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor"), "none"),
    "svg.fonttype": "none",
    "svg.hashsalt": "groupwise",
    "font.size": 11,
}


def learning_curve(metrics: Sequence[Mapping[str, Any]], axes: tuple[str, str], name: str = "curve") -> Markup:
    """Return against steps, with the intervals of evaluations.

    Args:
        name: as of ``svg``.
    """
    label = f"Learning curve: {axes[1]} against {axes[0]}, in training and in evaluations"
    return svg(lambda: curve_figure(metrics, "", *axes, size=(5.8, 3.4)), label, name)


def overlay(
    runs: Mapping[str, tuple[Sequence[tuple[int, float]], Sequence[tuple[int, float]]]], title: str, name: str
) -> Markup:
    """Scores of several runs against steps: those of training as lines, those of evaluations as dots."""

    def draw() -> "Figure":
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for number, (run, (training, evaluations)) in enumerate(runs.items()):
            color = f"C{number}"
            line(axes, *_columns(training), color=color, linewidth=1.5, label=run)
            axes.plot(*_columns(evaluations), "o", color=color, markersize=4)
        axes.set(title=title)
        against_steps(axes)
        axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
        return figure

    return svg(draw, f"Learning curves of {len(runs)} runs on {title}", name)


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [steps for steps, _ in points], [score for _, score in points]


def small(series: Sequence[tuple[Sequence[int], Sequence[float]]], label: str, name: str) -> Markup:
    """Lines for a row of a table; of the axes only the lowest and the highest value."""

    def draw() -> "Figure":
        from matplotlib.ticker import EngFormatter

        figure, axes = _empty(left=0.25)
        for (steps, values), color in zip(series, (TRAINING, EVALUATION), strict=False):
            line(axes, steps, values, color=color, linewidth=1.5, markersize=3)
        axes.margins(y=0.1)
        drawn = [value for _, values in series for value in values if isfinite(value)]
        for value, place in ((max(drawn), "top"), (min(drawn), "bottom")) if drawn else ():
            text = f"{value:.3g}" if abs(value) < 1000 else EngFormatter(places=1, sep="")(value)
            figure.text(0.23, place == "top", text, size=8, ha="right", va=place)
        return figure

    return svg(draw, label, name)


def histogram(values: Sequence[float], label: str, name: str) -> Markup:
    """Ratios around 1, those beyond a factor of two in the outer bins."""

    def draw() -> "Figure":
        figure, axes = _empty()
        axes.hist([min(max(value, 0.4), 2.2) for value in values], bins=45, range=(0.4, 2.2), color=TRAINING)
        axes.axvline(1, color=_INK, linewidth=0.8)
        return figure

    return svg(draw, label, name)


def _empty(left: float = 0.0) -> "tuple[Figure, Any]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.2, 0.5))
    axes = figure.add_axes((left, 0, 1 - left, 1))
    axes.set_axis_off()
    return figure, axes


def svg(draw: "Callable[[], Figure]", label: str, name: str) -> Markup:
    """The figure that ``draw`` makes, as an element with an alternative text.

    Args:
        name: makes the ids of the figure's parts unique in the page.
    """
    from matplotlib import rc_context

    text = StringIO()
    with rc_context(_STYLE):
        draw().savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' id="\w+_\d+"', "", svg).replace(_INK, "currentColor")
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1))  # noqa: S704  drawn here
