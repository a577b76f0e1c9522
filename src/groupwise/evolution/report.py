"""A population as a table and a picture."""

import math
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from groupwise.config.evolution import RangeCfg
from groupwise.evolution.population import Population
from groupwise.report.curve import save_figure
from groupwise.system import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable


def write_report(population: Population) -> None:
    """Write ``lineage.png`` and ``population.parquet``."""
    import pyarrow
    import pyarrow.parquet
    from matplotlib.figure import Figure

    table, picture = population.path / "population.parquet", population.path / "lineage.png"
    data = BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(population.rows())), data)
    with files.warning_if_unwritable(table):
        files.write(table, data.getvalue())

    settings = list(population.cfg.search)
    figure = Figure(figsize=(9, 3.4 + 2.2 * len(settings)), dpi=130, layout="constrained")
    first, *others = figure.subplots(
        1 + len(settings), sharex=True, squeeze=False, height_ratios=[1.5] + [1] * len(settings)
    ).flat
    colors = _colors(population)
    _draw_lineage(first, population, colors)
    for axes, path in zip(others, settings, strict=True):
        _draw_setting(axes, population, path, colors)
    others[-1].set_xlabel("round")
    figure.align_ylabels()
    figure.colorbar(
        colors, ax=[first, *others], label=f"fitness ({population.cfg.fitness.replace('_', ' ')})", shrink=0.6
    )
    with files.warning_if_unwritable(picture):
        save_figure(figure, picture)


def _colors(population: Population) -> "ScalarMappable":
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    found = [
        score
        for member in population.members.values()
        for number in member.results
        if math.isfinite(score := population.fitness(member, number))
    ]
    return ScalarMappable(Normalize(min(found), max(found)), "viridis")


def _look(colors: "ScalarMappable", fitness: float) -> dict[str, Any]:
    """Colour by fitness; a red cross where the member diverged."""
    if math.isfinite(fitness):
        return {"color": colors.to_rgba(np.array([fitness]))[0], "marker": "o"}
    return {"color": "#d55e00", "marker": "x"}


def _draw_lineage(axes: "Axes", population: Population, colors: "ScalarMappable") -> None:
    """A column for each round, the best on top; lines lead from each member to itself and its clones in the next round."""
    places = {
        (number, member.name): -rank
        for number in range(population.round)
        for rank, member in enumerate(population.ranked(number))
    }
    for (number, name), place in places.items():
        member = population.members[name]
        before = name if (number - 1, name) in places else member.parent or ""
        if (number - 1, before) in places:
            look = "-" if before == name else ":"
            axes.plot(
                (number, number + 1), (places[number - 1, before], place), look, color="#949494", linewidth=1, zorder=1
            )
        axes.scatter(number + 1, place, s=70, zorder=2, **_look(colors, population.fitness(member, number)))
    axes.set(ylabel="rank", title="Who descends from whom (dotted: a mutated clone; x: diverged)")
    axes.set_yticks([])
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_setting(axes: "Axes", population: Population, path: str, colors: "ScalarMappable") -> None:
    """The values of a setting over the rounds, the best members in front."""
    from matplotlib.ticker import MaxNLocator

    space = population.cfg.search[path]
    for number in range(population.round):
        for member in reversed(population.ranked(number)):
            value = member.settings[path]
            height: Any = value if isinstance(space, RangeCfg) else space.index(value)
            axes.scatter(number + 1, height, s=28, **_look(colors, population.fitness(member, number)))
    if not isinstance(space, RangeCfg):
        axes.set_yticks(range(len(space)), list(map(str, space)))
    elif space.log:
        axes.set_yscale("log")
    axes.set_ylabel(path.removeprefix("algorithm."))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
