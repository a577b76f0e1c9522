"""Curves as SVG, whose lines and text have the colour of the page. matplotlib would take a second and 30 MiB to import."""

import math
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from groupwise import system as files
from groupwise.report.folder import interval_of, with_success_rates

TRAINING, EVALUATION = "#4c72b0", "#c44e52"
COLORS = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9")
"""Seaborn's palette ``colorblind``."""
DASHES = ("none", "7 3", "2 3")
"""Dashes of the first, second and third ten lines."""
WIDTH, HEIGHT = 700, 410
LEFT, RIGHT, TOP, BOTTOM = 88, 674, 34, 330
"""Place of the axes in a panel, in pixels."""
LARGEST = 1e300
"""Scores beyond it are drawn there."""
MAX_POINTS = 500
"""Points of a line."""
Points = Sequence[tuple[float, float]]
"""Steps and scores."""


def plot_curve(metrics: Sequence[Mapping[str, Any]], path: Path, title: str, xlabel: str, ylabel: str) -> None:
    """Write the learning curve as SVG; see ``curve_svg``."""
    files.write(path, curve_svg(metrics, title, xlabel, ylabel, look="background: white; color: #222").encode())


def curve_svg(metrics: Sequence[Mapping[str, Any]], title: str, xlabel: str, ylabel: str, look: str = "") -> Markup:
    """Return against steps: training, and evaluations with 95 % intervals.

    A second panel shows the success rate, where the environment reports success.

    Args:
        metrics: entries of ``metrics.jsonl``; nothing is drawn for keys that none of them has.
        look: CSS of the picture.
    """
    panels, metrics = {"return_mean": ylabel}, with_success_rates(metrics)
    if any("rollout/success_rate" in entry or "eval/success_rate" in entry for entry in metrics):
        panels["success_rate"] = "success rate"
    body = f'<text x="{WIDTH / 2}" y="20" font-size="15">{escape(title)}</text>'
    for number, (name, words) in enumerate(panels.items()):
        training, evaluated = points(metrics, f"rollout/{name}"), points(metrics, f"eval/{name}")
        entries = [entry for entry in metrics if f"eval/{name}" in entry]
        ends = [interval_of(entry, name) or (end, end) for entry, (_, end) in zip(entries, evaluated, strict=True)]
        whiskers = [[(step, low), (step, high)] for (step, _), (low, high) in zip(evaluated, ends, strict=True)]
        axes = Axes([*training, *evaluated, *(end for both in whiskers for end in both)], xlabel, words)
        legend = []
        if training:
            axes.line(thin(training), TRAINING)
            legend.append((TRAINING, "training, sampled"))
        if evaluated:
            for both in whiskers:
                axes.line(both, EVALUATION, 1)
            axes.line(evaluated if len(evaluated) > 1 else [], EVALUATION, 1)
            axes.dots(evaluated, EVALUATION)
            episodes = max(entry.get("eval/episodes", 0) for entry in entries)
            label = f"evaluation (mean of {episodes:.0f}, 95 % interval)" if episodes else "evaluation"
            legend.append((EVALUATION, label))
        signs = "&#160;".join(f'<tspan fill="{color}">&#9644;</tspan> {word} ' for color, word in legend)
        axes.parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 66}">{signs}</text>')
        body += f'<g transform="translate(0 {number * HEIGHT})">{"".join(axes.parts)}</g>'
    label = f"Learning curve: {ylabel} against {xlabel}, in training and in evaluations"
    return _svg(WIDTH, HEIGHT * len(panels), body, label, look)


def overlay(
    curves: Mapping[str, tuple[Points, Points, Points]], title: str, xlabel: str = "", ylabel: str = ""
) -> Markup:
    """Several curves against steps. Each is a line, dots, and the outline of a band around it."""
    axes = Axes([point for curve in curves.values() for part in curve for point in part], xlabel, ylabel)
    legend = []
    for number, (name, (line, dots, band)) in enumerate(curves.items()):
        color, dash = COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)]
        axes.parts.append(f'<polygon points="{axes.places(band)}" fill="{color}" opacity="0.18"/>')
        axes.line(line, color, dash=dash)
        axes.dots(dots, color)
        legend.append(Markup('<span style="color: {}">&#9632;</span> {} ').format(color, name))
    body = f'<text x="{WIDTH / 2}" y="20" font-size="15">{escape(title)}</text>{"".join(axes.parts)}'
    picture = _svg(WIDTH, BOTTOM + 50, body, f"Learning curves of {len(curves)} runs on {title}")
    return picture + Markup("<p>{}</p>").format(Markup().join(legend))


class Axes:
    """Axes of scores against steps; ``parts`` is all that is drawn on them.

    Args:
        shown: points that must fit.
    """

    def __init__(self, shown: Points, xlabel: str, ylabel: str) -> None:
        self.across = _ticks(0, max((step for step, _ in shown), default=1) or 1)
        self.up = _ticks(*_span([score for _, score in shown]))
        middle = (TOP + BOTTOM) / 2
        self.parts = [
            f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="currentColor"/>',
            f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 40}">{escape(xlabel)}</text>',
            f'<text x="14" y="{middle}" transform="rotate(-90 14 {middle})">{escape(ylabel)}</text>',
        ]
        for step in self.across:
            self.parts.append(f'<path d="M{self.x(step)} {TOP}V{BOTTOM}" stroke="currentColor" opacity="0.15"/>')
            self.parts.append(f'<text x="{self.x(step)}" y="{BOTTOM + 18}">{short(step)}</text>')
        for score in self.up:
            y = self.y(score)
            self.parts.append(f'<path d="M{LEFT} {y}H{RIGHT}" stroke="currentColor" opacity="0.15"/>')
            self.parts.append(f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{short(score)}</text>')

    def x(self, step: float) -> str:
        """Place of a step."""
        return f"{LEFT + (RIGHT - LEFT) * step / self.across[-1]:.1f}"

    def y(self, score: float) -> str:
        """Place of a score."""
        score = min(max(score, -LARGEST), LARGEST)
        return f"{BOTTOM - (BOTTOM - TOP) * (score - self.up[0]) / (self.up[-1] - self.up[0]):.1f}"

    def places(self, points: Points) -> str:
        """Places of those points that are finite."""
        return " ".join(f"{self.x(step)},{self.y(score)}" for step, score in points if isfinite(score))

    def line(self, points: Points, color: str, width: float = 1.6, dash: str = "none") -> None:
        """Draw a line; of one point, which would be invisible, a dot."""
        if len(points) == 1:
            self.dots(points, color)
        look = f'fill="none" stroke="{color}" stroke-width="{width}" stroke-dasharray="{dash}"'
        self.parts.append(f'<polyline points="{self.places(points)}" {look}/>')

    def dots(self, points: Points, color: str) -> None:
        """Draw points."""
        known = [(step, score) for step, score in points if isfinite(score)]
        self.parts += [f'<circle cx="{self.x(at)}" cy="{self.y(score)}" r="3" fill="{color}"/>' for at, score in known]


def _span(values: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest number, apart where they are equal but for rounding."""
    known = [min(max(value, -LARGEST), LARGEST) for value in values if isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    size = max(abs(low), abs(high))
    if high - low > max(1e-9 * size, 1e-300):
        return low, high
    return low - (size if size > 1e-290 else 1.0) / 10, high + (size if size > 1e-290 else 1.0) / 10


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from ``low`` or below to ``high`` or above."""
    size = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(size))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= size)
    return [step * number for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def short(value: float, digits: int = 4) -> str:
    """A number as on axes: 20k, 1.5M."""
    size, suffix = next(((s, n) for s, n in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if s <= abs(value) < 1e12), (1.0, ""))
    return f"{value / size:.{digits}g}{suffix}"


def points(metrics: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """Environment steps and values of a metric."""
    return [(entry.get("env_steps", 0), float(entry[key])) for entry in metrics if key in entry]


def thin(points: Points) -> Points:
    """Every second point, or every third and so on, and the last one: no more than a screen shows."""
    stride = -(-len(points) // MAX_POINTS) or 1
    return [*points[:-1:stride], *points[-1:]]


# Small pictures for rows of a table


def small(series: Sequence[tuple[Sequence[int], Sequence[float]]], label: str) -> Markup:
    """Lines; of the axes only the lowest and the highest value."""
    known = [[(s, v) for s, v in zip(*one, strict=True) if isfinite(v)] for one in series]
    drawn = [point for one in known for point in one]
    if not drawn:
        return _svg(220, 50, "", label)
    (low, high), steps, values = _span([value for _, value in drawn]), [s for s, _ in drawn], [v for _, v in drawn]
    first, width = min(steps), max(steps) - min(steps) or 1
    body = f'<text x="50" y="10">{short(max(values), 3)}</text><text x="50" y="49">{short(min(values), 3)}</text>'
    for one, color in zip(known, (TRAINING, EVALUATION), strict=False):
        places = [(56 + 160 * (s - first) / width, 45 - 40 * (v - low) / (high - low)) for s, v in thin(one)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        body += f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        if len(places) == 1:
            body += f'<circle cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="2" fill="{color}"/>'
    return _svg(220, 50, f'<g font-size="10" text-anchor="end">{body}</g>', label)


def _svg(width: float, height: float, body: str, label: str, look: str = "") -> Markup:
    """A picture with an alternative text."""
    return Markup(  # noqa: S704  drawn here, and words are escaped
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" style="{look}" '
        f'font-family="sans-serif" font-size="13" text-anchor="middle" fill="currentColor" '
        f'aria-label="{escape(label)}">{body}</svg>'
    )
