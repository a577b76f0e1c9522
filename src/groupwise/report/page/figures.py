"""Figures as SVG inside the page: text and axes in the colour of the page's own text."""

import re
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from math import isfinite
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from groupwise.report.curve import EVALUATION, TRAINING, against_steps, curve_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
            axes.plot(*_columns(training), color=color, linewidth=1.5, label=run)
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
            axes.plot(steps, values, color=color, linewidth=1.5, marker="o" if len(steps) == 1 else None, markersize=3)
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
    """What ``draw`` makes, as an element with an alternative text.

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
