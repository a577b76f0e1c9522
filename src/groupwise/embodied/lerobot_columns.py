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
from tensordict import TensorDict
from torch import Tensor

from groupwise.data.rollout import Nested
from groupwise.data.spaces import leaf_spaces, obs_to_tensor, space_kind

STATE = "observation.state"
INSTRUCTION = ("instruction",)

Array: TypeAlias = npt.NDArray[Any]


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
    return {name: column for _, names, column in _stored_parts(space) for name in names}


def split(space: Any, obs: Nested) -> dict[str, Array]:
    """The columns of observations ``[T, ...]``."""
    found: dict[str, Array] = {}
    for path, names, column in _stored_parts(space):
        part = (obs if isinstance(obs, Tensor) else obs[path]).numpy()
        views = part.reshape(len(part), len(names), *column.shape)
        found |= {name: views[:, i] for i, name in enumerate(names)}
    return found


def join(space: Any, columns: Mapping[str, Array], tasks: Sequence[str]) -> Nested:
    """The observations in columns, with the instruction of each step."""
    leaves = leaf_spaces(space)
    found: dict[tuple[str, ...], Array] = {}
    if INSTRUCTION in leaves:
        size = leaves[INSTRUCTION].shape[0]
        text = b"".join(task.encode().ljust(size, b"\0")[:size] for task in tasks)
        found[INSTRUCTION] = np.frombuffer(text, np.uint8).reshape(-1, size)
    for path, names, _ in _stored_parts(space):
        views = np.stack([columns[name] for name in names], axis=1)
        found[path] = views.reshape(-1, *leaves[path].shape)
    parts = {path: obs_to_tensor(leaves[path], part, batched=True) for path, part in found.items()}
    return parts[()] if () in parts else TensorDict(parts, batch_size=[len(tasks)])


def _stored_parts(space: Any) -> list[tuple[tuple[str, ...], list[str], Column]]:
    """Path, names of the columns, and each of these columns' form, of each part but the instruction."""
    found = []
    for path, leaf in leaf_spaces(space).items():
        if _is_image(leaf):
            name = ".".join(("observation.images", *(path or ("image",))))
            names = [f"{name}_{view}" for view in range(leaf.shape[0])] if len(leaf.shape) == 4 else [name]
            found.append((path, names, Column("image", tuple(leaf.shape[-3:]))))
        elif path != INSTRUCTION:
            name = STATE if path in ((), ("proprio",)) else ".".join(("observation", *path))
            found.append((path, [name], number(leaf)))
    return found


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
