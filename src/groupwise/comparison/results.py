"""Methods compared by their runs: per environment, and over all of them on a common scale. Plain data in, plain data out.

Knows no run folder: ``RunRecord`` is all it needs of a run, wherever that was recorded.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from groupwise.comparison import aggregates
from groupwise.comparison.aggregates import Band, Estimate, Number
from groupwise.errors import ConfigError, DataError, nearest

Measure = Literal["evaluation", "training"]
"""Returns of evaluations, or of training's own episodes."""


Reference = Mapping[str, tuple[Number, Number] | Sequence[Number]]
"""Environment -> the two scores that count as 0 and 1."""


ENOUGH_RUNS = 5
"""From so many runs on an interval tells something: of three that all end above three others, a bootstrap knows no doubt."""


class RunRecord(NamedTuple):
    """What one run reached, wherever it was recorded."""

    environment: str
    method: str
    seed: int
    env_steps: tuple[Number, ...]
    """When the return was measured, rising."""
    returns: tuple[Number, ...]
    """Mean return each time; the last one is the run's score."""
    measure: Measure = "evaluation"
    unit: str = "environment steps"
    """Of ``env_steps``: what a step is."""
    seconds: float | None = None
    """Of training."""
    memory_mib: float | None = None
    """At its peak."""
    source: str = ""
    """Where it was recorded."""


@dataclass(frozen=True)
class Curve:
    """Return against environment steps: interquartile mean over runs, and a 95 % interval at each point."""

    env_steps: tuple[float, ...]
    iqm: tuple[float, ...]
    low: tuple[float, ...] | None
    high: tuple[float, ...] | None


@dataclass(frozen=True)
class MethodResult:
    """What the runs of a method reached in one environment."""

    method: str
    seeds: tuple[int, ...]
    scores: tuple[float, ...]
    """Last measured return of each seed."""
    iqm: Estimate
    """Of the scores."""
    mean: float
    least: float
    mean_height: Estimate
    """Interquartile mean of the area under each run's curve, divided by its width: high for who learns early."""
    curve: Curve
    env_steps: float
    """Median over runs, as the next two. Training ends with the iteration that reaches ``total_steps``."""
    seconds: float | None
    memory_mib: float | None
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Improvement:
    """Probability that a run of ``method`` scores more than one of ``other``; ties count one half."""

    method: str
    other: str
    probability: Estimate


@dataclass(frozen=True)
class EnvironmentResult:
    """Methods in one environment."""

    environment: str
    measure: Measure
    unit: str
    """What a step is."""
    methods: tuple[MethodResult, ...]
    improvements: tuple[Improvement, ...]
    """Each pair of methods once."""
    settings: dict[str, dict[str, Any]]
    """What differs between methods that have it: setting -> method -> value."""


@dataclass(frozen=True)
class OverallMethod:
    """What a method reached over all environments, on the scale where the references are 0 and 1."""

    method: str
    iqm: Estimate
    mean: float
    """Of the environments' means."""


@dataclass(frozen=True)
class Overall:
    """Methods that ran in all environments, which count alike."""

    reference: dict[str, tuple[float, float]]
    """Environment -> scores that are 0 and 1."""
    methods: tuple[OverallMethod, ...]
    improvements: tuple[Improvement, ...]


@dataclass(frozen=True, repr=False)
class Comparison:
    """Methods compared by their runs."""

    environments: tuple[EnvironmentResult, ...]
    overall: Overall | None
    """None unless reference scores were given."""
    notes: tuple[str, ...]
    """What a reader has to know besides the numbers."""

    def __repr__(self) -> str:
        """Interquartile means; the curves would be pages."""
        lines = [
            f"{found.environment}: {', '.join(f'{m.method} {shown(m.iqm)} ({len(m.seeds)} runs)' for m in found.methods)}"
            for found in self.environments
        ]
        return f"Comparison({'; '.join(lines)})"

    def report(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)

    def save(self, folder: Path | str) -> None:
        """Write ``comparison.json`` and ``comparison.png`` into a folder, which is made if need be."""
        from groupwise.comparison.plot import plot_comparison

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.report(), indent=1, allow_nan=False)
        (folder / "comparison.json").write_text(text + "\n", encoding="utf-8")
        plot_comparison(self, folder / "comparison.png")


Settings = Mapping[str, dict[str, dict[str, Any]]]
"""Environment -> setting -> method -> value."""


def compare_records(
    records: Sequence[RunRecord],
    reference: Reference | None = None,
    *,
    settings: Settings | None = None,
    notes: Sequence[str] = (),
) -> Comparison:
    """Runs of one or several methods, compared in each environment; methods and environments in the order of the records.

    Args:
        reference: for each environment the scores that count as 0 and 1, such as a random policy's and a solved task's;
            None: no comparison over environments.
        settings: in which settings methods differ.
        notes: kept with the comparison.

    Raises:
        DataError: no records, a seed of a method twice, or returns that are missing, not finite or of two measures.
        ConfigError: reference scores that are missing or equal, or no method that ran in every environment.
    """
    if not records:
        raise DataError("no runs to compare; fix: give at least one")
    cells: dict[str, dict[str, list[RunRecord]]] = {}
    for record in records:
        cells.setdefault(record.environment, {}).setdefault(record.method, []).append(record)
    found = tuple(_in_environment(name, methods, (settings or {}).get(name, {})) for name, methods in cells.items())
    said = [*notes, *_notes(found)]
    overall = None
    if reference is not None:
        overall = _over_environments(found, reference)
        left = sorted({m.method for one in found for m in one.methods} - {m.method for m in overall.methods})
        said += [f"over all environments without {', '.join(left)}: no runs in some of them"] if left else []
    return Comparison(found, overall, tuple(said))


def shown(found: Estimate) -> str:
    """An estimate as tables and lines show it."""
    ends = "" if found.interval is None else f" [{figure(found.interval[0])}, {figure(found.interval[1])}]"
    return figure(found.value) + ends


def figure(value: Number) -> str:
    """A number in four digits, and all of them before the point."""
    if value == 0 or not 1e-3 <= abs(value) < 1e15:
        return f"{value:.4g}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def _in_environment(
    environment: str, methods: Mapping[str, list[RunRecord]], settings: dict[str, dict[str, Any]]
) -> EnvironmentResult:
    runs = [run for many in methods.values() for run in many]
    for run in runs:
        _check(run)
    measures = {run.measure for run in runs}
    if len(measures) > 1:
        raise DataError(f"{environment}: returns of evaluations and of training; fix: all of one kind")
    grid = aggregates.common_grid([run.env_steps for run in runs])
    results = tuple(_of_method(name, many, grid) for name, many in methods.items())
    scores = {result.method: [np.array(result.scores)] for result in results}
    return EnvironmentResult(environment, measures.pop(), runs[0].unit, results, _improvements(scores), settings)


def _check(run: RunRecord) -> None:
    where = f"{run.environment}, {run.method}, seed {run.seed}{f' ({run.source})' if run.source else ''}"
    if not run.returns or len(run.returns) != len(run.env_steps):
        raise DataError(
            f"{where}: {len(run.returns)} returns at {len(run.env_steps)} steps; expected as many, at least 1"
        )
    if not np.isfinite(run.returns).all():
        raise DataError(f"{where}: a return is not finite; fix: leave the run out, or train it again")
    if (np.diff(run.env_steps) < 0).any():
        raise DataError(f"{where}: env_steps fall; expected the order of training")


def _of_method(method: str, runs: list[RunRecord], grid: aggregates.Array) -> MethodResult:
    seeds = tuple(run.seed for run in runs)
    if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        where = ", ".join(run.source or "?" for run in runs if run.seed == twice[0])
        raise DataError(
            f"{runs[0].environment}, {method}: seed {twice[0]} came more than once ({where}), and a copy is no evidence; "
            "fix: leave one out, or give each its name"
        )
    scores = np.array([run.returns[-1] for run in runs], dtype=np.float64)
    curves = np.stack([aggregates.on_grid(grid, run.env_steps, run.returns) for run in runs], axis=1)
    return MethodResult(
        method,
        seeds,
        tuple(scores.tolist()),
        aggregates.estimate(aggregates.iqm, [scores]),
        float(scores.mean()),
        float(scores.min()),
        aggregates.estimate(aggregates.iqm, [aggregates.mean_height(grid, curves)]),
        _curve(grid, aggregates.band(curves)),
        float(np.median([run.env_steps[-1] for run in runs])),
        _median([run.seconds for run in runs]),
        _median([run.memory_mib for run in runs]),
        tuple(run.source for run in runs),
    )


def _curve(grid: aggregates.Array, found: Band) -> Curve:
    return Curve(tuple(grid.tolist()), *found)


def _median(numbers: Sequence[Number | None]) -> float | None:
    """None unless every run has the number."""
    known = [number for number in numbers if number is not None]
    return float(np.median(known)) if len(known) == len(numbers) else None


def _improvements(scores: Mapping[str, list[aggregates.Array]]) -> tuple[Improvement, ...]:
    """Of each pair of methods, whose scores are by environment."""
    compare = aggregates.probability_of_improvement
    return tuple(
        Improvement(one, other, aggregates.estimate(compare, [*scores[one], *scores[other]]))
        for one, other in combinations(scores, 2)
    )


def _over_environments(found: Sequence[EnvironmentResult], reference: Reference) -> Overall:
    names = [one.environment for one in found]
    for name in names:
        if name not in reference:
            raise ConfigError(
                f"no reference scores of {name}{nearest(name, reference)}; fix: {{{name!r}: [0 is here, 1 is here], ...}}"
            )
        if len(set(reference[name])) != 2 or len(reference[name]) != 2:
            raise ConfigError(f"reference scores of {name} are {list(reference[name])}: expected two different ones")
    by_method: dict[str, list[aggregates.Array]] = {}
    for one in found:
        for result in one.methods:
            scores = aggregates.normalized(np.array(result.scores), *reference[one.environment])
            by_method.setdefault(result.method, []).append(scores)
    everywhere = {method: scores for method, scores in by_method.items() if len(scores) == len(names)}
    if not everywhere:
        raise ConfigError(
            f"no method has runs in all of {', '.join(names)}; fix: compare without reference scores, or name methods alike"
        )
    methods = tuple(
        OverallMethod(
            method, aggregates.estimate(aggregates.iqm, scores), float(np.mean([each.mean() for each in scores]))
        )
        for method, scores in everywhere.items()
    )
    used = {name: (float(reference[name][0]), float(reference[name][1])) for name in names}
    return Overall(used, methods, _improvements(everywhere))


def _weakness(found: EnvironmentResult) -> list[str]:
    """What is said of methods with too few runs."""
    lone = [result.method for result in found.methods if len(result.seeds) == 1]
    few = [result.method for result in found.methods if 1 < len(result.seeds) < ENOUGH_RUNS]
    alone = f"{found.environment}: one run of {', '.join(lone)}, which gives no interval; fix: more seeds"
    whose = "each method" if len(few) == len(found.methods) else ", ".join(few)
    narrow = f"{found.environment}: fewer than {ENOUGH_RUNS} runs of {whose}, too few to rely on an interval; fix: more seeds"
    return [alone] * bool(lone) + [narrow] * bool(few)


def _notes(found: Sequence[EnvironmentResult]) -> list[str]:
    notes = []
    for one in found:
        if one.measure == "training":
            notes.append(
                f"{one.environment}: not every run was evaluated; returns are those of training's own episodes"
            )
        notes += _weakness(one)
        steps = [result.env_steps for result in one.methods]
        if max(steps) > 1.05 * min(steps):
            notes.append(
                f"{one.environment}: methods took {min(steps):,.0f} to {max(steps):,.0f} steps, as the last iteration is finished; "
                "curves end where the shortest run does"
            )
    return notes
