"""A comparison as a picture: curves with bands, and intervals of the final scores, a row per environment."""

from collections.abc import Iterator, Sequence
from itertools import cycle, product
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from groupwise import system as files
from groupwise.comparison.compare import (
    Comparison,
    EnvironmentResult,
    Estimate,
    Improvement,
    MethodResult,
    Overall,
    figure,
    setting,
    shown,
)
from groupwise.report.curve import against_steps, save_figure, svg
from groupwise.report.page import style, templates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLORS = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9")
"""Seaborn's palette ``colorblind``."""
STYLES = ("-", "--", ":")
"""Line styles of the first, second and third ten methods."""
NAME_WIDTH = 40
"""Characters of a method's name in a line."""


def plot_comparison(found: Comparison, path: Path) -> None:
    """Writes a PNG: for each environment score against steps, and where each method ended."""
    save_figure(comparison_figure(found), path)


def comparison_figure(found: Comparison) -> "Figure":
    """The figure of ``plot_comparison``."""
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(result.method for one in found.environments for result in one.methods))
    styles = cycle(product(STYLES, COLORS))
    looks = {name: {"color": color, "linestyle": style} for name, (style, color) in zip(methods, styles, strict=False)}
    rows = len(found.environments) + (found.overall is not None)
    height = max(2.9, 1.4 + 0.34 * len(methods)) * rows
    figure = Figure(figsize=(11, height + 0.3), dpi=130, layout="constrained")
    grid = figure.add_gridspec(rows, 2, width_ratios=(3, 2))
    for row, one in enumerate(found.environments):
        _curves(figure.add_subplot(grid[row, 0]), one, looks)
        ends = {result.method: result.iqm for result in one.methods}
        each = {result.method: result.scores for result in one.methods}
        _intervals(figure.add_subplot(grid[row, 1]), ends, each, looks, f"final {one.score}")
    if found.overall is not None:
        ends = {method.method: method.iqm for method in found.overall.methods}
        title = "all environments, normalised final scores"
        _intervals(figure.add_subplot(grid[rows - 1, :]), ends, {}, looks, title)
    return figure


def _curves(axes: "Axes", found: EnvironmentResult, looks: dict[str, dict[str, Any]]) -> None:
    for result in found.methods:
        curve, look = result.curve, looks[result.method]
        marker = "o" if len(curve.env_steps) == 1 else None  # a line of one point would be invisible
        axes.plot(
            curve.env_steps, curve.iqm, linewidth=1.6, marker=marker, label=fill(result.method, NAME_WIDTH), **look
        )
        if curve.low is not None and curve.high is not None:
            axes.fill_between(curve.env_steps, curve.low, curve.high, color=look["color"], alpha=0.18, linewidth=0)
            if marker:
                axes.vlines(curve.env_steps, curve.low, curve.high, color=look["color"], linewidth=1)
    axes.set(title=found.environment, xlabel=found.unit, ylabel=f"{found.score}, IQM of runs")
    against_steps(axes)
    axes.legend(frameon=False, loc="best", fontsize="small")


def _intervals(
    axes: "Axes",
    ends: dict[str, Estimate],
    scores: dict[str, tuple[float, ...]],
    looks: dict[str, dict[str, Any]],
    title: str,
) -> None:
    """A line per method, the first on top: its interval as a bar, the interquartile mean in it, each run as a dot."""
    for place, (method, end) in enumerate(ends.items()):
        color = looks[method]["color"]
        if end.interval is not None:
            low, high = end.interval
            axes.barh(place, high - low, left=low, height=0.5, color=color, alpha=0.35)
        axes.plot([end.value] * 2, [place - 0.25, place + 0.25], color=color, linewidth=2.5)
        dots = scores.get(method, ())
        axes.plot(dots, [place] * len(dots), "o", color=color, markersize=3.5, markeredgewidth=0, alpha=0.7)
    axes.set_yticks(range(len(ends)), [fill(method, NAME_WIDTH) for method in ends], fontsize="small")
    axes.set_ylim(len(ends) - 0.4, -0.6)
    axes.use_sticky_edges = False  # bars would begin at the frame
    axes.margins(x=0.05)
    axes.set(title=title, xlabel="IQM and 95 % interval" + ("; dots are runs" if scores else ""))
    axes.grid(alpha=0.3, axis="x")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


# A comparison as tables of texts, for the terminal and the page.


class Table(NamedTuple):
    """Rows of texts."""

    title: str
    """Empty where the table belongs to the one before."""
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(found: Comparison) -> Iterator[Table]:
    """Of each environment its methods, its improvements and what differs in the settings; then all environments together."""
    for one in found.environments:
        heads = (
            "method",
            "runs",
            f"final {one.score}, IQM",
            "mean",
            "least",
            "mean over training",
            one.unit,
            "seconds",
            "MiB",
        )
        yield Table(one.environment, heads, tuple(map(_row, one.methods)))
        yield from _improvements(one.improvements)
        yield from _settings(one)
    if found.overall is not None:
        yield from _overall(found.overall)


def _row(result: MethodResult) -> tuple[str, ...]:
    return (
        result.method,
        str(len(result.seeds)),
        shown(result.iqm),
        figure(result.mean),
        figure(result.least),
        shown(result.mean_height),
        f"{result.env_steps:,.0f}",
        "-" if result.seconds is None else f"{result.seconds:.1f}",
        "-" if result.memory_mib is None else f"{result.memory_mib:.0f}",
    )


def _settings(found: EnvironmentResult) -> Iterator[Table]:
    methods = tuple(result.method for result in found.methods)
    rows = tuple(
        (name, *(setting(values[method]) if method in values else "-" for method in methods))
        for name, values in found.settings.items()
    )
    if rows:
        yield Table("", ("setting", *methods), rows)


def _overall(found: Overall) -> Iterator[Table]:
    rows = tuple((method.method, shown(method.iqm), figure(method.mean)) for method in found.methods)
    yield Table(f"all environments, normalised: {', '.join(found.reference)}", ("method", "IQM", "mean"), rows)
    yield from _improvements(found.improvements)


def _improvements(pairs: Sequence[Improvement]) -> Iterator[Table]:
    rows = tuple((f"{pair.method} > {pair.other}", shown(pair.probability, "{:.2f}".format)) for pair in pairs)
    if rows:
        yield Table("", ("probability that a run is better", "P"), rows)


# A comparison as one file of HTML that needs no network and no scripts.


def write_page(found: Comparison, out: Path) -> None:
    """Write curves, intervals, tables and notes to ``out``."""
    names = ", ".join(one.environment for one in found.environments)
    picture = svg(lambda: comparison_figure(found), f"Curves and final scores of the methods on {names}", "comparison")
    page = templates(__package__).get_template("comparison.html")
    text = page.render(names=names, picture=picture, tables=[*tables(found)], notes=found.notes, style=style())
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write(out, text.encode())
