"""Comparison of run folders: find the runs, group them into methods, compare. Imports no torch."""

import glob
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.comparison.results import Comparison, Measure, Reference, RunRecord, compare_records, setting
from groupwise.config.base import flat
from groupwise.config.run import BUDGETS, Budget, EvaluationMetric, text_subject
from groupwise.errors import ConfigError, RunFolderError
from groupwise.report.folder import SCORES, RunFolder

# Methods: grouping of runs by their settings (plain data), names, and differing settings

Tree = dict[str, Any]
Flat = dict[str, Any]
"""Settings by their full names, such as ``algorithm.gamma``; lists are values."""

_NO_METHOD = ("seed", "run_dir", "logging", "evaluation", "stop", *BUDGETS, "task")
"""Settings that do not make a method. ``stop`` has no effect on a run that used up its budget."""
_ABSENT = "-"
_OF_ENVIRONMENT = ("id", "kwargs", "max_episode_steps")
"""Settings in ``env`` that do not make one either."""


def environment_of(config: Tree) -> tuple[str, Flat]:
    """Name and settings of the environment or task that a run was trained on."""
    if "task" in config:
        task = config["task"]
        return text_subject(task.get("env"), task.get("data")), flat({"task": task})
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


def _at(method: Flat, name: str) -> Any:
    """The setting, or the name of a group of settings ("set" if it has none); ``"-"`` if the method has neither."""
    is_group = any(other.startswith(f"{name}.") for other in method)
    return method.get(name, method.get(f"{name}.name", "set") if is_group else _ABSENT)


def differences(methods: Mapping[str, Flat]) -> dict[str, dict[str, Any]]:
    """Setting -> method -> value, of settings that differ between the methods that have them."""
    found = {}
    for name in differing(list(methods.values())):
        found_here = {method: _at(settings, name) for method, settings in methods.items()}
        values = {method: value for method, value in found_here.items() if value is not _ABSENT}
        if len(set(map(repr, values.values()))) > 1:
            found[name] = values
    return found


def labels(methods: Sequence[Flat]) -> list[str]:
    """A different name for each method: its algorithm and, if several share it, settings that tell them apart."""
    found = []
    for method in methods:
        algorithm = method.get("algorithm.name")
        alike = [other for other in methods if other.get("algorithm.name") == algorithm]
        names, chosen = differing(alike), list[str]()
        while _num_kinds(alike, chosen) < _num_kinds(alike, names):  # the most telling first
            chosen.append(max(names, key=lambda name: _num_kinds(alike, [*chosen, name])))
        values = (f"{end}={setting(_at(method, name))}" for name, end in _shortest(chosen).items())
        found.append(f"{algorithm} {', '.join(values)}".rstrip())
    return found


def _shortest(names: Sequence[str]) -> dict[str, str]:
    """The last part of each name, or all of it where others end alike."""
    ends = [name.rpartition(".")[2] for name in names]
    return {name: end if ends.count(end) == 1 else name for name, end in zip(names, ends, strict=True)}


def _num_kinds(methods: Sequence[Flat], names: Sequence[str]) -> int:
    """How many different methods there are, judged by these settings."""
    return len({tuple(repr(method.get(name, _ABSENT)) for name in names) for method in methods})


Paths = Path | str | Sequence[Path | str]

_PREFIXES: dict[Measure, str] = {"evaluation": "eval", "training": "rollout"}
"""Prefixes of the scores in ``metrics.jsonl``."""


class _Run(NamedTuple):
    """A finished run, read."""

    path: Path
    name: str | None
    """Name of its method, if the user gave one."""
    config: dict[str, Any]
    method: Flat
    points: dict[Measure, list[tuple[int, float | None]]]
    """Steps and scores; None where no episode told of success."""
    """(env steps, score) of each measurement."""
    summary: dict[str, Any]
    given: list[str]
    changed: bool
    """Whether it was forked, or continued with another budget or other settings."""


def compare(
    runs: Paths | Mapping[str, Paths] | Mapping[str | None, Paths],
    *,
    reference: Reference | None = None,
    metric: EvaluationMetric = "return",
    finished_only: bool = False,
) -> Comparison:
    """Compare methods: interquartile means over seeds with 95 % bootstrap intervals, and curves.

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
    found: list[_Run] = []
    problems: list[str] = []
    for path, name in _folders(runs if isinstance(runs, Mapping) else {None: runs}).items():
        try:
            found.append(_read_run(path, name, metric))
        except RunFolderError as error:
            problems.append(str(error) if str(error).startswith(str(path)) else f"{path}: {error}")
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
        evaluations = [flat({"evaluation": run.config.get("evaluation", {})}) for run in members]
        ignored = {"evaluation.interval", "evaluation.num_logged_groups"}
        if names := [name for name in differing(evaluations) if name not in ignored]:
            notes.append(f"{environment}: runs were evaluated differently: {', '.join(names)}")
        if any("env" in run.given for run in members):
            notes.append(f"{environment}: an environment given in Python may not be the same in all runs")
        if changed := [str(run.path) for run in members if run.changed]:
            named = f"{', '.join(changed[:5])}{f' and {len(changed) - 5} more' if changed[5:] else ''}"
            notes.append(
                f"{environment}: forked, or continued with another budget or other settings: {named}; a part of their "
                "training may have had other settings than the ones compared here"
            )
        told: set[Measure] = {
            kind for kind in _PREFIXES for run in members for _, score in run.points[kind] if score is not None
        }
        has_all = "evaluation" in told and all(run.points["evaluation"] for run in members)
        measure: Measure = "evaluation" if has_all else "training"
        for label, one in methods.items():
            for run in sorted(one, key=lambda run: run.config["seed"]):
                if measure not in told or not run.points[measure]:
                    raise RunFolderError(f"{run.path} holds no {metric.replace('_', ' ')}s; fix: leave it out")
                steps, scores = zip(*run.points[measure], strict=True)
                returns = tuple(
                    score or 0.0 for score in scores
                )  # no episode had the flag, where others told of success
                unit = "tokens written" if "task" in run.config else "environment steps"
                seconds, memory = run.summary.get("seconds"), run.summary.get("peak_memory_mib")
                seed, source = run.config["seed"], str(run.path)
                records.append(
                    RunRecord(environment, label, seed, steps, returns, measure, unit, seconds, memory, source, metric)
                )
    return compare_records(records, reference, settings=settings, notes=notes)


def _folders(named: Mapping[Any, Paths]) -> dict[Path, str | None]:
    """Run folders, each with the name of its method; a ``ConfigError`` if one has two."""
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


def _read_run(path: Path, name: str | None, metric: EvaluationMetric) -> _Run:
    """A run; a ``RunFolderError`` if it is unfinished, damaged, or no run."""
    folder = RunFolder.open(path)
    config, summary = folder.read_config(), folder.read_summary()
    if sum(isinstance(config.get(name), int | float) for name in BUDGETS) != 1 or not (
        config.get("env", {}).get("id") or config.get("task")
    ):
        raise RunFolderError(f"{folder.config} holds no settings of a run; fix: give folders that training made")
    metrics, budget = folder.read_scored(), _budget(config)
    last = metrics[-1] if metrics else {}
    done, stopped = last.get(budget.metric, 0), str(summary.get("stopped", ""))
    at = f"at {budget.unit.removesuffix('s')} {done:,} of {budget.total:,}"
    if not summary:
        raise RunFolderError(f"unfinished: still training, or killed, {at}")
    if stopped in ("failed", "interrupted"):
        raise RunFolderError(f"unfinished: {stopped} {at}")
    if summary.get("env_steps") != last.get("env_steps", 0):
        raise RunFolderError(f"unfinished: resumed, and now {at}")
    if done < budget.total:
        raise RunFolderError(f"stopped early {at} ({stopped})")
    known = folder.read_provenance()
    given = known["given_in_python"]
    method = method_of(config) | {"given_in_python": sorted(given)}
    points = {
        measure: [
            (entry["env_steps"], entry.get(f"{prefix}/{SCORES[metric]}"))
            for entry in metrics
            if f"{prefix}/return_mean" in entry
        ]
        for measure, prefix in _PREFIXES.items()
    }
    changed = any(known[name] for name in ("forked_from", "resumed", "scores_from"))
    return _Run(path, name, config, method, points, summary, given, changed)


def _by_environment(runs: Sequence[_Run]) -> dict[str, list[_Run]]:
    """Runs by the name of their environment, with the settings in which it differs from others of that id."""
    variants: dict[str, list[Flat]] = {}
    for name, settings in (environment_of(run.config) for run in runs):
        variants.setdefault(name, []).append(settings)
    found: dict[str, list[_Run]] = {}
    for run in runs:
        name, settings = environment_of(run.config)
        values = {end: settings.get(one) for one, end in _shortest(differing(variants[name])).items()}
        shown = [f"{end}={setting(value)}" for end, value in values.items() if value not in (None, {})]
        found.setdefault(" ".join([name, *shown]), []).append(run)
    return found


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
        groups.setdefault((run.name, "" if run.name else json.dumps(run.method, sort_keys=True)), []).append(run)
    made = iter(labels([members[0].method for (name, _), members in groups.items() if name is None]))
    found: dict[str, list[_Run]] = {}
    for (name, _), members in groups.items():
        for other in members[1:] if name is not None else ():
            if names := differing([members[0].method, other.method]):
                raise ConfigError(
                    f"{name}: {members[0].path} and {other.path} differ in {', '.join(names[:5])}"
                    f"{', ...' if names[5:] else ''}; fix: a name for each"
                )
        label = name or next(made)
        if label in found:
            raise ConfigError(f"{environment}: {label!r} names two methods; fix: others, as in mine={members[0].path}")
        found[label] = members
    return found
