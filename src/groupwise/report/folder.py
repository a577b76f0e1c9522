"""The run folder: settings, metrics, checkpoints and pictures of a run. ``docs/report.md`` lists its files."""

import json
import math
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeAlias
from uuid import uuid4

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from groupwise import plugins
from groupwise import system as files
from groupwise.config.base import explain
from groupwise.config.run import EvaluationMetric
from groupwise.errors import GroupwiseError, RunFolderError
from groupwise.system import printable

# Provenance: facts needed to repeat a run, in addition to its settings

FORMAT = 2
"""Version of the run folder's files."""
_PACKAGES = ("groupwise", "torch", "tensordict", "gymnasium", "numpy")


def provenance() -> dict[str, Any]:
    """Versions, git state, machine, plugins and command."""
    versions = {"python": platform.python_version(), "groupwise": None}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):  # of groupwise, where its source is on the path
            versions[package] = version(package)
    return {
        "format": FORMAT,
        "versions": versions,
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
        "git": _git_state(),
        "run_id": uuid4().hex,
        "plugins": plugins.loaded(),
        "command": shlex.join(sys.argv),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _git_state() -> dict[str, Any] | None:
    """Commit of the working folder and whether tracked files differ from it; None outside of a repository.

    The repository may be a stranger's, whose configuration can name programs to run (``core.fsmonitor``, filters). So files
    are compared by way of another, temporary git folder, which has the objects and the index, but no configuration.
    """
    program = files.find_program("git")
    if program is None:
        return None

    def git(*args: str, **env: str) -> str:
        command = [program, "-c", "core.fsmonitor=false", *args]
        done = subprocess.run(  # noqa: S603  the user's git, with the words below
            command, capture_output=True, text=True, check=True, timeout=5, env=os.environ | env
        )
        return done.stdout.strip()

    try:
        commit, tree = git("rev-parse", "HEAD", "--show-toplevel").splitlines()
        objects, index = (
            str(Path(path).absolute())
            for path in git("rev-parse", "--git-path", "objects", "--git-path", "index").splitlines()
        )
        with TemporaryDirectory() as own:
            Path(own, "refs").mkdir()
            Path(own, "HEAD").write_text(f"{commit}\n", encoding="ascii")
            env = {"GIT_DIR": own, "GIT_WORK_TREE": tree, "GIT_OBJECT_DIRECTORY": objects, "GIT_INDEX_FILE": index}
            status = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
            dirty = bool(git(*status, **env, GIT_OPTIONAL_LOCKS="0"))
        return {"commit": commit, "dirty": dirty}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


MAX_METRICS = 2**30
"""Bytes of ``metrics.jsonl``."""
MAX_LINE = files.MIB
"""Most bytes of a line of it."""
WANDB = "wandb"
"""Folder in which W&B keeps its files and links."""
LOCK = ".groupwise.lock"
"""File with the process that trains in the folder; its flock is released when that process ends, even if it is killed."""
_MAX_LOCK = 4096
Count = Annotated[int, Field(ge=0, lt=2**63)]
_Amount: TypeAlias = Annotated[float, Field(gt=0)] | None


class _Provenance(BaseModel, strict=True, extra="allow"):
    format: int = 1
    run_id: str = ""
    plugins: list[str] = []
    given_in_python: list[str] = []
    forked_from: list[str] = []
    resumed: list[dict[str, str]] = []
    scores_from: Count = 0
    versions: dict[str, Any] = {}
    git: dict[str, Any] | None = None
    machine: dict[str, Any] = {}


class _Named(BaseModel, strict=True, extra="allow"):
    name: str


class _Config(BaseModel, strict=True, extra="allow"):
    """Settings that are needed where ``config.json`` is read without the classes of settings, and provenance."""

    algorithm: _Named
    seed: int
    env: dict[str, Any] = {}
    task: dict[str, Any] = {}
    policy: dict[str, Any] = {}
    evaluation: dict[str, Any] = {}
    total_steps: _Amount = None
    total_iterations: _Amount = None
    total_epochs: _Amount = None
    stop: dict[str, float | None] = {}
    provenance: _Provenance = _Provenance()


_COUNTS = (
    "env_steps", "iterations", "episodes", "best_env_steps", "unsaved_env_steps", "unlogged_iterations",
    "updates_without_gradient",
)  # fmt: skip
_NUMBERS = ("seconds", "peak_memory_mib", "return_mean", "best_return_mean", "success_rate", "training_return_mean")
_OPTIONAL: Any = dict.fromkeys(_COUNTS, (Count, 0)) | dict.fromkeys(_NUMBERS, (float | None, None))
_Summary = create_model("_Summary", __config__=ConfigDict(strict=True, extra="allow"), **_OPTIONAL)
"""Entries of ``summary.json`` that are read again."""


class _Entry(BaseModel, strict=True, extra="allow", allow_inf_nan=False):
    """A line of ``metrics.jsonl``. Numbers that are not finite are never written."""

    __pydantic_extra__: dict[str, float]
    iteration: Count
    env_steps: Count = 0


class RunFolder:
    """Paths of a run's files, and their content as plain data.

    Args:
        here: what a relative path is seen from; None: the working folder. Environments may change that, so the paths are whole.
    """

    def __init__(self, path: Path, here: Path | None = None) -> None:
        self._given = path
        self.path = path = (here or Path.cwd()) / path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.checkpoints = path / "checkpoints"
        self.latest = self.checkpoints / "latest"
        self.best = self.checkpoints / "best"
        self.curve = path / "curve.svg"
        self.video = path / "policy.gif"
        self.videos = path / "videos"
        self.tensorboard = path / "tensorboard"
        self.groups = path / "groups"
        self.frames = path / "frames.json"
        self.report = path / "report.html"

    @classmethod
    def create(
        cls,
        config: Mapping[str, Any],
        path: Path | None = None,
        *,
        name: str = "run",
        here: Path | None = None,
        **known: Sequence[str],
    ) -> "RunFolder":
        """A new folder with ``config`` in its ``config.json``; a ``RunFolderError`` if something is there.

        Args:
            path: None makes ``runs/<name>-<time>``, numbered where it is taken.
            here: as of the class.
            known: lists for its provenance: ``given_in_python`` names the objects that must come again to resume.
        """
        if path is None:
            stem = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{datetime.now():%Y%m%d-%H%M%S}"
            for number in count(1):
                path = Path("runs", stem if number == 1 else f"{stem}-{number}")
                with suppress(FileExistsError):
                    cls(path, here).path.mkdir(parents=True)
                    break
        assert path is not None
        folder = cls(path, here)
        cls.check_free(folder.shown)
        made = {**config, "provenance": {**provenance(), **{key: list(names) for key, names in known.items()}}}
        with folder.locked():
            cls.check_free(folder.path)  # again: two runs may have found the same empty folder
            folder.remove_leftovers()
            with _writing(folder.config):
                files.write(folder.config, _to_json(made))
        return folder

    @property
    def shown(self) -> Path:
        """The path as it was given, for messages; the whole one where the working folder is another now."""
        return self._given if self._given.absolute() == self.path else self.path

    @property
    def is_training(self) -> bool:
        """Whether a process trains in the folder."""
        try:
            with files.reading(self.path / LOCK, _MAX_LOCK) as file:
                return not files.lock(file, exclusive=False)
        except (OSError, ValueError):
            return False

    @property
    def is_agent(self) -> bool:
        """Whether ``LanguageAgent.save`` wrote it: weights without metrics."""
        return self.latest.is_dir() and not self.metrics.exists()

    @contextmanager
    def locked(self, rank: int = 0) -> Iterator[None]:
        """Keep every other process out while this one trains; rank 0 does it for all.

        A ``RunFolderError`` names the process that trains, or says why the folder cannot be written.
        """
        if rank != 0:
            yield
            return
        with ExitStack() as stack:
            with _writing(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(files.appending(self.path / LOCK))
                for _ in range(25):  # ``is_training`` keeps the lock for a moment
                    if files.lock(file, exclusive=True):
                        break
                    time.sleep(0.02)
                else:
                    holder = files.read(self.path / LOCK, _MAX_LOCK).decode(errors="replace") or "another process"
                    raise RunFolderError(f"{self.shown} is in use by {printable(holder)}; fix: wait, or stop it")
                if sys.platform != "win32":  # otherwise a child that outlives this process keeps the lock
                    os.register_at_fork(after_in_child=file.close)
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()!r}".encode())
                file.flush()
            try:
                yield
            finally:
                with suppress(OSError):
                    file.truncate(0)

    @staticmethod
    def check_free(path: Path) -> None:
        """Refuse a path that is a file, or a folder that is not empty, by a ``RunFolderError``."""
        if not is_free(path):
            is_run = any((path / name).exists() for name in ("config.json", "population.json"))
            again = f", or continue that run: {plugins.command('resume', path)}" if is_run else ""
            raise RunFolderError(f"run folder {str(path)!r} is taken; fix: another one{again}")

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """The folder of an earlier run; a ``RunFolderError`` if it is none, or has a link that leads out of it."""
        folder = cls(path)
        if not path.is_dir():
            raise RunFolderError(f"there is no run folder {str(path)!r}; fix: give the folder that training printed")
        if not folder.config.is_file():
            inside = [child.name for child in sorted(path.iterdir()) if cls(child).config.is_file()]
            fix = f"a run in it, as {path / inside[0]}" if inside else "a folder that training made"
            raise RunFolderError(f"{path} is no run folder: config.json is missing; fix: give {fix}")
        if any(path.glob("*model*.safetensors")) and not folder.metrics.is_file():
            raise RunFolderError(f"{path} is a model's folder, not a run's; fix: give a folder that training made")
        if (link := files.link_out_of(path, without=WANDB)) is not None:
            raise RunFolderError(
                f"{link} is a link that leads out of the run folder; fix: put what it leads to in its place, or use no "
                "folder of a stranger"
            )
        return folder

    def read_config(self) -> dict[str, Any]:
        """The settings of the run, without its provenance; a ``RunFolderError`` if the file is damaged."""
        config = _read_object(self.config, _Config)
        return {key: value for key, value in config.items() if key != "provenance"}

    def check_format(self) -> None:
        """Refuse a run of another version, whose settings may have other names, by a ``RunFolderError``."""
        if (found := self.read_provenance()["format"]) != FORMAT:
            raise RunFolderError(
                f"{self.shown} was made by {'an earlier' if found < FORMAT else 'a later'} version of groupwise (format "
                f"{found}, this one reads format {FORMAT}); fix: train again, or use that version"
            )

    def read_provenance(self) -> dict[str, Any]:
        """Provenance from the run's begin, and objects "given_in_python"; a ``RunFolderError`` if the file is damaged."""
        return _Config.model_validate(_read_object(self.config, _Config)).provenance.model_dump()

    def rewrite_config(self, config: Mapping[str, Any], *resumed: Mapping[str, Any], **known: Any) -> None:
        """Replace the settings, as a resume with more steps does, which is noted, and ``known`` parts of the provenance."""
        kept = _read_object(self.config, _Config).get("provenance", {})
        noted = {"resumed": [*kept.get("resumed", ()), *resumed]} if resumed else {}
        with _writing(self.config):
            files.write(self.config, _to_json({**config, "provenance": kept | noted | known}))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace ``summary.json``."""
        files.write(self.summary, _to_json(summary))

    def read_summary(self) -> dict[str, Any]:
        """Scores and end of the run, empty if it was killed; a ``RunFolderError`` if the file is damaged."""
        return _read_object(self.summary, _Summary) if self.summary.is_file() else {}

    def read_metrics(self) -> list[dict[str, Any]]:
        """One dictionary per iteration; an incomplete last line is left out, another damaged line an error."""
        found: list[dict[str, Any]] = []
        if not self.metrics.exists():
            return found
        try:
            with files.reading(self.metrics, MAX_METRICS) as file:
                while (line := file.readline(MAX_LINE + 1)).endswith(b"\n"):
                    entry = files.parse_json(line)
                    _Entry.model_validate(entry)
                    found.append(entry)
                files.check_size(len(line), MAX_LINE)
        except (OSError, ValueError) as error:
            raise _damaged(f"{self.metrics}, line {len(found) + 1}", error, "delete that line") from error
        return found

    def read_scored(self) -> list[dict[str, Any]]:
        """The metrics, without the evaluations that do not count: those up to the iteration ``scores_from`` of the provenance.

        ``best`` was not chosen among these, as they were of other settings, or it was lost, as in forks.
        """
        since = self.read_provenance()["scores_from"]
        return [
            {key: value for key, value in entry.items() if entry["iteration"] > since or not key.startswith("eval/")}
            for entry in self.read_metrics()
        ]

    def truncate_metrics(self, iteration: int) -> None:
        """Drop the log after ``iteration``; a resumed run writes it again."""
        kept = [entry for entry in self.read_metrics() if entry["iteration"] <= iteration]
        with _writing(self.metrics):
            files.write(self.metrics, "".join(json.dumps(entry) + "\n" for entry in kept).encode())

    def check_never_saved(self, metric: str, interval: int | float) -> None:
        """Refuse a run that has no checkpoint left: starting again would delete its trained weights.

        Args:
            metric: unit of the interval between checkpoints, such as ``env_steps``.
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
        """Remove half-written files of a killed process, and the summary of an earlier end."""
        files.remove(self.summary)
        for folder in (self.path, self.checkpoints, self.groups):
            for path in folder.glob(".*.partial"):
                files.remove(path)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Explain why a file without which training makes no sense cannot be written."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written ({error}); fix: make room, or give rights to write") from error


DAMAGE = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""Errors of code that reads values of a wrong kind or range."""


@contextmanager
def explained(run: Path) -> Iterator[None]:
    """Raise a ``RunFolderError`` where a run cannot be shown because its files hold what no run writes."""
    try:
        yield
    except GroupwiseError:
        raise
    except DAMAGE as error:
        raise RunFolderError(
            f"{run} cannot be shown: its files hold values of a wrong kind or range ({type(error).__name__}: "
            f"{error!s:.200}); fix: restore config.json, metrics.jsonl and groups, or train again"
        ) from error


def is_free(path: Path) -> bool:
    """Whether it does not exist, or is a folder that is empty or was left by a kill before its settings were complete."""
    left = (path / LOCK, *path.glob(".config.json.*.partial"), *path.glob(".population.json.*.partial"))
    return not path.exists() or (path.is_dir() and not {*path.iterdir()}.difference(left))


def _to_json(data: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(data, indent=2)}\n".encode()


def _read_object(path: Path, kind: type[BaseModel]) -> dict[str, Any]:
    """A JSON object that has what ``kind`` needs."""
    try:
        data: dict[str, Any] = files.parse_json(files.read(path, files.MAX_SETTINGS))
        kind.model_validate(data)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    return data


def _damaged(place: object, error: Exception, fix: str = "restore it, or train again") -> RunFolderError:
    why = explain(error.errors())[0] if isinstance(error, ValidationError) else error
    return RunFolderError(f"{place} is damaged: {why!s:.200}; fix: {fix}")


# Scores of a run, and confidence intervals

SCORES: dict[EvaluationMetric, str] = {"return": "return_mean", "success_rate": "success_rate"}
"""Names of scores in metrics and summaries."""


def scores_of(metrics: list[dict[str, Any]], metric: EvaluationMetric = "return") -> dict[str, Any]:
    """Scores of the last evaluation, of the best one by ``metric``, and of training; and its updates that changed nothing."""
    if not metrics:
        return {"env_steps": 0, "iterations": 0, "seconds": 0.0}
    last = metrics[-1]
    scores = {"env_steps": last.get("env_steps", 0), "iterations": last["iteration"]}
    scores["seconds"] = last.get("time/total_seconds", 0.0)
    if without_gradient := sum(entry.get("train/grad_norm") == 0 for entry in metrics):
        scores["updates_without_gradient"] = without_gradient
    if evaluations := evaluations_of(metrics):
        key = f"eval/{SCORES[metric]}"
        final, best = evaluations[-1], max(evaluations, key=lambda entry: float(entry.get(key, -math.inf)))
        mean, episodes = final["eval/return_mean"], int(final.get("eval/episodes", 0))
        interval = interval_of(final)
        scores |= {"return_mean": mean, "ci95": None if interval is None else list(interval), "episodes": episodes}
        if cut := int(final.get("eval/cut_episodes", 0)):
            scores["cut_episodes"] = cut
        scores |= {"best_return_mean": best["eval/return_mean"], "best_env_steps": best.get("env_steps", 0)}
        if "eval/success_rate" in final:
            rate = final["eval/success_rate"]
            interval = interval_of(final, "success_rate")
            scores |= {"success_rate": rate, "success_ci95": None if interval is None else list(interval)}
            scores["best_success_rate"] = best.get("eval/success_rate")
    if (rate := with_success_rates(metrics)[-1].get("rollout/success_rate")) is not None:
        scores["training_success_rate"] = rate
    return scores | {"training_return_mean": last.get("rollout/return_mean")}


def evaluations_of(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries with an evaluation, and their success rates."""
    return [entry for entry in with_success_rates(metrics) if "eval/return_mean" in entry]


def with_success_rates(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The entries. Where some have a success rate, it is 0 in others with a return: no episode had the flag."""
    told = [part for part in ("rollout", "eval") if any(f"{part}/success_rate" in entry for entry in metrics)]
    return [
        {f"{part}/success_rate": 0.0 for part in told if f"{part}/return_mean" in entry} | {**entry}
        for entry in metrics
    ]


def interval_of(entry: Mapping[str, Any], score: str = "return_mean") -> tuple[float, float] | None:
    """95 % confidence interval of an evaluation's score; None for a return of one episode, or if the entry lacks it."""
    value, episodes = float(entry[f"eval/{score}"]), int(entry.get("eval/episodes", 0))
    if score == "success_rate":
        return wilson_95(value, episodes) if episodes else None
    return mean_ci95(value, float(entry.get("eval/return_std", math.nan)), episodes)


def mean_ci95(mean: float, std: float, count: int) -> tuple[float, float] | None:
    """Student's 95 % confidence interval of a mean, from the unbiased deviation; None for a single score."""
    if count <= 1 or math.isnan(std):
        return None
    half = student_95(count - 1) * std / math.sqrt(count)
    return mean - half, mean + half


def wilson_95(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share of ``count`` trials; also for means of numbers in [0, 1], whose variance is no larger.

    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference", eq. 6.
    """
    z = 1.959964
    centre = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low, high = (centre - half) / scale, (centre + half) / scale
    return max(0.0, min(share, low)), min(1.0, max(share, high))  # rounding may leave out shares of 0 and 1


def student_95(n: int) -> float:
    """97.5 % quantile of Student's t for ``n`` degrees of freedom, up to 4e-6 of it. scipy takes 0.3 s and 10 MiB to import.

    Source: Abramowitz and Stegun 1964, table 26.10 and eq. 26.7.5.
    """
    if n < 10:
        small = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)
        return small[n - 1]
    return 1.959964 + 2.372271 / n + 2.822499 / n**2 + 2.555850 / n**3 + 1.589534 / n**4


# Kept groups as Parquet; docs/report.md has the schema

MAX_MIB = 64
"""All files of a run together. Beyond it the oldest go, but for the first."""
MAX_WIDTH = 64
"""Numbers of an observation or action that are kept; larger ones, such as pictures, are left out."""
MAX_VALUES = 2**24
"""Values of a file; the last steps beyond them are left out."""
Values: TypeAlias = np.ndarray | list[str] | list[str | None] | None
"""A column: numbers [step] or [step, width], texts, or nothing."""
_PATTERN = "[0-9]*.parquet"


def write_groups(folder: Path, iteration: int, columns: Mapping[str, Values]) -> None:
    """Write the steps of some groups of an iteration to ``<iteration>.parquet``.

    Args:
        columns: every column of the schema but the iteration. NaN is written as null, None as a column of nulls.
    """
    import pyarrow
    import pyarrow.parquet

    count = len(columns["step"])  # type: ignore[arg-type]
    width = 1 + sum(1 if v is None or isinstance(v, list) or v.ndim == 1 else v.shape[1] for v in columns.values())
    columns = {"iteration": np.full(count, iteration), **columns}
    arrays = [_array(field.type, columns[field.name], count) for field in schema()]
    data = BytesIO()
    table = pyarrow.Table.from_arrays(arrays, schema=schema())[: MAX_VALUES // width]
    pyarrow.parquet.write_table(table, data, compression="zstd")
    del arrays, table
    pyarrow.default_memory_pool().release_unused()
    path = folder / f"{iteration:06d}.parquet"
    with files.warning_if_unwritable(path):
        folder.mkdir(exist_ok=True)
        files.write(path, data.getvalue())
        _make_room(folder)


def kept_iterations(folder: Path) -> dict[int, Path]:
    """The files by iteration, in order."""
    found = {int(path.stem): path for path in folder.glob(_PATTERN) if re.fullmatch("[0-9]+", path.stem)}
    return dict(sorted(found.items()))


def read_groups(path: Path, *names: str) -> dict[str, list[Any]]:
    """The columns of a file, or some of them; a ``RunFolderError`` if it is damaged, or has others."""
    import pyarrow
    import pyarrow.parquet

    try:
        data = BytesIO(files.read(path, MAX_MIB * files.MIB))
        # `read_table` would import pandas where it is installed; a process that ends while threads begin is aborted
        file = pyarrow.parquet.ParquetFile(data, pre_buffer=False)
        files.check_parquet(file.metadata, MAX_VALUES, 2**30)
        table = file.read(list(names) or None, use_threads=False)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise _damaged(path, error, "delete it") from error
    if not file.schema_arrow.equals(schema()):
        raise RunFolderError(f"{path} has other columns: {', '.join(file.schema_arrow.names)}; fix: delete it")
    return dict(table.to_pydict())


def schema() -> Any:
    """The columns and their types."""
    import pyarrow as pa

    numbers = pa.list_(pa.float32())
    return pa.schema(
        {
            "iteration": pa.int32(),
            "env_steps": pa.int64(),
            "group": pa.int32(),
            "start": pa.string(),
            "member": pa.int32(),
            "step": pa.int32(),
            "observation": numbers,
            "action": numbers,
            "token": pa.string(),
            "turn": pa.int32(),
            "messages": pa.string(),
            "reward": pa.float32(),
            "reward_parts": numbers,
            "log_prob": pa.float32(),
            "ratio": pa.float32(),
            "advantage": pa.float32(),
            "loss_mask": pa.bool_(),
            "greedy": pa.bool_(),
            "end": pa.string(),
            "stop_reason": pa.string(),
            "success": pa.bool_(),
        }
    )


def _array(kind: Any, values: Values, count: int) -> Any:
    """An Arrow array, made of buffers: ``pyarrow.array`` would import pandas where it is installed, which takes long."""
    import pyarrow as pa

    match values:
        case None:
            return pa.nulls(count, kind)
        case list():
            texts = [(text or "").encode(errors="replace") for text in values]
            ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
            known = pa.py_buffer(np.packbits([text is not None for text in values], bitorder="little"))
            return pa.Array.from_buffers(kind, count, [known, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))])
    if values.ndim == 2:
        ends = np.arange(count + 1, dtype=np.int32) * values.shape[1]
        flat = _array(kind.value_type, values.reshape(-1), values.size)
        return pa.ListArray.from_arrays(pa.Array.from_buffers(pa.int32(), count + 1, [None, pa.py_buffer(ends)]), flat)
    known = pa.py_buffer(np.packbits(~np.isnan(values), bitorder="little"))
    if kind.equals(pa.bool_()):
        data = np.packbits(values == 1, bitorder="little")
    else:  # kind.to_pandas_dtype() needs pandas in older versions
        data = values.astype(f"{'f' if pa.types.is_floating(kind) else 'i'}{kind.bit_width // 8}")
    return pa.Array.from_buffers(kind, count, [known, pa.py_buffer(np.ascontiguousarray(data))])


def _make_room(folder: Path) -> None:
    """Remove the oldest files but the first, until the rest is small enough."""
    paths = list(kept_iterations(folder).values())
    while len(paths) > 2 and sum(path.stat().st_size for path in paths) > MAX_MIB * files.MIB:
        files.remove(paths.pop(1))


# Kept frames of a group's members; replay draws them

MAX_FRAME_SIZE = 160
"""Pixels; larger frames are scaled down."""


class Frames(BaseModel, strict=True):
    """Frames of the members of a group as one picture: a row for each member, a column for each frame."""

    iteration: int
    group: int
    members: dict[str, list[int]] = {}
    """Steps of the frames of each member."""
    width: Annotated[int, Field(ge=0, le=MAX_FRAME_SIZE)] = 0
    """Pixels of a frame."""
    height: Annotated[int, Field(ge=0, le=MAX_FRAME_SIZE)] = 0
    picture: Annotated[str, Field(pattern=r"^[A-Za-z0-9+/=]*$")] = ""
    """WebP in base64."""
    problem: str = ""
    """Reason why there are none."""


def read_frames(path: Path) -> Frames | None:
    """Frames that were written; None if there are none, a ``RunFolderError`` if the file is damaged."""
    if not path.is_file():
        return None
    try:
        return Frames.model_validate(files.parse_json(files.read(path, files.MIB)))
    except (OSError, ValueError) as error:
        raise _damaged(path, error, "delete it") from error
