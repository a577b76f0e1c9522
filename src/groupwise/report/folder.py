"""The run folder: one place for everything that a training run leaves behind.

config.json      every setting, versions, git state, command
metrics.jsonl    one JSON object per iteration
summary.json     what it reached, why it ended
checkpoints/     latest/ and best/
curve.png        episode return against environment steps
policy.gif       an episode of the greedy policy, where the environment renders
groups/          of texts: some groups of the rollout before each evaluation, as Parquet
"""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from groupwise import plugins
from groupwise.errors import RunFolderError

FORMAT = 2
"""Of run folders; 1 had other names of settings."""
_PACKAGES = ("groupwise", "torch", "tensordict", "gymnasium", "numpy")


class RunFolder:
    """Paths of a run, and its files as plain data."""

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
        """A folder that no other run has or will get, with ``config`` in its ``config.json``.

        Args:
            path: None makes ``runs/<name>-<time>``, numbered where it is taken.
            given: what came as Python objects, and must come again to go on.

        Raises:
            RunFolderError: ``path`` is a file or a folder with something in it.
        """
        folder = cls(_fresh_path(name) if path is None else _claimable(path))
        try:
            with folder.config.open("x", encoding="utf-8") as file:  # two runs may have found the same empty folder
                file.write(_to_json({**config, "provenance": {**provenance(), "given_in_python": list(given)}}))
        except FileExistsError as error:
            raise _taken(folder.path) from error
        return folder

    @staticmethod
    def check_free(path: Path) -> None:
        """Find out early what ``create`` would find.

        Raises:
            RunFolderError: ``path`` is a file or a folder with something in it.
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
            fix = f"one of those in it, as in {path / inside[0]}" if inside else "a folder that training made"
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
        """Refuse settings that were written by another version, whose names may differ.

        Raises:
            RunFolderError: they were.
        """
        if (found := self._read_provenance().get("format", 1)) != FORMAT:
            made = f"by {'an earlier' if found < FORMAT else 'a later'} version of groupwise"
            raise RunFolderError(
                f"{self.path} was made {made} (format {found}, this one reads format {FORMAT}); fix: train again, or use that version"
            )

    def read_id(self) -> str:
        """A name for trackers that no other run has, wherever the folder lies."""
        return str(self._read_provenance().get("run_id", self.path.name))

    def read_given(self) -> list[str]:
        """What the run was given as Python objects: any of "env", "policy"."""
        return list(self._read_provenance().get("given_in_python", []))

    def read_plugins(self) -> list[str]:
        """The plugins that the run's command named."""
        return list(self._read_provenance().get("plugins", []))

    def read_versions(self) -> dict[str, str]:
        """Of Python, this library and others, and the git commit, as far as they are known."""
        found = self._read_provenance()
        commit = (found.get("git") or {}).get("commit")
        return {name: str(value) for name, value in [*found.get("versions", {}).items(), ("commit", commit)] if value}

    def rewrite_config(self, config: Mapping[str, Any]) -> None:
        """Replace the settings, as a resume with more steps does; where the run came from stays."""
        kept = _read_object(self.config).get("provenance")
        _replace(self.config, _to_json({**config, "provenance": kept}))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace ``summary.json``."""
        _replace(self.summary, _to_json(summary))

    def read_summary(self) -> dict[str, Any]:
        """What the run reached; empty if it was killed before it could say.

        Raises:
            RunFolderError: the file is damaged.
        """
        return _read_object(self.summary) if self.summary.is_file() else {}

    def read_metrics(self) -> list[dict[str, Any]]:
        """One dictionary per iteration; a last line that a kill cut short is left out.

        Raises:
            RunFolderError: another line is damaged (names it).
        """
        return [entry for entry, _ in self._metrics_lines()]

    def truncate_metrics(self, iteration: int) -> None:
        """Drop what was logged after ``iteration``: a resumed run writes it again."""
        kept = "".join(line for entry, line in self._metrics_lines() if entry["iteration"] <= iteration)
        _replace(self.metrics, kept)

    def _read_provenance(self) -> dict[str, Any]:
        found = _read_object(self.config).get("provenance") or {}
        if not isinstance(found, dict):
            raise RunFolderError(f"{self.config} is damaged: provenance is no object; fix: delete it")
        return found

    def _metrics_lines(self) -> Iterator[tuple[dict[str, Any], str]]:
        if not self.metrics.is_file():
            return
        lines = self.metrics.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            try:
                entry = json.loads(line)
                _ = entry["iteration"]
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):
                    return
                raise RunFolderError(
                    f"{self.metrics}, line {number} is damaged: {error!r}; fix: delete that line"
                ) from error
            if not line.endswith(b"\n"):
                return
            yield entry, line.decode()


def provenance() -> dict[str, Any]:
    """Versions, git state, plugins and command: what is needed to repeat a run besides its settings."""
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
    """Commit of the working folder's repository and whether tracked files differ from it; None outside of one."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], capture_output=True, text=True, check=True, timeout=5).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _fresh_path(name: str) -> Path:
    stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in count(1):
        path = Path("runs", stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("count() does not end")


def _claimable(path: Path) -> Path:
    RunFolder.check_free(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def _taken(path: Path) -> RunFolderError:
    return RunFolderError(
        f"run folder {str(path)!r} is taken; fix: give another one, or go on with `groupwise resume {path}{plugins.options(plugins.loaded())}`"
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
    """Write a file at once: a reader or a kill sees the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
