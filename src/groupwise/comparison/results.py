"""Methods compared by the scores of their runs: statistics, tables and a page. Imports no torch."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from groupwise import system as files
from groupwise.config.run import EvaluationMetric
from groupwise.errors import ConfigError, DataError, nearest
from groupwise.report.curve import overlay

# Statistics over several runs: interquartile mean, probability of improvement, bootstrap intervals, curves

Array = NDArray[np.float64]
Number = int | float
Statistic = Callable[..., Array]
"""Arrays with the runs on the last axis, one per stratum -> a number for everything before that axis."""

RESAMPLES = 10_000
"""Resamples for the interval of a score: its ends vary by about a hundredth of its width."""
CURVE_RESAMPLES = 2_000
"""Resamples for the interval at each point of a curve."""
SEED = 0
"""Seed of the bootstrap: the same runs give the same interval."""
GRID = 101
"""Points of a curve."""


@dataclass(frozen=True)
class Estimate:
    """A statistic over runs."""

    value: float
    interval: tuple[float, float] | None
    """95 % bootstrap interval; None if an environment has one run only."""


@dataclass(frozen=True)
class Curve:
    """Return against environment steps: interquartile mean over runs, and a 95 % interval at each point."""

    env_steps: tuple[float, ...]
    iqm: tuple[float, ...]
    low: tuple[float, ...] | None
    """Lower ends of the intervals; None with one run only."""
    high: tuple[float, ...] | None


def iqm(*strata: Array) -> Array:
    """Interquartile mean: the mean of the middle half of all runs of all environments.

    A quarter at each end, rounded down to whole runs, is left out, so up to three runs are all used.

    Args:
        strata: scores [..., run], one array per environment, all on one scale.
    """
    pooled = np.sort(np.concatenate(strata, axis=-1), axis=-1)
    count = pooled.shape[-1]
    return np.asarray(pooled[..., count // 4 : count - count // 4].mean(axis=-1))


def probability_of_improvement(*strata: Array) -> Array:
    """Probability that a run of one method scores more than one of the other; ties count one half.

    P(X > Y) = U / (n m) with the statistic U of Mann and Whitney, averaged over the environments.

    Args:
        strata: the scores [..., run] of X in each environment, followed by those of Y in the same order.
    """
    half = len(strata) // 2
    signs = []
    for x, y in zip(
        strata[:half], strata[half:], strict=True
    ):  # run by run, as all pairs of all resamples may take gigabytes
        total = sum(np.sign(x[..., run, None] - y).sum(axis=-1) for run in range(x.shape[-1]))
        signs.append(total / (x.shape[-1] * y.shape[-1]))
    return np.asarray((np.mean(signs, axis=0) + 1) / 2)


def estimate(statistic: Statistic, strata: Sequence[Array], resamples: int = RESAMPLES) -> Estimate:
    """A statistic of scores with its interval.

    Args:
        strata: as ``statistic`` takes them, [run] each.
    """
    ends = bootstrap_interval(statistic, strata, resamples)
    return Estimate(float(statistic(*strata)), None if ends is None else (float(ends[0]), float(ends[1])))


def curve(grid: Array, returns: Array) -> Curve:
    """The interquartile mean of ``returns`` [point, run] at each point of ``grid``; whole runs are resampled."""
    ends = bootstrap_interval(iqm, [returns], CURVE_RESAMPLES)
    low, high = (None, None) if ends is None else (tuple(end.tolist()) for end in ends)
    return Curve(tuple(grid.tolist()), tuple(iqm(returns).tolist()), low, high)


def bootstrap_interval(
    statistic: Statistic, strata: Sequence[Array], resamples: int = RESAMPLES
) -> tuple[Array, Array] | None:
    """95 % interval by the stratified percentile bootstrap; None if a stratum has one run only.

    Args:
        strata: scores [..., run]; the same runs are drawn for everything before the last axis.
    """
    if min(scores.shape[-1] for scores in strata) < 2:
        return None
    rng = np.random.default_rng(SEED)
    drawn = [rng.choice(scores, (resamples, scores.shape[-1]), axis=-1) for scores in strata]
    low, high = np.quantile(statistic(*drawn), (0.025, 0.975), axis=-1)
    return np.asarray(low), np.asarray(high)


def common_grid(steps: Sequence[Sequence[Number]]) -> Array:
    """Evenly spaced steps over the range in which all of these curves have points; one point if there is none."""
    end = min(points[-1] for points in steps)
    start = min(max(points[0] for points in steps), end)
    return np.unique(np.linspace(start, end, GRID))


def mean_height(grid: Array, returns: Array) -> Array:
    """Area under curves [point, run] divided by its width, [run]: the average return over training."""
    if len(grid) == 1:
        return np.asarray(returns[0])
    trapezoids = (returns[1:] + returns[:-1]) / 2 * np.diff(grid)[:, None]
    return np.asarray(trapezoids.sum(axis=0) / (grid[-1] - grid[0]))


# Comparison of methods: per environment, and over all environments on a common scale

Measure = Literal["evaluation", "training"]
"""Returns of evaluations, or of training episodes."""

Reference = Mapping[str, tuple[Number, Number] | Sequence[Number]]
"""Environment -> the two scores that count as 0 and 1."""

ENOUGH_RUNS = 5
"""Least number of runs for bootstrap intervals; with fewer they are too narrow."""


class RunRecord(NamedTuple):
    """The results of one run."""

    environment: str
    method: str
    seed: int
    env_steps: tuple[Number, ...]
    """Steps at which the return was measured, rising."""
    returns: tuple[Number, ...]
    """Mean return, or success rate, at each of them; the last one is the run's score. Arrays serve, too."""
    measure: Measure = "evaluation"
    unit: str = "environment steps"
    """Unit of the steps."""
    seconds: float | None = None
    """Duration of training."""
    memory_mib: float | None = None
    """Peak memory."""
    source: str = ""
    """Location of the run, for messages."""
    metric: EvaluationMetric = "return"
    """Kind of the ``returns``."""


@dataclass(frozen=True)
class MethodResult:
    """Results of a method in one environment."""

    method: str
    seeds: tuple[int, ...]
    scores: tuple[float, ...]
    """Final return of each seed."""
    iqm: Estimate
    """Interquartile mean of the scores."""
    mean: float
    least: float
    mean_height: Estimate
    """Interquartile mean of the area under each run's curve, divided by its width."""
    curve: Curve
    env_steps: float
    """Median over runs, as the next two."""
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
    """Unit of the steps."""
    methods: tuple[MethodResult, ...]
    improvements: tuple[Improvement, ...]
    """Each pair of methods once."""
    settings: dict[str, dict[str, Any]]
    """Settings that differ: setting -> method -> value."""
    metric: EvaluationMetric
    """The score."""

    @property
    def score(self) -> str:
        """The score in words, such as ``training return`` where some runs were never evaluated."""
        return ("training " if self.measure == "training" else "") + self.metric.replace("_", " ")


@dataclass(frozen=True)
class OverallMethod:
    """Results of a method over all environments, normalised by the reference scores."""

    method: str
    iqm: Estimate
    mean: float
    """Mean of the environments' means."""


@dataclass(frozen=True)
class Overall:
    """Methods that ran in all environments."""

    reference: dict[str, tuple[float, float]]
    """Environment -> scores that are 0 and 1."""
    methods: tuple[OverallMethod, ...]
    improvements: tuple[Improvement, ...]


@dataclass(frozen=True, repr=False)
class Comparison:
    """Methods compared by their runs."""

    environments: tuple[EnvironmentResult, ...]
    overall: Overall | None
    """Scores over all environments; None without reference scores."""
    notes: tuple[str, ...]
    """Warnings about weak points of the comparison."""

    def __repr__(self) -> str:
        """Interquartile means."""
        lines = [
            f"{found.environment}: {', '.join(f'{m.method} {shown(m.iqm)} ({len(m.seeds)} runs)' for m in found.methods)}"
            for found in self.environments
        ]
        return f"Comparison({'; '.join(lines)})"

    def report(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)

    def save(self, folder: Path | str) -> None:
        """Write ``comparison.json``, and the page ``comparison.html``: one file, without network and scripts."""
        from groupwise.report.page import style, templates  # it draws pages of runs, and takes long to import

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.report(), indent=1, allow_nan=False)
        files.write(folder / "comparison.json", f"{text}\n".encode())
        pictures = []
        for one in self.environments:
            curves = {}
            for method in one.methods:
                steps, low, high = method.curve.env_steps, method.curve.low or (), method.curve.high or ()
                outline = [*zip(steps, low, strict=False), *reversed([*zip(steps, high, strict=False)])]
                curves[method.method] = [*zip(steps, method.curve.iqm, strict=True)], (), outline
            pictures.append(overlay(curves, one.environment, one.unit, f"{one.score}, IQM of runs"))
        names = ", ".join(one.environment for one in self.environments)
        page = templates(__package__).get_template("comparison.html")
        shown = page.render(names=names, pictures=pictures, tables=[*tables(self)], notes=self.notes, style=style())
        files.write(folder / "comparison.html", shown.encode())


def compare_records(
    records: Sequence[RunRecord],
    reference: Reference | None = None,
    *,
    settings: Mapping[str, dict[str, dict[str, Any]]] | None = None,
    notes: Sequence[str] = (),
) -> Comparison:
    """Comparison of runs of one or several methods, in each environment.

    Args:
        reference: for each environment the scores that count as 0 and 1, such as a random policy's and a solved task's.
            Without it environments are not pooled.
        settings: environment -> setting -> method -> value, where methods differ; kept with the comparison.
        notes: warnings that are kept with the comparison.

    Raises:
        DataError: no records, a seed of a method twice, or returns that are missing, not finite or of two measures.
        ConfigError: reference scores that are missing or equal, or no method that ran in every environment.
    """
    if not records:
        raise DataError("no runs to compare; fix: give at least one")
    cells: dict[str, dict[str, list[RunRecord]]] = {}
    for record in map(_checked, records):
        cells.setdefault(record.environment, {}).setdefault(record.method, []).append(record)
    found, all_notes = [], [*notes]
    for name, methods in cells.items():
        runs = [run for many in methods.values() for run in many]
        if len({run.metric for run in runs}) > 1 or len({run.measure for run in runs}) > 1:
            raise DataError(f"{name}: returns of evaluations and of training, or success rates; fix: all of one kind")
        grid = common_grid([run.env_steps for run in runs])
        results = tuple(_of_method(method, many, grid) for method, many in methods.items())
        improvements = _improvements({result.method: [np.array(result.scores)] for result in results})
        kind, differing = runs[0], (settings or {}).get(name, {})
        found.append(EnvironmentResult(name, kind.measure, kind.unit, results, improvements, differing, kind.metric))
        if kind.measure == "training":
            all_notes.append(f"{name}: not every run was evaluated; scores are those of training episodes")
        if few := ", ".join(result.method for result in results if len(result.seeds) < ENOUGH_RUNS):
            all_notes.append(f"{name}: fewer than {ENOUGH_RUNS} runs of {few}, too few for intervals; fix: more seeds")
        begins = [run.env_steps[0] for run in runs]
        if max(begins) - min(begins) > 0.25 * (grid[-1] - min(begins)):
            last = runs[begins.index(max(begins))]
            all_notes.append(
                f"{name}: curves and means over training begin at step {max(begins):,}, with the first score of {last.method}, "
                f"seed {last.seed}"
            )
        steps = [result.env_steps for result in results]
        if max(steps) > 1.05 * min(steps):
            all_notes.append(
                f"{name}: methods took {min(steps):,.0f} to {max(steps):,.0f} steps; curves end with the shortest run"
            )
    overall = None
    if reference is not None:
        overall = _over_environments(found, reference)
        left = sorted({m.method for one in found for m in one.methods} - {m.method for m in overall.methods})
        if left:
            all_notes.append(f"over all environments without {', '.join(left)}: no runs in some of them")
    return Comparison(tuple(found), overall, tuple(all_notes))


def figure(value: Number) -> str:
    """A number with at least four digits."""
    if value == 0 or not 1e-3 <= abs(value) < 1e15:
        return f"{value:.4g}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def shown(found: Estimate, number: Callable[[Number], str] = figure) -> str:
    """An estimate as text."""
    ends = "" if found.interval is None else f" [{', '.join(map(number, found.interval))}]"
    return number(found.value) + ends


def _checked(record: RunRecord) -> RunRecord:
    """The record, with tuples where other libraries have arrays; a ``DataError`` if it does not serve."""
    steps, returns = (tuple(np.ravel(numbers).tolist()) for numbers in (record.env_steps, record.returns))
    run = record._replace(env_steps=steps, returns=returns)
    where = f"{run.environment}, {run.method}, seed {run.seed}{f' ({run.source})' if run.source else ''}"
    if not run.returns or len(run.returns) != len(run.env_steps):
        raise DataError(f"{where}: {len(run.returns)} returns at {len(run.env_steps)} steps; expected one at each")
    if not np.isfinite(run.returns).all():
        raise DataError(f"{where}: a return is not finite; fix: leave the run out, or train it again")
    if (np.diff(run.env_steps) < 0).any():
        raise DataError(f"{where}: env_steps fall; expected the order of training")
    return run


def _of_method(method: str, runs: list[RunRecord], grid: Array) -> MethodResult:
    seeds = tuple(run.seed for run in runs)
    if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        where = ", ".join(run.source or "?" for run in runs if run.seed == twice[0])
        raise DataError(
            f"{runs[0].environment}, {method}: seed {twice[0]} came more than once ({where}), so the runs are not "
            "independent; fix: leave one out, or name them as two methods"
        )
    scores = np.array([run.returns[-1] for run in runs], dtype=np.float64)

    def median(numbers: Sequence[Number | None]) -> float | None:
        return None if None in numbers else float(np.median(np.array(numbers, np.float64)))

    returns = np.stack([np.interp(grid, run.env_steps, run.returns) for run in runs], axis=1)
    return MethodResult(
        method,
        seeds,
        tuple(scores.tolist()),
        iqm=estimate(iqm, [scores]),
        mean=float(scores.mean()),
        least=float(scores.min()),
        mean_height=estimate(iqm, [mean_height(grid, returns)]),
        curve=curve(grid, returns),
        env_steps=float(np.median([run.env_steps[-1] for run in runs])),
        seconds=median([run.seconds for run in runs]),
        memory_mib=median([run.memory_mib for run in runs]),
        sources=tuple(run.source for run in runs),
    )


def _improvements(scores: Mapping[str, list[Array]]) -> tuple[Improvement, ...]:
    """Improvements of each pair of methods, from their scores in each environment."""
    return tuple(
        Improvement(one, other, estimate(probability_of_improvement, [*scores[one], *scores[other]]))
        for one, other in combinations(scores, 2)
    )


def _over_environments(found: Sequence[EnvironmentResult], reference: Reference) -> Overall:
    scales: dict[str, tuple[float, float]] = {}
    scores: dict[str, list[Array]] = {}
    for one in found:
        name = one.environment
        if name not in reference:
            raise ConfigError(
                f"no reference scores of {name}{nearest(name, reference)}; "
                f"fix: {{{name!r}: [score that counts as 0, as 1], ...}}"
            )
        try:
            low, high = scales[name] = float(reference[name][0]), float(reference[name][1])
            serves = len(reference[name]) == 2 and low != high and math.isfinite(high - low)
        except (TypeError, ValueError, LookupError, OverflowError):
            serves = False
        if not serves:
            raise ConfigError(
                f"reference scores of {name} are {reference[name]!r:.80}: expected two different numbers; "
                f"fix: {{{name!r}: [score that counts as 0, as 1], ...}}"
            )
        for result in one.methods:
            scores.setdefault(result.method, []).append((np.array(result.scores) - low) / (high - low))
    everywhere = {method: arrays for method, arrays in scores.items() if len(arrays) == len(found)}
    if not everywhere:
        raise ConfigError(f"no method has runs in all of {', '.join(scales)}; fix: no reference scores, or equal names")
    methods = tuple(
        OverallMethod(method, estimate(iqm, arrays), float(np.mean([array.mean() for array in arrays])))
        for method, arrays in everywhere.items()
    )
    return Overall(scales, methods, _improvements(everywhere))


# Tables for the terminal and the page


class Table(NamedTuple):
    """Rows of texts."""

    title: str
    """Empty where the table belongs to the one before."""
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(found: Comparison) -> Iterator[Table]:
    """Methods of each environment, their improvements and settings that differ; then all environments together."""
    for one in found.environments:
        score = (f"final {one.score}, IQM", "mean", "least", "mean over training")
        rows = tuple(
            (
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
            for result in one.methods
        )
        yield Table(one.environment, ("method", "runs", *score, one.unit, "seconds", "MiB"), rows)
        yield from _pairs(one.improvements)
        methods = tuple(result.method for result in one.methods)
        if one.settings:
            values = one.settings.items()
            cells = [[setting(some[name]) if name in some else "-" for name in methods] for _, some in values]
            differing = tuple((name, *row) for (name, _), row in zip(values, cells, strict=True))
            yield Table("", ("setting", *methods), differing)
    if found.overall is not None:
        normalised = tuple((method.method, shown(method.iqm), figure(method.mean)) for method in found.overall.methods)
        title = f"all environments, normalised: {', '.join(found.overall.reference)}"
        yield Table(title, ("method", "IQM", "mean"), normalised)
        yield from _pairs(found.overall.improvements)


def setting(value: Any) -> str:
    """A setting's value as tables and names show it."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else str(value)
    return "none" if value is None else str(value)


def _pairs(pairs: Sequence[Improvement]) -> Iterator[Table]:
    if pairs:
        rows = tuple((f"{pair.method} > {pair.other}", shown(pair.probability, "{:.2f}".format)) for pair in pairs)
        yield Table("", ("probability that a run is better", "P"), rows)
