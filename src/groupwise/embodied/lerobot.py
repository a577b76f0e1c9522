"""Demonstrations on disk, in the layout of LeRobot's dataset format v3.0 without videos (https://huggingface.co/docs/lerobot).

    data/chunk-000/file-000.parquet           one row for each step, one row group for each episode
    meta/info.json                            counts, and name, type and shape of each column
    meta/stats.json                           least, greatest, mean and standard deviation of each column
    meta/tasks.parquet                        the instructions
    meta/episodes/chunk-000/file-000.parquet  length, rows and instruction of each episode

Images are PNG files inside the rows, as LeRobot stores them without a video codec. ``lerobot_columns``
says which columns there are.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from groupwise.data.rollout import Nested
from groupwise.embodied.lerobot_columns import Array, Column, from_arrow, join, number, obs_columns, split, to_arrow
from groupwise.errors import DataError
from groupwise.system import files

VERSION = "v3.0"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
TASKS = "meta/tasks.parquet"
INFO = "meta/info.json"
STATS = "meta/stats.json"


class Demonstration(NamedTuple):
    """An episode of T steps."""

    obs: Nested
    """[T, ...] what the expert saw at each step."""
    action: Array
    """[T, *A] its actions there, in the environment's action space."""
    reward: npt.NDArray[np.float32]
    """[T]"""
    success: bool | None
    """None if the environment does not say."""
    task: str
    """The instruction, or the environment's name."""


class Demonstrations(NamedTuple):
    """The M steps of all episodes, one after another."""

    obs: Nested
    """[M, ...]"""
    action: Array
    """[M, *A], numbers as [M, 1]"""
    reward: npt.NDArray[np.float32]
    """[M]"""
    episode: npt.NDArray[np.int64]
    """[M] the episode of each step, from 0."""


_NEEDED = ("action", "next.reward", "episode_index", "task_index")
"""Columns that are read besides those of observations. Recordings of LeRobot's may lack rewards."""


class DemoWriter:
    """Writes episodes into a new folder; complete when closed.

    Args:
        steps_per_second: of the environment, for timestamps.
    """

    def __init__(self, folder: Path, observation_space: Any, action_space: Any, steps_per_second: int) -> None:
        self.folder = folder
        self.lengths: list[int] = []
        self._observation_space = observation_space
        self._fps = steps_per_second
        self._columns = obs_columns(observation_space) | {"action": number(action_space)}
        self._tasks: dict[str, int] = {}
        self._task_of_episode: list[str] = []
        self._moments: dict[str, list[Array]] = {}
        self._data: Any = None

    def __enter__(self) -> "DemoWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._data is not None:
            self._data.close()
        if error is None:
            self._write_meta()

    def add(self, demo: Demonstration) -> None:
        """Write an episode."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        values = self._values(demo)
        self._columns = {
            name: self._columns.get(name, Column(value.dtype.name, (1,))) for name, value in values.items()
        }
        table = pa.table({name: to_arrow(values[name], column) for name, column in self._columns.items()})
        if self._data is None:
            path = self.folder / DATA.format(chunk_index=0, file_index=0)
            path.parent.mkdir(parents=True)
            self._data = pq.ParquetWriter(path, table.schema, compression="snappy")
        self._data.write_table(table)  # a row group of its own
        for name, column in self._columns.items():
            self._moments.setdefault(name, []).append(_moments(values[name], column))
        self.lengths.append(len(demo.reward))
        self._task_of_episode.append(demo.task)

    def _values(self, demo: Demonstration) -> dict[str, Array]:
        """The columns of an episode, each ``[T, ...]``."""
        steps, episode = len(demo.reward), len(self.lengths)
        frame = np.arange(steps)
        done = frame == steps - 1
        values = split(self._observation_space, demo.obs) | {"action": demo.action}
        values |= {"next.reward": demo.reward, "next.done": done}
        if "next.success" in self._columns if self.lengths else demo.success is not None:
            values["next.success"] = done & bool(demo.success)
        values |= {"timestamp": (frame / self._fps).astype(np.float32), "frame_index": frame}
        values |= {"episode_index": np.full(steps, episode), "index": sum(self.lengths) + frame}
        return values | {"task_index": np.full(steps, self._tasks.setdefault(demo.task, len(self._tasks)))}

    def _write_meta(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        ends = np.cumsum(self.lengths, dtype=np.int64)
        episodes = {
            "episode_index": np.arange(len(ends)),
            "tasks": [[task] for task in self._task_of_episode],
            "length": np.array(self.lengths, np.int64),
            "dataset_from_index": ends - self.lengths,
            "dataset_to_index": ends,
        }
        zeros = ("data/chunk_index", "data/file_index", "meta/episodes/chunk_index", "meta/episodes/file_index")
        episodes |= {name: np.zeros(len(ends), np.int64) for name in zeros}
        (self.folder / EPISODES).parent.mkdir(parents=True)
        pq.write_table(pa.table(episodes), self.folder / EPISODES)
        pq.write_table(_tasks_table(list(self._tasks)), self.folder / TASKS)
        _write_json(self.folder / STATS, {name: self._stats(name) for name in self._columns})
        _write_json(self.folder / INFO, self._info())

    def _stats(self, name: str) -> dict[str, Any]:
        """Over all episodes, as lists."""
        sums, squares, least, greatest = np.stack(self._moments[name], axis=1)
        column, steps = self._columns[name], sum(self.lengths)
        is_image = column.dtype == "image"
        count = steps * math.prod(column.shape[:-1]) if is_image else steps
        mean = sums.sum(axis=0) / count
        std = np.sqrt(np.maximum(squares.sum(axis=0) / count - mean**2, 0.0))
        found = {"min": least.min(axis=0), "max": greatest.max(axis=0), "mean": mean, "std": std}
        shape = (-1, 1, 1) if is_image else (-1,)
        return {name: value.reshape(shape).tolist() for name, value in found.items()} | {"count": [steps]}

    def _info(self) -> dict[str, Any]:
        return {
            "codebase_version": VERSION,
            "robot_type": None,
            "total_episodes": len(self.lengths),
            "total_frames": sum(self.lengths),
            "total_tasks": len(self._tasks),
            "chunks_size": 1000,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self.lengths)}"},
            "data_path": DATA,
            "video_path": None,
            "features": {name: column.feature() for name, column in self._columns.items()},
        }


def read_demos(folder: Path, observation_space: Any) -> Demonstrations:
    """All steps in a folder, observations as ``observation_space`` describes them.

    Raises:
        DataError: no demonstrations are there, they are damaged, or they are of other observations.
    """
    features = _read_features(folder)
    wanted = obs_columns(observation_space)
    for name, column in wanted.items():
        found = features.get(name)
        if found is None or (found["dtype"], tuple(found["shape"])) != column:
            raise DataError(
                f"{folder} has {name!r} as {_described(found)}, but the environment has {_described(column.feature())}; "
                "fix: the environment and the settings that they were recorded with"
            )
    table = _read_table(folder, sorted((folder / "data").glob("*/*.parquet")))
    if not len(table):
        raise DataError(f"{folder} has no steps; fix: record again")
    columns = {name: from_arrow(table[name], column) for name, column in wanted.items()}
    action = features["action"]
    reward, episode = (table[name].to_numpy().copy() for name in ("next.reward", "episode_index"))
    tasks = _read_table(folder, folder / TASKS).to_pydict()
    texts = dict(zip(tasks["task_index"], tasks["task"], strict=True))
    return Demonstrations(
        join(observation_space, columns, [texts[index] for index in table["task_index"].to_pylist()]),
        from_arrow(table["action"], Column(action["dtype"], tuple(action["shape"]))),
        reward,
        np.unique(episode, return_inverse=True)[1].astype(np.int64),
    )


def _tasks_table(tasks: Sequence[str]) -> Any:
    """Instructions and their numbers. LeRobot reads it by pandas, whose metadata say that the text is the index."""
    import pyarrow as pa

    numbers: dict[str, Any] = {"name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    texts: dict[str, Any] = {"name": "task", "pandas_type": "unicode", "numpy_type": "object"}
    columns = [{**column, "field_name": column["name"], "metadata": None} for column in (numbers, texts)]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
    table = pa.table({"task_index": pa.array(range(len(tasks)), pa.int64()), "task": pa.array(tasks, pa.string())})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def _moments(values: Array, column: Column) -> Array:
    """[4, F] sums, sums of squares, least and greatest of an episode; of an image those of each channel, with pixels in [0, 1]."""
    if column.dtype == "image":
        flat = values.reshape(-1, column.shape[-1]) / 255.0
    else:
        flat = values.reshape(len(values), -1).astype(np.float64)
    return np.stack([flat.sum(axis=0), np.square(flat).sum(axis=0), flat.min(axis=0), flat.max(axis=0)])


def _read_features(folder: Path) -> dict[str, Any]:
    path = folder / INFO
    try:
        info = files.parse_json(files.read(path, files.MAX_SETTINGS, follow=True))
        features: dict[str, Any] = info["features"]
        version = str(info["codebase_version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{folder} holds no demonstrations: {path} is missing or damaged ({error!r}); fix: groupwise demos <environment>"
        ) from error
    if version.split(".")[0] != VERSION.split(".")[0]:
        raise DataError(
            f"{folder} is of format {version!r}, expected {VERSION!r}; fix: convert it with LeRobot's script"
        )
    if absent := [name for name in _NEEDED if name not in features]:
        raise DataError(f"{folder} has no column {absent[0]!r}; fix: add it, or record by groupwise demos")
    return features


def _read_table(folder: Path, files: Path | list[Path]) -> Any:
    """What Parquet files of the folder hold."""
    import pyarrow.parquet as pq

    try:
        return pq.read_table(files)
    except (OSError, ValueError) as error:
        raise DataError(f"{folder} is damaged ({error}); fix: record again") from error


def _described(feature: Mapping[str, Any] | None) -> str:
    return "nothing" if feature is None else f"{feature['dtype']} of shape {list(feature['shape'])}"


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=1), encoding="utf-8")
