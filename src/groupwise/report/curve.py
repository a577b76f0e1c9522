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
WIDTH, HEIGHT = 700, 410
LEFT, RIGHT, TOP, BOTTOM = 68, 682, 34, 330
"""Place of the axes in a panel, in pixels."""


def plot_curve(
    metrics: Sequence[Mapping[str, Any]],
    path: Path,
    title: str,
    xlabel: str = "environment steps",
    ylabel: str = "episode return",
) -> None:
    """Write the learning curve as SVG; see ``curve_svg``. matplotlib would take a second and 30 MiB to import."""
    files.write(path, curve_svg(metrics, title, xlabel, ylabel, look="background: white; color: #222").encode())


def curve_svg(metrics: Sequence[Mapping[str, Any]], title: str, xlabel: str, ylabel: str, look: str = "") -> Markup:
    """Return against steps: training, and evaluations with 95 % intervals. Lines and text have the colour of the page.

    A second panel shows the success rate, where the environment reports success.

    Args:
        metrics: entries of ``metrics.jsonl``; nothing is drawn for keys that none of them has.
        look: CSS of the picture.
    """
    panels = {"return_mean": ylabel}
    if any("rollout/success_rate" in entry or "eval/success_rate" in entry for entry in metrics):
        panels["success_rate"] = "success rate"
    if metrics and all(_is_success(entry) for entry in metrics):
        del panels["return_mean"]
    drawn = [_panel(metrics, name, xlabel, label) for name, label in panels.items()]
    shifted = [f'<g transform="translate(0 {number * HEIGHT})">{panel}</g>' for number, panel in enumerate(drawn)]
    return Markup(  # noqa: S704  drawn here, and words are escaped
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT * len(drawn)}" role="img" style="{look}" '
        f'font-family="sans-serif" font-size="13" text-anchor="middle" fill="currentColor" '
        f'aria-label="{escape(f"Learning curve: {ylabel} against {xlabel}, in training and in evaluations")}">'
        f'<text x="{WIDTH / 2}" y="20" font-size="15">{escape(title)}</text>{"".join(shifted)}</svg>'
    )


def _panel(metrics: Sequence[Mapping[str, Any]], name: str, xlabel: str, ylabel: str) -> str:
    """A score in training and in evaluations."""
    training, evaluated = points(metrics, f"rollout/{name}"), points(metrics, f"eval/{name}")
    entries = [entry for entry in metrics if f"eval/{name}" in entry]
    ends = [interval_of(entry, name) or (score, score) for entry, (_, score) in zip(entries, evaluated, strict=True)]
    scores = [score for _, score in training + evaluated] + [end for both in ends for end in both]
    across, up = _ticks(0, max((step for step, _ in training + evaluated), default=1) or 1), _ticks(*_span(scores))

    def x(step: float) -> str:
        return f"{LEFT + (RIGHT - LEFT) * step / across[-1]:.1f}"

    def y(score: float) -> str:
        return f"{BOTTOM - (BOTTOM - TOP) * (score - up[0]) / (up[-1] - up[0]):.1f}"

    def line(points: Sequence[tuple[float, float]], color: str, width: float) -> str:
        places = " ".join(f"{x(step)},{y(score)}" for step, score in points)
        return f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{width}"/>'

    def dot(step: float, score: float, color: str) -> str:
        return f'<circle cx="{x(step)}" cy="{y(score)}" r="3" fill="{color}"/>'

    parts = []
    for step in across:
        parts.append(f'<path d="M{x(step)} {TOP}V{BOTTOM}" stroke="currentColor" opacity="0.15"/>')
        parts.append(f'<text x="{x(step)}" y="{BOTTOM + 18}">{short(step)}</text>')
    for score in up:
        parts.append(f'<path d="M{LEFT} {y(score)}H{RIGHT}" stroke="currentColor" opacity="0.15"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(score)}" dy="4" text-anchor="end">{short(score)}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="currentColor"/>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 40}">{escape(xlabel)}</text>')
    middle, legend = (TOP + BOTTOM) / 2, []
    parts.append(f'<text x="16" y="{middle}" transform="rotate(-90 16 {middle})">{escape(ylabel)}</text>')
    if training:
        parts += [line(training, TRAINING, 1.6)] if len(training) > 1 else [dot(*training[0], TRAINING)]
        legend.append((TRAINING, "training, sampled"))
    if evaluated:
        whiskers = [
            line([(step, low), (step, high)], EVALUATION, 1)
            for (step, _), (low, high) in zip(evaluated, ends, strict=True)
        ]
        parts += [line(evaluated, EVALUATION, 1), *whiskers, *(dot(*point, EVALUATION) for point in evaluated)]
        episodes = max(entry.get("eval/episodes", 0) for entry in entries)
        legend.append((EVALUATION, f"evaluation (mean of {episodes:.0f}, 95 % interval)" if episodes else "evaluation"))
    words = "&#160;".join(f'<tspan fill="{color}">&#9644;</tspan> {word} ' for color, word in legend)
    return "".join([*parts, f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 66}">{words}</text>'])


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest number, apart where they are equal."""
    low, high = min(filter(isfinite, values), default=0.0), max(filter(isfinite, values), default=1.0)
    return (low, high) if low < high else (low - (abs(low) or 1.0) / 10, high + (abs(high) or 1.0) / 10)


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from ``low`` or below to ``high`` or above."""
    size = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(size))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size)
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def short(value: float) -> str:
    """A number as on axes: 20k, 1.5M."""
    size, suffix = next(((s, n) for s, n in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if s <= abs(value) < 1e12), (1.0, ""))
    return f"{value / size:.4g}{suffix}"


def _is_success(entry: Mapping[str, Any]) -> bool:
    """Whether the return is the success rate itself, as of a reward that is 1 for success."""
    pairs = [(f"{of}/return_mean", f"{of}/success_rate") for of in ("rollout", "eval")]
    return any(rate in entry for _, rate in pairs) and all(entry.get(mean) == entry.get(rate) for mean, rate in pairs)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a PNG."""
    png = BytesIO()
    figure.savefig(png, format="png")
    files.write(path, png.getvalue())


def line(axes: "Axes", steps: Sequence[float], scores: Sequence[float], **look: Any) -> None:
    """Draw scores against steps; a line of one point, which would be invisible, as a dot."""
    axes.plot(steps, scores, marker="o" if len(steps) == 1 else None, **look)


def against_steps(axes: "Axes") -> None:
    """Format axes of curves against steps."""
    from matplotlib.ticker import EngFormatter

    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


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
