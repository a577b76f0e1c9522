"""Comparison of run folders: find the runs, group them into methods, compare. Imports no torch."""

import glob
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
from groupwise.config.base import flat
from groupwise.config.run import BUDGETS, Budget, EvaluationMetric
from groupwise.errors import ConfigError, DataError, RunFolderError, nearest
from groupwise.report.folder import SCORES, RunFolder

# Statistics over several runs: interquartile mean, probability of improvement, bootstrap intervals, curves.

Array = NDArray[np.float64]
Number = int | float
Statistic = Callable[..., Array]
"""Arrays with the runs on the last axis, one per stratum -> a number for everything before that axis."""

RESAMPLES = 10_000
"""For the interval of a score: its ends vary by about a hundredth of its width."""
CURVE_RESAMPLES = 2_000
"""For the interval at each point of a curve."""
SEED = 0
"""Of the bootstrap: the same runs give the same interval."""
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
    pairs = zip(strata[:half], strata[half:], strict=True)
    signs = [np.sign(x[..., :, None] - y[..., None, :]).mean(axis=(-2, -1)) for x, y in pairs]
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


# Methods compared by their runs: per environment, and over all environments on a common scale.

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
        from groupwise.comparison.show import plot_comparison

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
    grid = common_grid([run.env_steps for run in runs])
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
        mean_height=estimate(iqm, [mean_height(grid, returns)]),
        curve=curve(grid, returns),
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
    compare = probability_of_improvement
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


# Which runs are one method, how methods are named, and in which settings they differ. Settings are plain data.

Tree = dict[str, Any]
Flat = dict[str, Any]
"""Settings by their full names, such as ``algorithm.gamma``; lists are values."""

_NO_METHOD = ("seed", "run_dir", "logging", "evaluation", "stop", *BUDGETS, "task")
"""Settings that do not make a method. ``stop`` has no effect on a run that used up its budget."""
_ABSENT = object()
_OF_ENVIRONMENT = ("id", "kwargs", "max_episode_steps")
"""Settings in ``env`` that do not make one either."""


def environment_of(config: Tree) -> tuple[str, Flat]:
    """Name and settings of the environment or task that a run was trained on."""
    if "task" in config:
        name = str(config["task"].get("data", "")).rpartition("/")[2].rpartition(":")[2]
        return name, flat({"task": config["task"]})
    env = config["env"]
    return str(env["id"]), flat({"env": {key: env.get(key) for key in _OF_ENVIRONMENT}})


def method_of(config: Tree) -> Flat:
    """The settings that make the method: runs that differ in others only are one method."""
    env = {key: value for key, value in config.get("env", {}).items() if key not in _OF_ENVIRONMENT}
    return flat({key: value for key, value in config.items() if key not in _NO_METHOD} | {"env": env})


def differing(methods: Sequence[Flat]) -> list[str]:
    """Names of settings that are not the same in all of these; one that a method lacks differs, too."""
    names = dict.fromkeys(name for method in methods for name in method)
    return [name for name in names if _num_kinds(methods, [name]) > 1]


def differences(methods: Mapping[str, Flat]) -> dict[str, dict[str, Any]]:
    """Setting -> method -> value, of settings that differ between the methods that have them."""
    found = {}
    for name in differing(list(methods.values())):
        values = {method: settings[name] for method, settings in methods.items() if name in settings}
        if len(set(map(repr, values.values()))) > 1:
            found[name] = values
    return found


def labels(methods: Sequence[Flat]) -> list[str]:
    """A different name for each method: its algorithm and, if several share it, settings that tell them apart."""
    return [
        _label(method, [other for other in methods if _algorithm(other) == _algorithm(method)]) for method in methods
    ]


def setting(value: Any) -> str:
    """A setting's value as tables and names show it."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else str(value)
    return "none" if value is None else str(value)


def _algorithm(method: Flat) -> str:
    return str(method.get("algorithm.name"))


def _label(method: Flat, same_algorithm: Sequence[Flat]) -> str:
    names = _telling_apart(same_algorithm)
    settings = ", ".join(f"{_short(name, names)}={setting(method.get(name))}" for name in names)
    return f"{_algorithm(method)} {settings}".rstrip()


def _telling_apart(methods: Sequence[Flat]) -> list[str]:
    """A few settings that tell all the methods apart, the most telling first."""
    names, chosen = differing(methods), list[str]()
    while _num_kinds(methods, chosen) < _num_kinds(methods, names):
        chosen.append(max(names, key=lambda name: _num_kinds(methods, [*chosen, name])))
    return chosen


def _num_kinds(methods: Sequence[Flat], names: Sequence[str]) -> int:
    """How many different methods there are, judged by these settings."""
    return len({tuple(repr(method.get(name, _ABSENT)) for name in names) for method in methods})


def _short(name: str, others: Sequence[str]) -> str:
    """The last part of a setting's name, or all of it where two end alike."""
    last = name.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in others].count(last) == 1 else name


Paths = Path | str | Sequence[Path | str]

_PREFIXES: dict[Measure, str] = {"evaluation": "eval", "training": "rollout"}
"""Where ``metrics.jsonl`` has the scores."""


class _Run(NamedTuple):
    """A finished run, read."""

    path: Path
    name: str | None
    """Of its method, if the user gave one."""
    config: dict[str, Any]
    method: Flat
    points: dict[Measure, list[tuple[int, float]]]
    """(env steps, score) of each measurement."""
    summary: dict[str, Any]
    given: list[str]


def compare(
    runs: Paths | Mapping[str, Paths] | Mapping[str | None, Paths],
    *,
    reference: Reference | None = None,
    metric: EvaluationMetric = "return",
    finished_only: bool = False,
) -> Comparison:
    """What methods reached: interquartile means over seeds with 95 % bootstrap intervals, and curves.

    Runs that differ in their seed only are one method. Each environment is compared by itself, at equal budgets.

    Args:
        runs: run folders, or folders that hold some, as ``train --seeds`` makes them. Or a mapping from names to these, as
            in ``{"mine": "runs/a", "ppo": ["runs/b", "runs/c"]}``, where all runs of a name are one method.
        reference: for each environment the scores that count as 0 and 1, as ``{"CartPole-v1": (20, 500)}``; then methods
            are also compared over all environments.
        metric: the score of an evaluation.
        finished_only: leave out runs that are unfinished or damaged, with a note, instead of refusing them.

    Raises:
        RunFolderError: there are no runs, or unfinished or damaged ones (names each).
        ConfigError: runs that cannot be compared (unequal budgets, a name for different settings), or reference
            scores that are missing.
        DataError: a seed of a method came twice.
    """
    found, problems = _read(_folders(runs if isinstance(runs, Mapping) else {None: runs}), metric)
    if problems and not finished_only:
        fix = "fix: finish them, or leave them out: --finished-only (finished_only=True in Python)"
        raise RunFolderError("\n".join([*problems, fix]))
    if not found:
        raise RunFolderError("\n".join(["no finished runs to compare", *problems]))
    notes = [f"left out: {problem}" for problem in problems]
    records: list[RunRecord] = []
    settings = {}
    for environment, members in _by_environment(found).items():
        _check_steps(environment, members)
        methods = _by_method(environment, members)
        settings[environment] = differences({label: one[0].method for label, one in methods.items()})
        notes += _notes_of_runs(environment, members)
        measure: Measure = "evaluation" if all(run.points["evaluation"] for run in members) else "training"
        for label, one in methods.items():
            records += [
                _record(environment, label, run, measure, metric) for run in sorted(one, key=lambda r: r.config["seed"])
            ]
    return compare_records(records, reference, settings=settings, notes=notes)


def _folders(named: Mapping[Any, Paths]) -> dict[Path, str | None]:
    """Run folders, each with the name of its method.

    Raises:
        RunFolderError: a path has no runs.
        ConfigError: a folder under two names.
    """
    found: dict[Path, tuple[Path, str | None]] = {}
    for name, paths in named.items():
        for pattern in [paths] if isinstance(paths, Path | str) else paths:
            for path in _expand(Path(pattern)):
                first = found.setdefault(path.resolve(), (path, name))
                if first[1] != name:
                    raise ConfigError(f"{path} came as {first[1]!r} and as {name!r}; fix: one name for a run")
    if not found:
        raise RunFolderError("no runs to compare; fix: give folders of runs, as in: groupwise compare runs/*")
    return dict(found.values())


def _expand(path: Path) -> list[Path]:
    """The run folders that a path means: itself, those in it, or those that match it as a pattern."""
    if not path.exists() and glob.has_magic(str(path)):
        return [run for match in sorted(glob.glob(str(path))) for run in _expand(Path(match))]
    if path.is_file():  # a pattern such as runs/ten_seeds/* matches logs, too
        return []
    if not path.is_dir():
        raise RunFolderError(f"there is no run folder {str(path)!r}; fix: give the path that training printed")
    if (path / "config.json").is_file():
        return [path]
    inside = sorted(child for child in path.iterdir() if (child / "config.json").is_file())
    if not inside:
        raise RunFolderError(f"{path} is no run folder and holds none (no config.json); fix: give folders of runs")
    return inside


def _read(folders: Mapping[Path, str | None], metric: EvaluationMetric) -> tuple[list[_Run], list[str]]:
    """The finished runs, and the problems of the others."""
    found, problems = [], []
    for path, name in folders.items():
        try:
            found.append(_read_run(path, name, metric))
        except RunFolderError as error:
            text = str(error)
            problems.append(text if text.startswith(str(path)) else f"{path}: {text}")
    return found, problems


def _read_run(path: Path, name: str | None, metric: EvaluationMetric) -> _Run:
    """A run.

    Raises:
        RunFolderError: it is unfinished, damaged, or no run.
    """
    folder = RunFolder.open(path)
    config, summary = folder.read_config(), folder.read_summary()
    numbers = [config.get("seed"), *(config[name] for name in BUDGETS if config.get(name) is not None)]
    parts = [config.get("algorithm"), config.get("env") or config.get("task")]
    is_run = len(numbers) == 2 and all(isinstance(number, int | float) for number in numbers)
    if not (is_run and all(isinstance(part, dict) for part in parts)):
        raise RunFolderError(f"{folder.config} holds no settings of a run; fix: give folders that training made")
    metrics = folder.read_metrics()
    _check_finished(metrics, summary, _budget(config))
    given = folder.read_provenance()["given_in_python"]
    method = method_of(config) | {"given_in_python": sorted(given)}
    points = {measure: _points(metrics, f"{prefix}/{SCORES[metric]}") for measure, prefix in _PREFIXES.items()}
    return _Run(path, name, config, method, points, summary, given)


def _check_finished(metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], budget: Budget) -> None:
    last = metrics[-1] if metrics else {}
    steps, done = last.get("env_steps", 0), last.get(budget.metric, 0)
    at = f"at {budget.unit.removesuffix('s')} {done:,} of {budget.total:,}"
    stopped = str(summary.get("stopped", ""))
    if not summary:
        raise RunFolderError(f"unfinished: still training, or killed, {at}")
    if stopped in ("failed", "interrupted"):
        raise RunFolderError(f"unfinished: {stopped} {at}")
    if summary.get("env_steps") != steps:
        raise RunFolderError(f"unfinished: resumed, and now {at}")
    if done < budget.total:
        raise RunFolderError(f"stopped early {at} ({stopped})")


def _points(metrics: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    points = [(entry["env_steps"], entry[key]) for entry in metrics if key in entry]
    for steps, value in points:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise RunFolderError(f"damaged: {key} is {value} at step {steps:,}")
    return points


def _by_environment(runs: Sequence[_Run]) -> dict[str, list[_Run]]:
    """Runs by the name of their environment, with the settings in which it differs from others of that id."""
    variants: dict[str, list[Flat]] = {}
    for name, settings in (environment_of(run.config) for run in runs):
        variants.setdefault(name, []).append(settings)
    found: dict[str, list[_Run]] = {}
    for run in runs:
        name, settings = environment_of(run.config)
        values = {one.rpartition(".")[2]: settings.get(one) for one in differing(variants[name])}
        shown = [f"{key}={setting(value)}" for key, value in values.items() if value not in (None, {})]
        found.setdefault(" ".join([name, *shown]), []).append(run)
    return found


def _key(settings: Flat) -> str:
    return json.dumps(settings, sort_keys=True)


def _check_steps(environment: str, runs: Sequence[_Run]) -> None:
    short, long = (pick(runs, key=lambda run: _budget(run.config)) for pick in (min, max))
    less, more = (_budget(run.config) for run in (short, long))
    if less != more:
        raise ConfigError(
            f"{environment}: runs of unequal budgets ({less.name}={less.total:,} in {short.path}, {more.name}={more.total:,} in "
            f"{long.path}); fix: train the others again with --{more.name.replace('_', '-')} {more.total} (a run that is "
            "continued has had another schedule)"
        )


def _budget(config: Mapping[str, Any]) -> Budget:
    return Budget.only(**{name: config.get(name) for name in BUDGETS})


def _by_method(environment: str, runs: Sequence[_Run]) -> dict[str, list[_Run]]:
    """Runs by the name of their method: the one that the user gave, or one made of its settings."""
    groups: dict[tuple[str | None, str], list[_Run]] = {}
    for run in runs:
        groups.setdefault((run.name, "" if run.name else _key(run.method)), []).append(run)
    made = iter(labels([members[0].method for (name, _), members in groups.items() if name is None]))
    found: dict[str, list[_Run]] = {}
    for (name, _), members in groups.items():
        if name is not None:
            _check_same_settings(name, members)
        label = name or next(made)
        if label in found:
            raise ConfigError(
                f"{environment}: {label!r} names two methods; fix: other names, as in mine={members[0].path}"
            )
        found[label] = members
    return found


def _check_same_settings(name: str, runs: Sequence[_Run]) -> None:
    for other in runs[1:]:
        if names := differing([runs[0].method, other.method]):
            raise ConfigError(
                f"{name}: {runs[0].path} and {other.path} differ in {', '.join(names[:5])}{', ...' if names[5:] else ''}; "
                "fix: a name for each"
            )


def _record(environment: str, method: str, run: _Run, measure: Measure, metric: EvaluationMetric) -> RunRecord:
    if not run.points[measure]:
        raise RunFolderError(f"{run.path} holds no {metric.replace('_', ' ')}s; fix: leave it out")
    steps, returns = zip(*run.points[measure], strict=True)
    unit = "tokens written" if "task" in run.config else "environment steps"
    seconds, memory = run.summary.get("seconds"), run.summary.get("peak_memory_mib")
    return RunRecord(
        environment, method, run.config["seed"], steps, returns, measure, unit, seconds, memory, str(run.path), metric
    )


def _notes_of_runs(environment: str, runs: Sequence[_Run]) -> Iterator[str]:
    evaluations = [flat({"evaluation": run.config.get("evaluation", {})}) for run in runs]
    ignored = ("evaluation.interval", "evaluation.num_logged_groups")
    if names := [name for name in differing(evaluations) if name not in ignored]:
        yield f"{environment}: runs were evaluated differently: {', '.join(names)}"
    if any("env" in run.given for run in runs):
        yield f"{environment}: an environment given in Python may not be the same in all runs"
