"""Actions of Dict and Tuple spaces as one vector of numbers, their leaves one after another. Never imports Gymnasium."""

import math
from typing import Any

import numpy as np

from groupwise.data.spaces import leaf_spaces, space_kind, subspaces


def nested_action(space: Any, action: np.ndarray | np.generic) -> Any:
    """Environment actions ``[*batch, ...]`` as the space has them; those of a Dict or Tuple space from vectors."""
    children = subspaces(space)
    if children is None:
        return action.astype(space.dtype, copy=False)
    ends = np.cumsum([_num_numbers(child) for child in children.values()])
    vectors = np.split(action, ends[:-1], axis=-1)
    parts = {key: _part(child, vector) for (key, child), vector in zip(children.items(), vectors, strict=True)}
    return parts if space_kind(space) == "dict" else tuple(parts.values())


def flat_action(space: Any, action: Any) -> np.ndarray:
    """One action as an array; one of a Dict or Tuple space as a vector of float64, which ``nested_action`` takes apart."""
    children = subspaces(space)
    if children is None:
        return np.asarray(action)
    parts = action if isinstance(action, tuple) else [action[key] for key in children]
    vectors = [flat_action(child, part).ravel() for child, part in zip(children.values(), parts, strict=True)]
    return np.concatenate(vectors, dtype=np.float64)


def _part(space: Any, vector: np.ndarray) -> Any:
    if subspaces(space) is not None:
        return nested_action(space, vector)
    array = nested_action(space, vector.reshape((*vector.shape[:-1], *space.shape)))
    return array[()] if space_kind(space) == "discrete" else array  # a number, which can be a key of dictionaries


def _num_numbers(space: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in leaf_spaces(space).values())
