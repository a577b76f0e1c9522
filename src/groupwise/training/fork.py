"""A new run that begins at a checkpoint of another one, with other settings."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from groupwise import plugins
from groupwise.comparison.methods import differences
from groupwise.config.base import flat
from groupwise.config.load import load_config
from groupwise.config.run import CommonCfg
from groupwise.errors import ConfigError
from groupwise.report.folder import RunFolder
from groupwise.system import files
from groupwise.training.checkpoint import find_checkpoints, has_checkpoint, load_checkpoint, saved_counts

CheckpointName: TypeAlias = Literal["latest", "best"] | int
"""A checkpoint of a run; a number is that of its environment steps."""

_FIXED = (
    "env.id",
    "env.num_envs",
    "env.vectorization",
    "policy",
    "model",
    "task.data",
    "algorithm.name",
    "algorithm.optimizer",
)
"""Settings that the content of a checkpoint depends on."""
_SCORING = ("env.", "evaluation.", "task.")
_NOT_SCORING = ("evaluation.interval", "evaluation.episodes", "evaluation.video_interval")
"""Settings that do not change what an evaluation scores; others do, and the score of ``best`` is then of another kind."""


def fork(path: Path | str, run_dir: Path | str, *, checkpoint: CheckpointName = "latest", **fields: Any) -> Path:
    """A new run folder that begins at a checkpoint of the run in ``path``; ``resume`` trains on in it.

    Its metrics up to there are copied. ``best`` holds weights only, so optimiser and running episodes start anew. A run that
    is finished needs a larger budget.

    Args:
        run_dir: does not exist, or is empty.
        checkpoint: ``latest``, ``best``, or the environment steps of one of the latest.
        fields: changed settings, as of ``gw.train``: ``algorithm={"learning_rate": 1e-4}``, ``total_steps=200_000``.

    Raises:
        ConfigError: a setting is wrong or cannot change, the budget is used up, or there is no such checkpoint.
        RunFolderError: ``path`` is no run folder, or ``run_dir`` is taken.
        CheckpointError: the checkpoint is damaged.
    """
    return fork_run(Path(path), Path(run_dir), checkpoint, partial(load_config, **fields))


def fork_run(
    path: Path,
    run_dir: Path,
    checkpoint: CheckpointName,
    read: Callable[[Path], CommonCfg],
    *,
    finished: bool = False,
) -> Path:
    """``fork`` with the settings that ``read`` makes of the file with those of the run.

    Args:
        finished: whether the checkpoint may have used up the budget.
    """
    folder = RunFolder.open(path)
    known = folder.read_provenance()
    with plugins.blaming_absence(path, known["plugins"]):
        folder.check_format()
        cfg = read(folder.config)
    if cfg.run_dir is not None:
        raise ConfigError(f"run_dir = {str(cfg.run_dir)!r}, but the fork goes to {run_dir}; fix: leave run_dir out")
    settings = cfg.model_dump(mode="json")
    changed = _check_changes(folder, settings)
    if checkpoint == "best" and getattr(cfg.algorithm, "kl_coef", 0) > 0:
        raise ConfigError(
            f"{folder.best} has no reference for algorithm.kl_coef; fix: checkpoint='latest' (--from latest), or its environment steps"
        )
    found = _find(folder, checkpoint)
    iteration, steps = (load_checkpoint(found).state[name] for name in ("iteration", "env_steps"))
    if not finished:
        cfg.budget.check_exceeds(saved_counts(found)[cfg.budget.unit], found)
    kept = [entry for entry in folder.read_metrics() if entry["iteration"] <= iteration]
    used = list(dict.fromkeys([*known["plugins"], *plugins.loaded()]))
    new = RunFolder.create(settings, run_dir, given_in_python=known["given_in_python"], plugins=used)
    try:
        new.checkpoints.mkdir()
        shutil.copytree(found, new.latest)
        comparable = not any(name.startswith(_SCORING) and name not in _NOT_SCORING for name in changed)
        if comparable and has_checkpoint(folder.best) and saved_counts(folder.best)["steps"] <= steps:
            shutil.copytree(folder.best, new.best)
        files.write(new.metrics, "".join(f"{json.dumps(entry)}\n" for entry in kept).encode())
    except BaseException:
        files.remove(new.path)
        raise
    return new.path


def is_fixed(name: str) -> bool:
    """Whether the content of a checkpoint depends on the setting at this path."""
    return any(f"{name}.".startswith(f"{prefix}.") for prefix in _FIXED) and name != "policy.init_from"


def _find(folder: RunFolder, checkpoint: CheckpointName) -> Path:
    if checkpoint == "best":
        return folder.best
    existing = find_checkpoints(folder.latest)
    if checkpoint == "latest":
        return existing[0] if existing else folder.latest
    steps = {saved_counts(path)["steps"]: path for path in existing}
    if checkpoint not in steps:
        there = ", ".join(map(str, sorted(steps))) or "no step"
        raise ConfigError(
            f"checkpoint = {checkpoint}: {folder.path} has checkpoints of {there}; fix: one of these, 'latest' or 'best'"
        )
    return steps[checkpoint]


def _check_changes(folder: RunFolder, settings: dict[str, Any]) -> list[str]:
    """Names of the settings that changed; an error for those that the content of a checkpoint depends on."""
    changed = differences({"old": flat(folder.read_config()), "new": flat(settings)})
    for name, values in changed.items():
        old, new = values.get("old"), values.get("new")
        if is_fixed(name) or (name == "algorithm.kl_coef" and not old):
            takes_weights = "policy" in settings and not name.startswith(
                "policy."
            )  # else they do not fit, or it is text
            begin = f" with policy.init_from={str(folder.path)!r}" if takes_weights else ""
            raise ConfigError(
                f"{name} cannot change from {old!r:.80} to {new!r:.80}: the checkpoint was made with it; fix: a new run{begin}"
            )
    return list(changed)
