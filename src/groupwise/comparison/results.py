"""Methods compared by their runs: per environment, and over all environments on a common scale.

A ``RunRecord`` is all that is needed of a run, so results of other libraries can be compared, too.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from groupwise.comparison import aggregates
from groupwise.comparison.aggregates import Array, Curve, Estimate, Number, estimate, iqm
from groupwise.config.run import EvaluationMetric
from groupwise.errors import ConfigError, DataError, nearest
from groupwise.system import files

Measure = Literal["evaluation", "training"]
"""Returns of evaluations, or of training episodes."""

Reference = Mapping[str, tuple[Number, Number] | Sequence[Number]]
"""Environment -> the two scores that count as 0 and 1."""

ENOUGH_RUNS = 5
"""With fewer runs, bootstrap intervals are too narrow."""


class RunRecord(NamedTuple):
    """The results of one run."""

    environment: str
    method: str
    seed: int
    env_steps: tuple[Number, ...]
    """When the return was measured, rising."""
    returns: tuple[Number, ...]
    """Mean return, or success rate, at each of them; the last one is the run's score."""
    measure: Measure = "evaluation"
    unit: str = "environment steps"
    """What a step is."""
    seconds: float | None = None
    """Duration of training."""
    memory_mib: float | None = None
    """Peak memory."""
    source: str = ""
    """Where the run is, for messages."""
    metric: EvaluationMetric = "return"
    """What ``returns`` are."""


@dataclass(frozen=True)
class MethodResult:
    """Results of a method in one environment."""

    method: str
    seeds: tuple[int, ...]
    scores: tuple[float, ...]
    """Final return of each seed."""
    iqm: Estimate
    """Of the scores."""
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
    """What a step is."""
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
    """Of the environments' means."""


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
    """None unless reference scores were given."""
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
        """Write ``comparison.json`` and ``comparison.png`` into a folder."""
        from groupwise.comparison.plot import plot_comparison

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.report(), indent=1, allow_nan=False)
        files.write(folder / "comparison.json", f"{text}\n".encode())
        plot_comparison(self, folder / "comparison.png")


def compare_records(
    records: Sequence[RunRecord],
    reference: Reference | None = None,
    *,
    settings: Mapping[str, dict[str, dict[str, Any]]] | None = None,
    notes: Sequence[str] = (),
) -> Comparison:
    """Runs of one or several methods, compared in each environment.

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
    for record in records:
        cells.setdefault(record.environment, {}).setdefault(record.method, []).append(record)
    found = tuple(_in_environment(name, methods, (settings or {}).get(name, {})) for name, methods in cells.items())
    all_notes = [*notes, *(note for one in found for note in _notes(one))]
    overall = None
    if reference is not None:
        overall = _over_environments(found, reference)
        left = sorted({m.method for one in found for m in one.methods} - {m.method for m in overall.methods})
        if left:
            all_notes.append(f"over all environments without {', '.join(left)}: no runs in some of them")
    return Comparison(found, overall, tuple(all_notes))


def figure(value: Number) -> str:
    """A number with at least four digits."""
    if value == 0 or not 1e-3 <= abs(value) < 1e15:
        return f"{value:.4g}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def shown(found: Estimate, number: Callable[[Number], str] = figure) -> str:
    """An estimate as text."""
    ends = "" if found.interval is None else f" [{', '.join(map(number, found.interval))}]"
    return number(found.value) + ends


def _in_environment(
    environment: str, methods: Mapping[str, list[RunRecord]], settings: dict[str, dict[str, Any]]
) -> EnvironmentResult:
    runs = [run for many in methods.values() for run in many]
    for run in runs:
        _check(run)
    measures, metrics = {run.measure for run in runs}, {run.metric for run in runs}
    if len(metrics) > 1:
        raise DataError(f"{environment}: returns and success rates; fix: all of one kind")
    if len(measures) > 1:
        raise DataError(f"{environment}: returns of evaluations and of training; fix: all of one kind")
    grid = aggregates.common_grid([run.env_steps for run in runs])
    results = tuple(_of_method(name, many, grid) for name, many in methods.items())
    scores = {result.method: [np.array(result.scores)] for result in results}
    improvements = _improvements(scores)
    return EnvironmentResult(environment, measures.pop(), runs[0].unit, results, improvements, settings, metrics.pop())


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


def _of_method(method: str, runs: list[RunRecord], grid: Array) -> MethodResult:
    seeds = tuple(run.seed for run in runs)
    if twice := sorted({seed for seed in seeds if seeds.count(seed) > 1}):
        where = ", ".join(run.source or "?" for run in runs if run.seed == twice[0])
        raise DataError(
            f"{runs[0].environment}, {method}: seed {twice[0]} came more than once ({where}), so the runs are not "
            "independent; fix: leave one out, or name them as two methods"
        )
    scores = np.array([run.returns[-1] for run in runs], dtype=np.float64)
    returns = np.stack([np.interp(grid, run.env_steps, run.returns) for run in runs], axis=1)
    return MethodResult(
        method,
        seeds,
        tuple(scores.tolist()),
        iqm=estimate(iqm, [scores]),
        mean=float(scores.mean()),
        least=float(scores.min()),
        mean_height=estimate(iqm, [aggregates.mean_height(grid, returns)]),
        curve=aggregates.curve(grid, returns),
        env_steps=float(np.median([run.env_steps[-1] for run in runs])),
        seconds=_median([run.seconds for run in runs]),
        memory_mib=_median([run.memory_mib for run in runs]),
        sources=tuple(run.source for run in runs),
    )


def _median(numbers: Sequence[Number | None]) -> float | None:
    """None unless every run has the number."""
    known = [number for number in numbers if number is not None]
    return float(np.median(known)) if len(known) == len(numbers) else None


def _improvements(scores: Mapping[str, list[Array]]) -> tuple[Improvement, ...]:
    """Of each pair of methods.

    Args:
        scores: of each method, one array per environment.
    """
    compare = aggregates.probability_of_improvement
    return tuple(
        Improvement(one, other, estimate(compare, [*scores[one], *scores[other]]))
        for one, other in combinations(scores, 2)
    )


def _over_environments(found: Sequence[EnvironmentResult], reference: Reference) -> Overall:
    scales = {one.environment: _scale(one.environment, reference) for one in found}
    scores: dict[str, list[Array]] = {}
    for one in found:
        low, high = scales[one.environment]
        for result in one.methods:
            scores.setdefault(result.method, []).append((np.array(result.scores) - low) / (high - low))
    everywhere = {method: arrays for method, arrays in scores.items() if len(arrays) == len(found)}
    if not everywhere:
        raise ConfigError(
            f"no method has runs in all of {', '.join(scales)}; fix: compare without reference scores, or name methods "
            "alike"
        )
    methods = tuple(
        OverallMethod(method, estimate(iqm, arrays), float(np.mean([array.mean() for array in arrays])))
        for method, arrays in everywhere.items()
    )
    return Overall(scales, methods, _improvements(everywhere))


def _scale(environment: str, reference: Reference) -> tuple[float, float]:
    """The scores that count as 0 and 1."""
    if environment not in reference:
        raise ConfigError(
            f"no reference scores of {environment}{nearest(environment, reference)}; "
            f"fix: {{{environment!r}: [score that counts as 0, as 1], ...}}"
        )
    scores = reference[environment]
    if len(scores) != 2 or len(set(scores)) != 2:
        raise ConfigError(f"reference scores of {environment} are {list(scores)}: expected two different ones")
    return float(scores[0]), float(scores[1])


def _notes(found: EnvironmentResult) -> Iterator[str]:
    """Weak points of a comparison."""
    if found.measure == "training":
        yield f"{found.environment}: not every run was evaluated; scores are those of training episodes"
    if few := [result.method for result in found.methods if len(result.seeds) < ENOUGH_RUNS]:
        yield (
            f"{found.environment}: fewer than {ENOUGH_RUNS} runs of {', '.join(few)}, too few for a reliable interval; "
            "fix: more seeds"
        )
    steps = [result.env_steps for result in found.methods]
    if max(steps) > 1.05 * min(steps):
        yield (
            f"{found.environment}: methods took {min(steps):,.0f} to {max(steps):,.0f} steps; curves end with the "
            "shortest run"
        )
