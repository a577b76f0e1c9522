"""Asynchronous collection at 8, 64 and 1,024 workers, simulated: who waits, and how old completions are.

A worker writes one completion at a time, a batch is one completion for each worker, and the learner takes as long for a
batch as a completion of mean length takes. So without variance, and with one batch in advance, nobody waits. Lengths follow
a gamma distribution with the coefficient of variation on the horizontal axis. Workers go on with the next batch as soon as
they are free, or ("in batches") when the one before is complete.

    python benchmarks/async_simulation.py            # results, figure, and the table of docs/planning.md
    python benchmarks/async_simulation.py --report   # figure and table from the results alone
"""

import argparse
import json
from pathlib import Path

from groupwise.planning.simulation import gamma_lengths, simulate

RESULT = Path(__file__).parent / "results" / "async_simulation.json"
PLOT = Path(__file__).parents[1] / "docs" / "images" / "async_simulation.png"
WORKERS = (8, 64, 1024)
VARIATIONS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
STALENESS = (0, 1, 2, 4, 8)
IN_BATCHES = (1, 8)
"""Simulated with one batch after the other, too. Both are the same within a percent, so the first is shown."""
WAYS = [*((allowed, True) for allowed in STALENESS), *((allowed, False) for allowed in IN_BATCHES)]
SHOWN = WAYS[: len(STALENESS) + 1]
LABELS = [*map(str, STALENESS), " or ".join(map(str, IN_BATCHES)) + ", in batches"]
STEPS = 300
PANELS = {"worker_idle": "workers idle", "learner_idle": "learner idle", "mean_staleness": "staleness (steps)"}


def measure() -> list[dict]:
    points = []
    for workers in WORKERS:
        for variation in VARIATIONS:
            for allowed, streaming in WAYS:
                way = {"max_staleness": allowed, "streaming": streaming}
                sizes = {"workers": workers, "batch": workers, "steps": STEPS, "learner_seconds": 1.0}
                found = simulate(gamma_lengths(variation), **sizes, **way)
                names = ("seconds", "worker_idle", "learner_idle", "mean_staleness", "staleness")
                values = {name: getattr(found, name) for name in names}
                points.append({"workers": workers, "variation": variation, **way, **values})
    return points


def draw(points: list[dict], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(PANELS), len(WORKERS), figsize=(9, 7), sharex=True, sharey="row")
    for row, (name, title) in zip(axes, PANELS.items(), strict=True):
        for axis, workers in zip(row, WORKERS, strict=True):
            for way, label in zip(SHOWN, LABELS, strict=True):
                if name == "mean_staleness" and not way[1]:
                    continue
                own = [p for p in points if (p["workers"], p["max_staleness"], p["streaming"]) == (workers, *way)]
                color = pyplot.cm.viridis(STALENESS.index(way[0]) / len(STALENESS))
                x, y = [p["variation"] for p in own], [p[name] for p in own]
                axis.plot(x, y, "-" if way[1] else ":", marker="o", markersize=3, color=color, label=label)
            axis.grid(alpha=0.3)
            if name != "mean_staleness":
                axis.set_ylim(0, 1)
                axis.yaxis.set_major_formatter("{x:.0%}")
        row[0].set_ylabel(title)
    for axis, workers in zip(axes[0], WORKERS, strict=True):
        axis.set_title(f"{workers:,} workers")
    for axis in axes[-1]:
        axis.set_xlabel("variation of lengths")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), title="max_staleness", loc="upper center", ncols=len(SHOWN))
    figure.tight_layout(rect=(0, 0, 1, 0.91))
    figure.savefig(path, dpi=110)


def table(points: list[dict]) -> str:
    lines = ["| workers | variation | " + " | ".join(LABELS) + " |", "|---" * (2 + len(LABELS)) + "|"]
    for workers in WORKERS:
        for variation in (0.0, 0.5, 1.0, 2.0):
            found = [p for p in points if (p["workers"], p["variation"]) == (workers, variation)]
            own = [p for p in found if (p["max_staleness"], p["streaming"]) in SHOWN]
            idle = [f"{p['worker_idle']:.0%} / {p['learner_idle']:.0%}" for p in own]
            cells = [
                f"{i} / {p['mean_staleness']:.1f}" if p["streaming"] else i for i, p in zip(idle, own, strict=True)
            ]
            lines.append(f"| {workers:,} | {variation:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report", action="store_true")
    if not parser.parse_args().report:
        RESULT.write_text(json.dumps(measure()) + "\n")
    points = json.loads(RESULT.read_text())
    draw(points, PLOT)
    print(table(points))


if __name__ == "__main__":
    main()
