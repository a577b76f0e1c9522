"""Arrays for the observations and rewards of rows, in one process or shared by several."""

import ctypes
import math
from multiprocessing.context import BaseContext
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from groupwise.data.rollout import Nested
from groupwise.data.spaces import leaf_spaces, obs_spec, obs_to_tensor, space_kind, subspaces

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Layout: TypeAlias = dict[str, tuple[tuple[int, ...], str]]
"""Shape of one row and dtype, by name."""

OUTCOMES = ("reward", "terminated", "truncated", "failed")
"""What a step returns for a row, besides the observation."""


class SharedArrays(NamedTuple):
    """Arrays in shared memory, passed to a new process among its arguments."""

    layout: Layout
    num_rows: int
    memory: dict[str, Any]

    @classmethod
    def allocate(cls, layout: Layout, num_rows: int, context: BaseContext) -> "SharedArrays":
        """Zeros."""
        sizes = {
            name: num_rows * math.prod(shape) * np.dtype(dtype).itemsize for name, (shape, dtype) in layout.items()
        }
        return cls(layout, num_rows, {name: context.RawArray(ctypes.c_byte, size) for name, size in sizes.items()})

    def arrays(self, rows: slice = slice(None)) -> Arrays:
        """Views of these rows."""
        return {
            name: np.frombuffer(self.memory[name], dtype).reshape(self.num_rows, *shape)[rows]
            for name, (shape, dtype) in self.layout.items()
        }


def layout_of(space: Any, num_parts: int) -> Layout:
    """Layout for rows with observations in ``space`` and rewards of ``num_parts`` parts.

    Raises:
        UnsupportedSpaceError: such observations cannot be stored.
    """
    leaves = {_name(path): obs_spec(leaf) for path, leaf in leaf_spaces(space).items()}
    layout: Layout = {name: (spec.shape, str(spec.dtype).removeprefix("torch.")) for name, spec in leaves.items()}  # type: ignore[union-attr]
    layout |= {name: ((), "float32" if name == "reward" else "bool") for name in OUTCOMES}
    return layout | {"reward_parts": ((num_parts,), "float32")} if num_parts else layout


class ObsWriter:
    """Writes one row's observation into the arrays.

    Args:
        arrays: as ``layout_of(space, ...)`` describes them.
    """

    def __init__(self, space: Any, arrays: Arrays) -> None:
        self._space = space
        self._leaves = [
            (keys, arrays[_name(tuple(map(str, keys)))], tuple(leaf.shape)) for keys, leaf in _leaf_keys(space)
        ]

    def write(self, row: int, obs: Any) -> None:
        """Put ``obs`` into this row.

        Raises:
            DataError: it does not fit its space.
        """
        try:
            for keys, array, shape in self._leaves:
                leaf = obs
                for key in keys:
                    leaf = leaf[key]
                if np.shape(leaf) != shape:
                    self._refuse(obs)
                array[row] = leaf
        except (KeyError, IndexError, TypeError, ValueError):
            self._refuse(obs)

    def _refuse(self, obs: Any) -> None:
        obs_to_tensor(self._space, obs, batched=False)
        raise AssertionError(f"{obs!r} could not be stored, but fits its space")


def obs_tensor(space: Any, arrays: Arrays, path: tuple[str, ...] = ()) -> Nested:
    """Observations [N, ...] of all rows; shares memory with the arrays."""
    children = subspaces(space)
    if children is None:
        leaf: Tensor = torch.from_numpy(arrays[_name(path)])
        return leaf
    leaves = {name: obs_tensor(child, arrays, (*path, name)) for name, child in children.items()}
    return TensorDict(leaves, batch_size=[len(arrays["reward"])])


def _name(path: tuple[str, ...]) -> str:
    return "/".join(("obs", *path))


def _leaf_keys(space: Any) -> list[tuple[tuple[str | int, ...], Any]]:
    """Keys that lead to each leaf of an observation."""
    kind = space_kind(space)
    if kind not in ("dict", "tuple"):
        return [((), space)]
    children = space.spaces.items() if kind == "dict" else enumerate(space.spaces)
    return [((key, *keys), leaf) for key, child in children for keys, leaf in _leaf_keys(child)]
