"""Demonstrations on disk, in the layout of LeRobot's dataset format v3.0 without videos (https://huggingface.co/docs/lerobot).

``docs/robots.md`` lists the files and the columns. Images are PNG files inside the rows, as LeRobot stores them
without a video codec; several views are columns of their own. An ``instruction`` [B] uint8, zero-padded UTF-8, is a row of
``meta/tasks.parquet``.
"""

import io
import json
import math
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from torch import Tensor

from groupwise import system as files
from groupwise.data.rollout import Nested, TensorDict
from groupwise.data.spaces import leaf_spaces, obs_to_tensor, space_kind, subspaces
from groupwise.errors import DataError, GroupwiseError, UnsupportedSpaceError
from groupwise.report.folder import DAMAGE

VERSION = "v3.0"
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
TASKS = "meta/tasks.parquet"
INFO = "meta/info.json"
STATS = "meta/stats.json"
INSTRUCTION = ("instruction",)
MAX_GROWTH = 64
"""Values, and bytes, of a file of steps for each byte that it takes. Times and actions hardly shrink, so real data has fewer."""
SMALL = 2**24
"""Values, and bytes, that any file may have: what stands still shrinks to nothing."""
_FORMATS = ("PNG", "JPEG")

Array: TypeAlias = npt.NDArray[Any]


class Column(NamedTuple):
    """How a part of each step is stored."""

    dtype: str
    """Name of a NumPy type, or ``image``."""
    shape: tuple[int, ...]

    def feature(self) -> dict[str, Any]:
        """Entry of the column in ``meta/info.json``."""
        names = ["height", "width", "channels"] if self.dtype == "image" else None
        return {"dtype": self.dtype, "shape": list(self.shape), "names": names}


class Demonstration(NamedTuple):
    """An episode of T steps."""

    obs: Nested
    """[T, ...] observations of the expert at each step."""
    action: Array
    """[T, *A] its actions there, in the environment's action space."""
    reward: npt.NDArray[np.float32]
    """[T]"""
    success: bool | None
    """Whether the episode succeeded; None, in all episodes of a recording, if the environment does not say."""
    task: str
    """The instruction, or the environment's name."""


class Demonstrations(NamedTuple):
    """The M steps of all episodes, one after another."""

    obs: Nested
    """[M, ...]"""
    action: Array
    """[M, *A], numbers as [M, 1]"""
    reward: npt.NDArray[np.float32] | None
    """[M]; None if it was not recorded, as by a person who steers the robot."""
    episode: npt.NDArray[np.int64]
    """[M] the episode of each step, from 0."""
    action_repeat: object
    """Environment steps of each action, if the recording says so."""


def write_demos(
    folder: Path,
    observation_space: Any,
    action_space: Any,
    steps_per_second: int,
    demos: Iterable[Demonstration],
    action_repeat: int | None = None,
) -> list[int]:
    """Write at least one episode into a new folder, each as it comes; returns their lengths.

    Args:
        steps_per_second: gives the timestamps.
        action_repeat: environment steps of each action. None: unknown.
    """
    parts = _stored_parts(observation_space)
    columns = {name: column for _, names, column in parts for name in names}
    if subspaces(action_space) is not None:
        raise UnsupportedSpaceError(
            f"the actions are {action_space}, and a data set in LeRobot's format holds one vector; fix: an environment with "
            "Box or Discrete actions"
        )
    columns["action"] = number(action_space)
    lengths: list[int] = []
    tasks: dict[str, int] = {}
    task_of_episode: list[str] = []
    moments: dict[str, list[Array]] = {}
    with ExitStack() as stack:
        data: Any = None
        for demo in demos:
            steps, episode = len(demo.reward), len(lengths)
            frame = np.arange(steps)
            done = frame == steps - 1
            values: dict[str, Array] = {}
            for path, names, column in parts:
                part = (demo.obs if isinstance(demo.obs, Tensor) else demo.obs[path]).numpy()
                views = part.reshape(steps, len(names), *column.shape)
                values |= {name: views[:, i] for i, name in enumerate(names)}
            values |= {"action": demo.action, "next.reward": demo.reward, "next.done": done}
            if demo.success is not None:
                values["next.success"] = done & demo.success
            values |= {"timestamp": (frame / steps_per_second).astype(np.float32), "frame_index": frame}
            values |= {"episode_index": np.full(steps, episode), "index": sum(lengths) + frame}
            values |= {"task_index": np.full(steps, tasks.setdefault(demo.task, len(tasks)))}
            columns = {name: columns.get(name, Column(value.dtype.name, (1,))) for name, value in values.items()}
            table = pa.table({name: to_arrow(values[name], column) for name, column in columns.items()})
            if data is None:
                file = folder / DATA.format(chunk_index=0, file_index=0)
                file.parent.mkdir(parents=True)
                data = stack.enter_context(pq.ParquetWriter(file, table.schema, compression="snappy"))
            data.write_table(table)  # a row group of its own
            for name, column in columns.items():
                # sums, sums of squares, least and greatest; of an image those of each channel, with pixels in [0, 1]
                if column.dtype == "image":
                    x = values[name].reshape(-1, column.shape[-1]) / 255.0
                else:
                    x = values[name].reshape(steps, -1).astype(float)
                found = np.stack([x.sum(axis=0), np.square(x).sum(axis=0), x.min(axis=0), x.max(axis=0)])
                moments.setdefault(name, []).append(found)
            lengths.append(steps)
            task_of_episode.append(demo.task)
    ends = np.cumsum(lengths, dtype=np.int64)
    episodes = {"episode_index": np.arange(len(ends)), "tasks": [[task] for task in task_of_episode]}
    episodes |= {"length": np.array(lengths, np.int64)}
    episodes |= {"dataset_from_index": ends - lengths, "dataset_to_index": ends}
    zeros = ("data/chunk_index", "data/file_index", "meta/episodes/chunk_index", "meta/episodes/file_index")
    episodes |= {name: np.zeros(len(ends), np.int64) for name in zeros}
    (folder / EPISODES).parent.mkdir(parents=True)
    pq.write_table(pa.table(episodes), folder / EPISODES)
    # LeRobot reads the instructions by pandas, whose metadata say that the text is the index
    kinds = (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    fields = ("name", "field_name", "pandas_type", "numpy_type", "metadata")
    described = [dict(zip(fields, (name, name, kind, kept, None), strict=True)) for name, kind, kept in kinds]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": described, "pandas_version": "2.0.0"}
    table = pa.table({"task_index": np.arange(len(tasks)), "task": pa.array(list(tasks), pa.string())})
    pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), folder / TASKS)
    info = {
        "codebase_version": VERSION, "robot_type": None, "total_episodes": len(lengths),
        "total_frames": sum(lengths), "total_tasks": len(tasks), "chunks_size": 1000,
        "data_files_size_in_mb": 100, "video_files_size_in_mb": 200, "fps": steps_per_second,
        "splits": {"train": f"0:{len(lengths)}"}, "data_path": DATA, "video_path": None,
        "features": {name: column.feature() for name, column in columns.items()},
    }  # fmt: skip
    info |= {} if action_repeat is None else {"action_repeat": action_repeat}  # LeRobot warns that it does not know it
    stats = {name: _statistics(column, moments[name], sum(lengths)) for name, column in columns.items()}
    for name, tree in ((STATS, stats), (INFO, info)):
        (folder / name).write_text(json.dumps(tree, indent=1), encoding="utf-8")
    return lengths


def _statistics(column: Column, moments: list[Array], steps: int) -> dict[str, Any]:
    """Entry of a column in ``meta/stats.json``, from the moments of each episode."""
    sums, squares, least, greatest = np.stack(moments, axis=1)
    is_image = column.dtype == "image"
    count = steps * (math.prod(column.shape[:-1]) if is_image else 1)
    mean = sums.sum(axis=0) / count
    std = np.sqrt(np.maximum(squares.sum(axis=0) / count - mean**2, 0.0))
    rows = {"min": least.min(axis=0), "max": greatest.max(axis=0), "mean": mean, "std": std}
    return {kind: row.reshape((-1, 1, 1) if is_image else (-1,)).tolist() for kind, row in rows.items()} | {
        "count": [steps]
    }


def read_demos(folder: Path, observation_space: Any) -> Demonstrations:
    """All steps in a folder, observations as ``observation_space`` describes them.

    Raises:
        DataError: no demonstrations are there, they are damaged, or they are of other observations.
    """
    try:
        return _read(folder, observation_space)
    except GroupwiseError:
        raise
    except (*DAMAGE, SyntaxError, pa.ArrowException, Image.DecompressionBombError) as error:
        raise DataError(f"{folder} is damaged ({type(error).__name__}: {error!s:.200}); fix: record again") from error


def _read(folder: Path, observation_space: Any) -> Demonstrations:
    path = folder / INFO
    if (link := files.link_out_of(folder)) is not None:
        raise DataError(f"{link} is a link out of the demonstrations; fix: put its target in its place (cp -rL)")
    if not path.exists():
        raise DataError(f"{folder} holds no demonstrations: {path} is missing; fix: groupwise demos <environment>")
    info = files.parse_json(files.read(path, files.MAX_SETTINGS))
    features: dict[str, Any] = info["features"]
    version = str(info["codebase_version"])
    if version.split(".")[0] != VERSION.split(".")[0]:
        raise DataError(f"{folder} is of format {version!r}, expected {VERSION!r}; fix: LeRobot's script converts it")
    parts = _stored_parts(observation_space)
    wanted = {name: column for _, names, column in parts for name in names}
    for name, column in wanted.items():
        there, own = (
            "nothing" if kind is None else f"{kind['dtype']} of shape {list(kind['shape'])}"
            for kind in (features.get(name), column.feature())
        )
        if column.dtype == "float32":  # others are rounded to it
            there = re.sub("^float(16|64) ", "float32 ", there)
        if there != own:
            raise DataError(
                f"{folder} has {name!r} as {there}, but the environment has {own}; "
                "fix: the environment and the settings that they were recorded with"
            )
    table = _read_table(sorted((folder / "data").glob("*/*.parquet")))
    if not len(table):
        raise DataError(f"{folder} has no steps; fix: record again")
    known, optional = features.keys() & {*table.column_names}, {"next.reward"} & features.keys()
    if absent := [n for n in ("action", "episode_index", "task_index", *optional, *wanted) if n not in known]:
        raise DataError(f"{folder} has no column {absent[0]!r}; fix: add it, or record by groupwise demos")
    for name in {"episode_index", "frame_index", "task_index"}.intersection(table.column_names):
        if (column := table[name]).null_count or not pa.types.is_integer(column.type):
            raise ValueError(f"{name} is {column.type} with {column.null_count} nulls, expected whole numbers")
    order = np.lexsort([table[n].to_numpy() for n in ("frame_index", "episode_index") if n in table.column_names])
    if (np.diff(order) != 1).any():
        table = table.take(order)
    columns = {name: from_arrow(table[name], column) for name, column in wanted.items()}
    action = features["action"]
    episode = table["episode_index"].to_numpy()
    reward = table["next.reward"].to_numpy().astype(np.float32) if optional else None
    tasks = _read_table([folder / TASKS]).to_pydict()
    named = [name for name in tasks if name != "task_index"]  # pandas writes an index without a name by one of its own
    if "task_index" not in tasks or len(named) != 1:
        raise DataError(f"{folder / TASKS} has {', '.join(tasks)}, expected task_index and task; fix: record again")
    texts = dict(zip(tasks["task_index"], tasks[named[0]], strict=True))
    leaves = leaf_spaces(observation_space)
    stored: dict[tuple[str, ...], Array] = {}
    if has_instruction(leaves):
        size = leaves[INSTRUCTION].shape[0]
        used = [texts[index] for index in sorted(set(table["task_index"].to_pylist()))]
        if longer := [text for text in used if len(text.encode()) > size]:
            raise DataError(
                f"{folder / TASKS}: {longer[0]!r:.200} has {len(longer[0].encode())} bytes, and {INSTRUCTION[0]!r} of the environment "
                f"takes {size}; fix: a shorter text, or an observation space that takes it"
            )
        encoded = [texts[index].encode().ljust(size, b"\0") for index in table["task_index"].to_pylist()]
        stored[INSTRUCTION] = np.frombuffer(b"".join(encoded), np.uint8).reshape(-1, size)
    for place, names, _ in parts:
        views = np.stack([columns[name] for name in names], axis=1)
        stored[place] = views.reshape(-1, *leaves[place].shape)
    obs = {place: obs_to_tensor(leaves[place], part, batched=True) for place, part in stored.items()}
    return Demonstrations(
        obs[()] if () in obs else TensorDict(obs, batch_size=[len(table)]),
        from_arrow(table["action"], Column(action["dtype"], tuple(action["shape"]))),
        reward,
        np.unique(episode, return_inverse=True)[1].astype(np.int64),
        info.get("action_repeat"),
    )


def _read_table(paths: list[Path]) -> Any:
    """Reads Parquet files as one table."""
    for path in paths:
        with files.reading(path, 2**40) as file:  # a FIFO would never end
            limit = max(MAX_GROWTH * path.stat().st_size, SMALL)
            files.check_parquet(pq.read_metadata(file), limit, limit)
    return pq.read_table(paths)


def has_instruction(leaves: dict[tuple[str, ...], Any]) -> bool:
    """Whether the observation has text: a Box uint8 [B] that is called ``instruction``."""
    leaf: Any = leaves.get(INSTRUCTION)
    return space_kind(leaf) == "box" and leaf.dtype == np.uint8 and len(leaf.shape) == 1


def _stored_parts(space: Any) -> list[tuple[tuple[str, ...], list[str], Column]]:
    """Path, names of the columns, and each of these columns' form, of each part but the instruction.

    Raises:
        DataError: two parts would be one column.
    """
    found, leaves = [], leaf_spaces(space)
    state = ("proprio",) if ("state",) not in leaves else ()
    for path, leaf in leaves.items():
        is_bytes = space_kind(leaf) == "box" and leaf.dtype == np.uint8
        if is_bytes and len(leaf.shape) in (3, 4) and leaf.shape[-1] in (1, 3):
            name = ".".join(("observation.images", *(path or ("image",))))
            names = [f"{name}_{view}" for view in range(leaf.shape[0])] if len(leaf.shape) == 4 else [name]
            found.append((path, names, Column("image", tuple(leaf.shape[-3:]))))
        elif path != INSTRUCTION or not has_instruction(leaves):
            name = "observation.state" if path in ((), state) else ".".join(("observation", *path))
            found.append((path, [name], number(leaf)))
    columns = [name for _, names, _ in found for name in names]
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise DataError(f"two entries of the observation would be the column {twice[0]!r}; fix: rename one of them")
    return found


def number(space: Any) -> Column:
    """Numbers are stored as rollouts hold them: floats in float32."""
    dtype = "float32" if space.dtype.kind == "f" else space.dtype.name
    return Column(dtype, tuple(space.shape) or (1,))


def to_arrow(values: Array, column: Column) -> Any:
    """An Arrow array of a part ``[T, ...]``; of images their PNG files."""
    if column.dtype == "image":
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        rows = []
        for image in values:
            picture = Image.fromarray(image if image.shape[-1] == 3 else image[..., 0])
            picture.save(png := io.BytesIO(), "PNG", compress_level=1)
            rows.append({"bytes": png.getvalue(), "path": None})
        return pa.array(rows, type=kind)
    values = np.ascontiguousarray(values, dtype=column.dtype)
    if column.shape == (1,):
        return pa.array(values.reshape(-1))
    if len(column.shape) == 1:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), column.shape[0])
    return pa.array(values.tolist())


def from_arrow(values: Any, column: Column) -> Array:
    """The inverse of ``to_arrow``; numbers as ``[T, 1]``."""
    if column.dtype == "image":
        images, expected = [], (*column.shape[:2], "RGB" if column.shape[2] == 3 else "L")
        for image in values.to_pylist():
            if image["bytes"] is None and image["path"] is not None:
                raise DataError(
                    f"the images are files outside the table, such as {image['path']!r:.200}, expected PNG or JPEG bytes in it; "
                    "fix: embed them (embed_table_storage of the package datasets)"
                )
            # pillow runs another program for some of the other formats
            picture = Image.open(io.BytesIO(image["bytes"]), formats=_FORMATS)
            if (found := (picture.height, picture.width, picture.mode)) != expected:
                raise ValueError(f"a picture has height, width and mode {found}, expected {expected}")
            images.append(np.asarray(picture))
        return np.stack(images).reshape(-1, *column.shape)
    if np.dtype(column.dtype).kind not in "biuf":
        raise ValueError(f"a column of {column.dtype}, expected numbers")
    return np.array(values.to_pylist(), dtype=column.dtype).reshape(len(values), *column.shape)
