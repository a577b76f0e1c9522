"""The run folder: settings, metrics, checkpoints and pictures of a run. ``docs/run_folder.md`` lists its files."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from groupwise import plugins
from groupwise.config.base import explain
from groupwise.errors import RunFolderError
from groupwise.report.lock import held, is_held
from groupwise.report.provenance import FORMAT, provenance
from groupwise.system import files

MAX_METRICS = 2**30
"""Bytes of ``metrics.jsonl``."""
MAX_LINE = files.MIB
"""Bytes of a line in it."""
WANDB = "wandb"
"""Folder in which W&B keeps its files and links."""
LOCK = ".groupwise.lock"
Model = TypeVar("Model", bound=BaseModel)
Count = Annotated[int, Field(ge=0, lt=2**63)]


class _Provenance(BaseModel, strict=True, extra="allow"):
    """In ``config.json``."""

    format: int = 1
    run_id: str
    plugins: list[str] = []
    given_in_python: list[str] = []
    versions: dict[str, Any] = {}
    git: dict[str, Any] | None = None
    machine: dict[str, Any] = {}


class _Named(BaseModel, strict=True, extra="allow"):
    name: str


class _Settings(BaseModel, strict=True, extra="allow"):
    """What those rely on who read ``config.json`` without the classes of settings."""

    algorithm: _Named
    seed: int
    env: dict[str, Any] = {}
    task: dict[str, Any] = {}
    policy: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}


_COUNTS = (
    "env_steps", "iterations", "episodes", "best_env_steps", "unsaved_env_steps", "unlogged_iterations",
    "updates_without_gradient",
)  # fmt: skip
_NUMBERS = ("seconds", "peak_memory_mib", "return_mean", "best_return_mean", "success_rate", "training_return_mean")
_OPTIONAL: Any = dict.fromkeys(_COUNTS, (Count, 0)) | dict.fromkeys(_NUMBERS, (float | None, None))
_Summary = create_model("_Summary", __config__=ConfigDict(strict=True, extra="allow"), **_OPTIONAL)
"""What is read again of ``summary.json``."""


class _Entry(BaseModel, strict=True, extra="allow"):
    """A line of ``metrics.jsonl``."""

    __pydantic_extra__: dict[str, float]
    iteration: Count
    env_steps: Count = 0


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
        self.videos = path / "videos"
        self.tensorboard = path / "tensorboard"
        self.groups = path / "groups"
        self.frames = path / "frames.json"
        self.report = path / "report.html"

    @classmethod
    def create(
        cls, config: Mapping[str, Any], path: Path | None = None, *, name: str = "run", **known: Sequence[str]
    ) -> "RunFolder":
        """A new folder with ``config`` in its ``config.json``.

        Args:
            path: None makes ``runs/<name>-<time>``, numbered where it is taken.
            known: lists for its provenance: ``given_in_python`` names the objects that must come again to resume.

        Raises:
            RunFolderError: ``path`` is a file, or a folder that is not empty.
        """
        if path is None:
            path = _fresh_path(name)
        cls.check_free(path)
        folder = cls(path)
        made = {**config, "provenance": {**provenance(), **{key: list(names) for key, names in known.items()}}}
        with folder.locked():
            cls.check_free(path)  # again: two runs may have found the same empty folder
            folder.remove_leftovers()
            with _writing(folder.config):
                files.write(folder.config, _to_json(made))
        return folder

    @property
    def is_training(self) -> bool:
        """Whether a process trains in it."""
        return is_held(self.path / LOCK)

    @contextmanager
    def locked(self, rank: int = 0) -> Iterator[None]:
        """Keep every other process out while this one trains; rank 0 does it for all.

        Raises:
            RunFolderError: another one trains (names it), or the folder cannot be written.
        """
        if rank != 0:
            yield
            return
        with ExitStack() as lock:
            with _writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                lock.enter_context(held(self.path / LOCK))
            yield

    @staticmethod
    def check_free(path: Path) -> None:
        """Refuse a path that ``create`` would refuse.

        Raises:
            RunFolderError: ``path`` is a file, or a folder that is not empty.
        """
        if not is_free(path):
            raise RunFolderError(
                f"run folder {str(path)!r} is taken; fix: give another one, or continue that run: "
                f"{plugins.command('resume', path)}"
            )

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """The folder of an earlier run.

        Raises:
            RunFolderError: it does not exist, is no run folder, or has a link that leads out of it.
        """
        folder = cls(path)
        if path.is_file():
            fix = f"its folder, {path.parent}" if path.name == folder.config.name else "gw.load_config reads settings"
            raise RunFolderError(f"{path} is a file, expected a run folder; fix: {fix}")
        if not path.is_dir():
            raise RunFolderError(f"there is no run folder {str(path)!r}; fix: give the path that training printed")
        if not folder.config.is_file():
            inside = [child.name for child in sorted(path.iterdir()) if cls(child).config.is_file()]
            fix = f"a run in it, as {path / inside[0]}" if inside else "a folder that training made"
            raise RunFolderError(f"{path} is no run folder: config.json is missing; fix: give {fix}")
        if (link := files.link_out_of(path, without=WANDB)) is not None:
            raise RunFolderError(
                f"{link} is a link that leads out of the run folder; fix: put what it leads to in its place, or use no "
                "folder of a stranger"
            )
        return folder

    def read_config(self) -> dict[str, Any]:
        """The settings of the run, without its provenance.

        Raises:
            RunFolderError: the file is damaged, or another program's.
        """
        config = _read_object(self.config)
        try:
            _Settings.model_validate(config)
        except ValidationError as error:
            wrong = error.errors()[0]
            raise RunFolderError(
                f"{self.config} holds no settings of a run ({'.'.join(map(str, wrong['loc']))}: {wrong['msg']}); "
                "fix: a folder that training made"
            ) from error
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
        if isinstance(kept, dict):
            kept = {"run_id": self.path.name} | kept
        return _checked(_Provenance, kept, self.config).model_dump()

    def rewrite_config(self, config: Mapping[str, Any]) -> None:
        """Replace the settings, as a resume with more steps does; provenance stays."""
        kept = _read_object(self.config).get("provenance")
        with _writing(self.config):
            files.write(self.config, _to_json({**config, "provenance": kept}))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace ``summary.json``."""
        files.write(self.summary, _to_json(summary))

    def read_summary(self) -> dict[str, Any]:
        """What the run reached; empty if it was killed.

        Raises:
            RunFolderError: the file is damaged.
        """
        if not self.summary.is_file():
            return {}
        summary = _read_object(self.summary)
        _checked(_Summary, summary, self.summary)
        return summary

    def read_metrics(self) -> list[dict[str, Any]]:
        """One dictionary per iteration; an incomplete last line is left out.

        Raises:
            RunFolderError: another line is damaged (names it).
        """
        return [_parse_entry(self.metrics, number, line) for number, line in enumerate(self._lines(), start=1)]

    def truncate_metrics(self, iteration: int) -> None:
        """Drop what was logged after ``iteration``; a resumed run writes it again."""
        kept = [entry for entry in self.read_metrics() if entry["iteration"] <= iteration]
        with _writing(self.metrics):
            files.write(self.metrics, "".join(json.dumps(entry) + "\n" for entry in kept).encode())

    def check_never_saved(self, metric: str, interval: int | float) -> None:
        """Refuse a run that has no checkpoint left: to begin again would delete what it learned.

        Args:
            metric: what the interval between checkpoints counts, such as ``env_steps``.
            interval: between checkpoints.

        Raises:
            RunFolderError: it had one.
        """
        metrics = self.read_metrics()
        saved = len(metrics) > 1 and metrics[-2].get(metric, 0) >= interval  # before the next iteration began
        summary = self.read_summary()
        if 0 < summary.get("env_steps", 0) == summary.get("unsaved_env_steps"):  # the disk was full all the time
            return
        finished = summary.get("stopped", "failed") not in ("failed", "interrupted")
        if saved or (metrics and finished):
            raise RunFolderError(
                f"{self.path} was trained until step {metrics[-1].get('env_steps', 0):,}, but there is no checkpoint in "
                f"{self.checkpoints}; fix: restore it, or train again in another folder"
            )

    def remove_leftovers(self) -> None:
        """Remove what a kill left half written, and the summary, which is of a former end."""
        files.remove(self.summary)
        for folder in (self.path, self.checkpoints, self.groups):
            for path in folder.glob(".*.partial"):
                files.remove(path)

    def _lines(self) -> Iterator[bytes]:
        """The complete lines of ``metrics.jsonl``."""
        if not self.metrics.is_file():
            return
        try:
            with files.reading(self.metrics, MAX_METRICS) as file:
                while (line := file.readline(MAX_LINE + 1)).endswith(b"\n"):
                    yield line
                files.check_size(len(line), MAX_LINE)
        except (OSError, ValueError) as error:
            raise _damaged(self.metrics, error) from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Explain why a file without which training makes no sense cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written ({error}); fix: make room, or give rights to write") from error


def _parse_entry(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = files.parse_json(line)
        _Entry.model_validate(entry)
    except ValueError as error:
        why = explain(error.errors()[0]) if isinstance(error, ValidationError) else error
        raise RunFolderError(f"{path}, line {number} is damaged: {why!s:.200}; fix: delete that line") from error
    return entry


def is_free(path: Path) -> bool:
    """Whether it does not exist, or is a folder that is empty or was left by a kill before its settings were complete."""
    return not path.exists() or (
        path.is_dir() and not {*path.iterdir()} - {path / LOCK, *path.glob(".config.json.*.partial")}
    )


def _fresh_path(name: str) -> Path:
    stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in count(1):
        path = Path("runs", stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            break
    return path


def _to_json(data: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(data, indent=2)}\n".encode()


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = files.parse_json(files.read(path, files.MAX_SETTINGS))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if not isinstance(data, dict):
        raise _damaged(path, "it holds no JSON object")
    return data


def _damaged(path: Path, why: object) -> RunFolderError:
    return RunFolderError(f"{path} is damaged: {why}; fix: restore it, or train again")


def _checked(kind: type[Model], data: object, path: Path) -> Model:
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _damaged(path, explain(error.errors()[0])) from error
