"""The run folder: settings, metrics, checkpoints and pictures of a run. ``docs/run_folder.md`` lists its files."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from uuid import uuid4

from groupwise import plugins
from groupwise.errors import RunFolderError

FORMAT = 2
_PACKAGES = ("groupwise", "torch", "tensordict", "gymnasium", "numpy")


class RunFolder:
    """Paths of a run's files, and their content as plain data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.latest = self.checkpoints / "latest"
        self.best = self.checkpoints / "best"
        self.curve = path / "curve.png"
        self.video = path / "policy.gif"
        self.tensorboard = path / "tensorboard"
        self.groups = path / "groups"

    @classmethod
    def create(
        cls, config: Mapping[str, Any], path: Path | None = None, *, name: str = "run", given: Sequence[str] = ()
    ) -> "RunFolder":
        """A new folder with ``config`` in its ``config.json``.

        Args:
            path: None makes ``runs/<name>-<time>``, numbered where it is taken.
            given: what came as Python objects, and must come again to resume.

        Raises:
            RunFolderError: ``path`` is a file, or a folder that is not empty.
        """
        if path is None:
            path = _fresh_path(name)
        else:
            cls.check_free(path)
            path.mkdir(parents=True, exist_ok=True)
        folder = cls(path)
        try:
            with folder.config.open("x", encoding="utf-8") as file:  # two runs may have found the same empty folder
                file.write(_to_json({**config, "provenance": {**provenance(), "given_in_python": list(given)}}))
        except FileExistsError as error:
            raise _taken(path) from error
        return folder

    @staticmethod
    def check_free(path: Path) -> None:
        """Refuse a path that ``create`` would refuse.

        Raises:
            RunFolderError: ``path`` is a file, or a folder that is not empty.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise _taken(path)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """The folder of an earlier run.

        Raises:
            RunFolderError: it does not exist, or is no run folder.
        """
        folder = cls(path)
        if not path.is_dir():
            raise RunFolderError(f"there is no run folder {str(path)!r}; fix: give the path that training printed")
        if not folder.config.is_file():
            inside = [child.name for child in sorted(path.iterdir()) if cls(child).config.is_file()]
            fix = f"a run in it, as {path / inside[0]}" if inside else "a folder that training made"
            raise RunFolderError(f"{path} is no run folder: config.json is missing; fix: give {fix}")
        return folder

    def read_config(self) -> dict[str, Any]:
        """The settings of the run, without its provenance.

        Raises:
            RunFolderError: the file is damaged.
        """
        config = _read_object(self.config)
        return {key: value for key, value in config.items() if key != "provenance"}

    def check_format(self) -> None:
        """Refuse a run of another version, whose settings may have other names.

        Raises:
            RunFolderError: it is one.
        """
        if (found := self.read_provenance()["format"]) != FORMAT:
            raise RunFolderError(
                f"{self.path} was made by {'an earlier' if found < FORMAT else 'a later'} version of groupwise (format "
                f"{found}, this one reads format {FORMAT}); fix: train again, or use that version"
            )

    def read_provenance(self) -> dict[str, Any]:
        """What ``provenance`` found when the run began, and the names of objects that were "given_in_python".

        Raises:
            RunFolderError: the file is damaged.
        """
        kept = _read_object(self.config).get("provenance") or {}
        return {"format": 1, "plugins": [], "given_in_python": []} | kept

    def rewrite_config(self, config: Mapping[str, Any]) -> None:
        """Replace the settings, as a resume with more steps does; provenance stays."""
        kept = _read_object(self.config).get("provenance")
        _replace(self.config, _to_json({**config, "provenance": kept}))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace ``summary.json``."""
        _replace(self.summary, _to_json(summary))

    def read_summary(self) -> dict[str, Any]:
        """What the run reached; empty if it was killed.

        Raises:
            RunFolderError: the file is damaged.
        """
        return _read_object(self.summary) if self.summary.is_file() else {}

    def read_metrics(self) -> list[dict[str, Any]]:
        """One dictionary per iteration; an incomplete last line is left out.

        Raises:
            RunFolderError: another line is damaged (names it).
        """
        lines = self.metrics.read_bytes().splitlines(keepends=True) if self.metrics.is_file() else []
        if lines and not lines[-1].endswith(b"\n"):
            del lines[-1]
        entries = []
        for number, line in enumerate(lines, start=1):
            try:
                entries.append(json.loads(line))
                _ = entries[-1]["iteration"]
            except (ValueError, KeyError, TypeError) as error:
                raise RunFolderError(
                    f"{self.metrics}, line {number} is damaged: {error!r}; fix: delete that line"
                ) from error
        return entries

    def truncate_metrics(self, iteration: int) -> None:
        """Drop what was logged after ``iteration``; a resumed run writes it again."""
        kept = [entry for entry in self.read_metrics() if entry["iteration"] <= iteration]
        _replace(self.metrics, "".join(json.dumps(entry) + "\n" for entry in kept))


def provenance() -> dict[str, Any]:
    """Versions, git state, plugins and command: what repeating a run needs in addition to its settings."""
    return {
        "format": FORMAT,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "git": _git_state(),
        "run_id": uuid4().hex,
        "plugins": plugins.loaded(),
        "command": shlex.join(sys.argv),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_state() -> dict[str, Any] | None:
    """Commit of the working folder and whether tracked files differ from it; None outside of a repository."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], capture_output=True, text=True, check=True, timeout=5).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _fresh_path(name: str) -> Path:
    stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{datetime.now():%Y%m%d-%H%M%S}"
    path, number = Path("runs", stem), 1
    while True:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            path = Path("runs", f"{stem}-{number}")
        else:
            return path


def _taken(path: Path) -> RunFolderError:
    return RunFolderError(
        f"run folder {str(path)!r} is taken; fix: give another one, or continue that run: "
        f"groupwise resume {path}{plugins.options(plugins.loaded())}"
    )


def _to_json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged: {error}; fix: restore it, or train again") from error
    if not isinstance(data, dict):
        raise RunFolderError(f"{path} is damaged: it holds no JSON object; fix: restore it, or train again")
    return data


def _replace(path: Path, text: str) -> None:
    """Write a file atomically."""
    partial = path.with_name(path.name + ".partial")
    write_through(partial, text.encode())
    os.replace(partial, path)


def write_through(path: Path, data: bytes) -> None:
    """Write a file that survives a power cut."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
