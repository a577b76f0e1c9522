"""Observations and actions as columns of Arrow, and back: the columns of LeRobot's dataset format.

| part of the observation | column |
|---|---|
| the whole observation, or ``proprio`` | ``observation.state`` |
| an image [H, W, 1 or 3] uint8 | ``observation.images.<name>`` |
| images [V, H, W, 1 or 3] uint8 | ``observation.images.<name>_0``, ``_1``, ... |
| ``instruction`` [B] uint8, zero-padded UTF-8 | ``task_index``, a row of ``meta/tasks.parquet`` |
| any other | ``observation.<name>`` |
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from groupwise.data.spaces import leaf_spaces, space_kind

STATE = "observation.state"
INSTRUCTION = ("instruction",)

Array: TypeAlias = npt.NDArray[Any]
Leaves: TypeAlias = dict[tuple[str, ...], Array]
"""The parts of observations by their paths, each ``[T, ...]``."""


class Column(NamedTuple):
    """How a part of each step is stored."""

    dtype: str
    """Of NumPy, or ``image``."""
    shape: tuple[int, ...]

    def feature(self) -> dict[str, Any]:
        """Its entry in ``meta/info.json``."""
        names = ["height", "width", "channels"] if self.dtype == "image" else None
        return {"dtype": self.dtype, "shape": list(self.shape), "names": names}


def obs_columns(space: Any) -> dict[str, Column]:
    """The columns of a space's observations."""
    found: dict[str, Column] = {}
    for path, leaf in leaf_spaces(space).items():
        if path == INSTRUCTION:
            continue
        if _is_image(leaf):
            found |= dict.fromkeys(_image_names(path, leaf), Column("image", tuple(leaf.shape[-3:])))
        else:
            found[_name(path)] = number(leaf)
    return found


def split(space: Any, obs: Leaves) -> dict[str, Array]:
    """The columns of observations."""
    found: dict[str, Array] = {}
    for path, leaf in leaf_spaces(space).items():
        if path == INSTRUCTION:
            continue
        if _is_image(leaf):
            views = obs[path] if len(leaf.shape) == 4 else obs[path][:, None]
            found |= {name: views[:, i] for i, name in enumerate(_image_names(path, leaf))}
        else:
            found[_name(path)] = obs[path]
    return found


def join(space: Any, columns: Mapping[str, Array], tasks: Sequence[str]) -> Leaves:
    """The observations in columns."""
    found: Leaves = {}
    for path, leaf in leaf_spaces(space).items():
        if path == INSTRUCTION:
            size = leaf.shape[0]
            text = b"".join(task.encode().ljust(size, b"\0")[:size] for task in tasks)
            found[path] = np.frombuffer(text, np.uint8).reshape(-1, size)
        elif _is_image(leaf):
            views = np.stack([columns[name] for name in _image_names(path, leaf)], axis=1)
            found[path] = views if len(leaf.shape) == 4 else views[:, 0]
        else:
            found[path] = columns[_name(path)].reshape(-1, *leaf.shape)
    return found


def _name(path: tuple[str, ...]) -> str:
    return STATE if path in ((), ("proprio",)) else ".".join(("observation", *path))


def _image_names(path: tuple[str, ...], leaf: Any) -> list[str]:
    name = ".".join(("observation.images", *(path or ("image",))))
    return [f"{name}_{view}" for view in range(leaf.shape[0])] if len(leaf.shape) == 4 else [name]


def _is_image(leaf: Any) -> bool:
    is_bytes = space_kind(leaf) == "box" and leaf.dtype == np.uint8
    return is_bytes and len(leaf.shape) in (3, 4) and leaf.shape[-1] in (1, 3)


def number(space: Any) -> Column:
    """Numbers are stored as rollouts hold them: floats in float32."""
    dtype = "float32" if space.dtype.kind == "f" else space.dtype.name
    return Column(dtype, tuple(space.shape) or (1,))


def to_arrow(values: Array, column: Column) -> Any:
    """An Arrow array of a part ``[T, ...]``; of images their PNG files."""
    import pyarrow as pa

    if column.dtype == "image":
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        return pa.array([{"bytes": _png(image), "path": None} for image in values], type=kind)
    values = np.ascontiguousarray(values, dtype=column.dtype)
    if column.shape == (1,):
        return pa.array(values.reshape(-1))
    if len(column.shape) == 1:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), column.shape[0])
    return pa.array(values.tolist())


def from_arrow(values: Any, column: Column) -> Array:
    """The inverse of ``to_arrow``; numbers as ``[T, 1]``."""
    if column.dtype == "image":
        return np.stack([_pixels(image["bytes"]) for image in values.to_pylist()]).reshape(-1, *column.shape)
    return np.array(values.to_pylist(), dtype=column.dtype).reshape(-1, *column.shape)


def _png(image: npt.NDArray[np.uint8]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image if image.shape[-1] == 3 else image[..., 0]).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _pixels(data: bytes) -> npt.NDArray[np.uint8]:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)))
