"""Run folders compared: which runs there are, which of them are one method, and what the methods reached. Imports no torch."""

import glob
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.comparison.methods import Flat, differences, differing, environment_of, flat, labels, method_of, setting
from groupwise.comparison.results import Comparison, Measure, Reference, RunRecord, compare_records
from groupwise.errors import ConfigError, RunFolderError
from groupwise.report.folder import RunFolder

Paths = Path | str | Sequence[Path | str]

_KEYS: dict[Measure, str] = {"evaluation": "eval/return_mean", "training": "rollout/return_mean"}
"""Where ``metrics.jsonl`` has the returns."""

_IMPLEMENTATIONS = {"torch": "groupwise in torch", "envpool": "EnvPool"}
"""Whose environments ``env.vectorization`` means, if not Gymnasium's."""

_SEED_LOG = "seed_*.log"
"""What ``train --seeds`` leaves beside a seed's folder, and without one if the seed never began."""


class _Run(NamedTuple):
    """A finished run, read."""

    path: Path
    name: str | None
    """Of its method, if it was given."""
    environment: str
    settings: Flat
    """Of the environment."""
    unit: str
    """Of its steps."""
    method: Flat
    evaluation: Flat
    seed: int
    total_steps: int
    points: dict[Measure, list[tuple[int, float]]]
    """(env steps, mean return) of each measurement."""
    summary: dict[str, Any]
    versions: dict[str, str]
    given: list[str]
    implementation: str
    """Of the environment: whose steps and starts these are."""


def compare(
    runs: Paths | Mapping[str, Paths],
    *,
    reference: Reference | None = None,
    finished_only: bool = False,
) -> Comparison:
    """What methods reached, by their runs: interquartile means over seeds with 95 % bootstrap intervals, and curves.

    Runs that differ in their seed only are one method. Each environment is compared by itself, at equal ``total_steps``.

    Args:
        runs: folders of runs, or folders that hold some, as ``train --seeds`` makes them; or these by names of yours, as in
            ``{"mine": "runs/a", "ppo": ["runs/b", "runs/c"]}``, where all runs of a name are one method.
        reference: for each environment the scores that count as 0 and 1, as ``{"CartPole-v1": (20, 500)}``; then methods are
            also compared over all environments, which count alike.
        finished_only: leave out runs that are unfinished or damaged, and say so, instead of refusing them.

    Raises:
        RunFolderError: there are no runs, or unfinished or damaged ones (names each).
        ConfigError: runs that cannot stand beside each other (unequal ``total_steps``, a name for different settings), or
            reference scores that are missing.
        DataError: a seed of a method came twice.
    """
    named = runs if isinstance(runs, Mapping) else {None: runs}
    pairs = [(name, path) for name, paths in named.items() for path in _several(paths)]
    return compare_pairs(pairs, reference, finished_only=finished_only)


def compare_pairs(
    pairs: Sequence[tuple[str | None, Path | str]],
    reference: Reference | None = None,
    *,
    finished_only: bool = False,
) -> Comparison:
    """``compare`` of paths, each with the name of its method, or None."""
    found, problems = _read(_folders(pairs))
    if problems and not finished_only:
        raise RunFolderError(
            "\n".join(
                [*problems, "fix: finish them, or leave them out: --finished-only (finished_only=True in Python)"]
            )
        )
    if not found:
        raise RunFolderError("\n".join(["no finished runs to compare", *problems]))
    notes = [f"left out: {problem}" for problem in problems]
    records: list[RunRecord] = []
    settings = {}
    for environment, runs in _by_environment(found).items():
        _check_steps(environment, runs)
        methods = _by_method(environment, runs)
        settings[environment] = differences({label: members[0].method for label, members in methods.items()})
        notes += _notes(environment, runs)
        measure: Measure = "evaluation" if all(run.points["evaluation"] for run in runs) else "training"
        for label, members in methods.items():
            records += [_record(environment, label, run, measure) for run in sorted(members, key=lambda run: run.seed)]
    return compare_records(records, reference, settings=settings, notes=notes + _version_notes(found))


def _several(paths: Paths) -> Sequence[Path | str]:
    return [paths] if isinstance(paths, Path | str) else paths


def _folders(pairs: Sequence[tuple[str | None, Path | str]]) -> dict[Path, str | None]:
    """Run folders with the name of their method; one that was given twice stands once.

    Raises:
        RunFolderError: a path has no runs.
        ConfigError: a folder under two names.
    """
    found: dict[Path, tuple[Path, str | None]] = {}
    for name, pattern in pairs:
        for path in _expand(Path(pattern)):
            before = found.setdefault(path.resolve(), (path, name))
            if before[1] != name:
                raise ConfigError(f"{path} came as {before[1]!r} and as {name!r}; fix: one name for a run")
    if not found:
        raise RunFolderError("no runs to compare; fix: give folders of runs, as in: groupwise compare runs/*")
    return dict(found.values())


def _expand(path: Path) -> list[Path]:
    """The run folders that a path means: itself, those in it, or those that fit it as a pattern."""
    if not path.exists() and glob.has_magic(str(path)):
        return [run for match in sorted(glob.glob(str(path))) for run in _expand(Path(match))]
    if path.is_file():  # a pattern such as runs/ten_seeds/* fits what lies beside the runs, too
        return [path.with_suffix("")] if path.match(_SEED_LOG) else []
    if not path.is_dir():
        raise RunFolderError(f"there is no run folder {str(path)!r}; fix: give the path that training printed")
    if (path / "config.json").is_file():
        return [path]
    begun = {child for child in path.iterdir() if (child / "config.json").is_file()}
    asked = {log.with_suffix("") for log in path.glob(_SEED_LOG)}  # one that never began left a log only
    if not begun | asked:
        raise RunFolderError(
            f"{path} is no run folder and holds none: no config.json in it or right below; fix: give folders that training made"
        )
    return sorted(begun | asked, key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Orders seed_2 before seed_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


def _read(folders: Mapping[Path, str | None]) -> tuple[list[_Run], list[str]]:
    """The runs that are finished, and what is wrong with each of the others."""
    found, problems = [], []
    for path, name in folders.items():
        try:
            found.append(_read_run(path, name))
        except RunFolderError as error:
            text = str(error)
            problems.append(text if text.startswith(str(path)) else f"{path}: {text}")
    return found, problems


def _read_run(path: Path, name: str | None) -> _Run:
    """A run.

    Raises:
        RunFolderError: it is unfinished, damaged, or no run.
    """
    if not (path / "config.json").is_file():
        raise RunFolderError(f"never began; see {path}.log")
    folder = RunFolder(path)
    config, summary = folder.read_config(), folder.read_summary()
    numbers = [config.get("seed"), config.get("total_steps")]
    about = config.get("env") or config.get("task")
    if not (isinstance(config.get("algorithm"), dict) and isinstance(about, dict) and all(map(_is_count, numbers))):
        raise RunFolderError(f"{folder.config} holds no settings of a run; fix: give folders that training made")
    metrics = folder.read_metrics()
    _check_finished(metrics, summary, config["total_steps"])
    environment, settings = environment_of(config)
    given = folder.read_given()
    return _Run(
        path,
        name,
        environment,
        settings,
        "tokens written" if "task" in config else "environment steps",
        method_of(config) | {"given_in_python": sorted(given)},
        {
            key: value
            for key, value in flat(config.get("evaluation", {})).items()
            if key not in ("interval", "num_logged_groups")
        },
        config["seed"],
        config["total_steps"],
        {measure: _points(metrics, key) for measure, key in _KEYS.items()},
        summary,
        folder.read_versions(),
        given,
        _IMPLEMENTATIONS.get(about.get("vectorization", ""), "Gymnasium"),
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and value >= 0


def _check_finished(metrics: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], total_steps: int) -> None:
    steps = metrics[-1].get("env_steps", 0) if metrics else 0
    at = f"at step {steps:,} of {total_steps:,}"
    stopped = str(summary.get("stopped", ""))
    if not summary:
        raise RunFolderError(f"unfinished: it is being trained, or was killed, {at}")
    if stopped in ("failed", "interrupted"):
        raise RunFolderError(f"unfinished: {stopped} {at}")
    if summary.get("env_steps") != steps:
        raise RunFolderError(f"unfinished: it was resumed, and is {at}")
    if steps < total_steps:
        raise RunFolderError(f"ended early {at} ({stopped}), so that its budget was another")


def _points(metrics: Sequence[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    points = [(entry["env_steps"], entry[key]) for entry in metrics if key in entry]
    for steps, value in points:
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise RunFolderError(f"damaged: {key} is {value} at step {steps:,}")
    return points


def _by_environment(runs: Sequence[_Run]) -> dict[str, list[_Run]]:
    """Runs by the name of their environment, which says in what it differs from others of that id."""
    kinds: dict[str, dict[str, list[_Run]]] = {}
    for run in runs:
        kinds.setdefault(run.environment, {}).setdefault(_key(run.settings), []).append(run)
    found = {}
    for name, variants in kinds.items():
        names = differing([members[0].settings for members in variants.values()])
        for members in variants.values():
            values = {key: members[0].settings.get(key) for key in names}
            said = [
                f"{key.rpartition('.')[2]}={setting(value)}" for key, value in values.items() if value not in (None, {})
            ]
            found[" ".join([name, *said])] = members
    return found


def _key(settings: Flat) -> str:
    return json.dumps(settings, sort_keys=True)


def _check_steps(environment: str, runs: Sequence[_Run]) -> None:
    budgets = sorted({run.total_steps for run in runs})
    if len(budgets) > 1:
        some = [next(run for run in runs if run.total_steps == budget) for budget in (budgets[0], budgets[-1])]
        raise ConfigError(
            f"{environment}: runs of unequal total_steps ({some[0].total_steps:,} in {some[0].path}, {some[1].total_steps:,} in "
            f"{some[1].path}); fix: compare those of one budget, or train the shorter ones on: "
            f"groupwise resume {some[0].path} --total-steps {budgets[-1]}"
        )


def _by_method(environment: str, runs: Sequence[_Run]) -> dict[str, list[_Run]]:
    """Runs by what their method is called: the name that was given, or one that their settings make."""
    found: dict[tuple[str | None, str], list[_Run]] = {}
    for run in runs:
        found.setdefault((run.name, "" if run.name else _key(run.method)), []).append(run)
    for (name, _), members in found.items():
        if names := differing([run.method for run in members]):
            one, other = next((a, b) for a in members for b in members if differing([a.method, b.method]))
            raise ConfigError(
                f"{name}: {one.path} and {other.path} differ in {', '.join(names[:5])}{', ...' if names[5:] else ''}, so they are no "
                "seeds of one method; fix: a name for each"
            )
    unnamed = [members for (name, _), members in found.items() if name is None]
    derived = dict(zip((id(members) for members in unnamed), labels([m[0].method for m in unnamed]), strict=True))
    called: dict[str, list[_Run]] = {}
    for (name, _), members in found.items():
        label = name or derived[id(members)]
        if label in called:
            raise ConfigError(
                f"{environment}: {label!r} names two methods; fix: other names, as in mine={members[0].path}"
            )
        called[label] = members
    return called


def _record(environment: str, method: str, run: _Run, measure: Measure) -> RunRecord:
    if not run.points[measure]:
        raise RunFolderError(f"{run.path} holds no returns; fix: leave it out")
    steps, returns = zip(*run.points[measure], strict=True)
    seconds, memory = run.summary.get("seconds"), run.summary.get("peak_memory_mib")
    return RunRecord(environment, method, run.seed, steps, returns, measure, run.unit, seconds, memory, str(run.path))


def _notes(environment: str, runs: Sequence[_Run]) -> Iterator[str]:
    if names := differing([run.evaluation for run in runs]):
        yield f"{environment}: runs were not evaluated alike; they differ in {', '.join(f'evaluation.{name}' for name in names)}"
    if any("env" in run.given for run in runs):
        yield f"{environment}: an environment given in Python; that all runs had the same one is not known"
    if len(implementations := sorted({run.implementation for run in runs})) > 1:
        yield f"{environment}: trained and evaluated in other implementations of it: {', '.join(implementations)}"


def _version_notes(runs: Sequence[_Run]) -> list[str]:
    versions = [run.versions for run in runs]
    if not (names := differing(versions)):
        return []
    said = [f"{name} ({', '.join(sorted({str(v.get(name, 'unknown'))[:12] for v in versions}))})" for name in names]
    return [f"runs were made by different versions of {', '.join(said)}"]
