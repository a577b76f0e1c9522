"""The runs below a folder, as the list of the viewer shows them."""

import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.errors import RunFolderError
from groupwise.report.folder import RunFolder
from groupwise.report.page.page import subject

MAX_DEPTH = 3
"""Folders between the one that is shown and a run."""
Points = list[tuple[int, float]]


class Row(NamedTuple):
    """A run in the list."""

    name: str
    subject: str = ""
    algorithm: str = ""
    seed: str = ""
    state: str = ""
    env_steps: int = 0
    training: Points = []
    evaluations: Points = []
    problem: str = ""
    """Why it cannot be read; empty where it can."""


def find_runs(root: Path) -> dict[str, Path]:
    """The run folders in a folder by their names in it, the newest first; it may be a run itself. Links are not followed."""
    if (root / "config.json").is_file():
        return {root.resolve().name: root}
    found = []
    for place, folders, files in os.walk(root):
        path = Path(place)
        if "config.json" in files:
            found.append(path)
        if "config.json" in files or len(path.relative_to(root).parts) >= MAX_DEPTH:
            folders.clear()
    found.sort(key=lambda path: -_stamp(path / "config.json")[0])
    return {path.relative_to(root).as_posix(): path for path in found}


def version_of(*paths: Path) -> str:
    """Changes whenever what is shown of these runs does."""
    folders = [*map(RunFolder, paths)]
    files = [
        file for one in folders for file in (one.config, one.metrics, one.summary, one.groups, one.video, one.frames)
    ]
    stamps = [(str(file), *_stamp(file)) for file in files], [one.is_training for one in folders]
    return sha256(repr(stamps).encode()).hexdigest()[:16]


class Overview:
    """Rows of runs, each read again when it has changed."""

    def __init__(self) -> None:
        self._rows: dict[Path, tuple[str, Row]] = {}

    def row(self, name: str, path: Path) -> Row:
        """A run."""
        version = version_of(path)
        known = self._rows.get(path)
        if known is None or known[0] != version:
            known = self._rows[path] = version, _read(name, path)
        row = known[1]
        return row._replace(state="training") if RunFolder(path).is_training else row


def _read(name: str, path: Path) -> Row:
    try:
        folder = RunFolder.open(path)
        config, metrics, summary = folder.read_config(), folder.read_metrics(), folder.read_summary()
    except RunFolderError as error:
        return Row(name, problem=str(error))
    return Row(
        name,
        subject=subject(config, summary),
        algorithm=config["algorithm"]["name"],
        seed=str(config["seed"]),
        state=str(summary.get("stopped") or "killed"),
        env_steps=metrics[-1].get("env_steps", 0) if metrics else 0,
        training=_points(metrics, "rollout/return_mean"),
        evaluations=_points(metrics, "eval/return_mean"),
    )


def _points(metrics: list[dict[str, Any]], key: str) -> Points:
    return [(entry.get("env_steps", 0), float(entry[key])) for entry in metrics if key in entry]


def by_subject(rows: list[Row]) -> Mapping[str, list[Row]]:
    """Rows of each subject."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.subject, []).append(row)
    return found


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
