"""Arrays for the observations and rewards of rows, in one process or shared by several."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from groupwise.data.rollout import Nested
from groupwise.data.spaces import obs_spec, obs_to_tensor, space_kind, subspaces

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Layout: TypeAlias = dict[str, tuple[tuple[int, ...], str]]
"""Shape of one row and dtype, by name."""

OUTCOMES = ("reward", "terminated", "truncated", "failed")
"""What a step returns for a row, besides the observation."""

_Keys: TypeAlias = tuple[str | int, ...]


def layout_of(space: Any, num_parts: int) -> Layout:
    """Layout for rows with observations in ``space`` and rewards of ``num_parts`` parts.

    Raises:
        UnsupportedSpaceError: such observations cannot be stored.
    """
    leaves = {_name(keys): obs_spec(leaf) for keys, leaf in _leaf_keys(space)}
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
        self._leaves = [(keys, arrays[_name(keys)], tuple(leaf.shape)) for keys, leaf in _leaf_keys(space)]

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


def _name(keys: _Keys) -> str:
    return "/".join(("obs", *map(str, keys)))


def _leaf_keys(space: Any) -> list[tuple[_Keys, Any]]:
    """The keys that lead to each leaf of an observation, and its space."""
    kind = space_kind(space)
    if kind not in ("dict", "tuple"):
        return [((), space)]
    children = space.spaces.items() if kind == "dict" else enumerate(space.spaces)
    return [((key, *keys), leaf) for key, child in children for keys, leaf in _leaf_keys(child)]
