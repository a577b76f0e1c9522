"""Nested data of a state as JSON and tensors."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.errors import CheckpointError


def encode(value: object, tensors: dict[str, Tensor], path: str) -> Any:
    """Nested data as JSON; tensors go to ``tensors`` by their path. ``{"$": kind, ...}`` marks what JSON lacks."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {**encode(torch.from_numpy(np.array(value)), tensors, path), "$": kind}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        while path in tensors:  # the keys 1 and "1" have the same path
            path += "+"
        order = sorted(range(value.dim()), key=value.stride, reverse=True)  # rounding depends on the memory layout
        tensors[path] = value.permute(order)
        return {"$": "tensor", "path": path, "order": order}
    if isinstance(value, list | tuple):
        items = [encode(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$": "tuple", "items": items}
    if isinstance(value, Mapping):
        pairs = [(key, encode(item, tensors, f"{path}/{key}")) for key, item in value.items()]
        if all(isinstance(key, str) for key in value) and "$" not in value:
            return dict(pairs)
        return {"$": "dict", "items": [[encode(key, {}, path), item] for key, item in pairs]}
    raise CheckpointError(
        f"a checkpoint holds plain data and tensors only, but {path!r} is a {type(value).__name__}; "
        "fix: return such data from state_dict()"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What ``encode`` was given."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get("$"):
        case "tensor":
            return _in_memory_as_saved(tensors, value)
        case "array":
            return _in_memory_as_saved(tensors, value).numpy()
        case "scalar":
            return tensors[value["path"]].numpy()[()]
        case "tuple":
            return tuple(decode(value["items"], tensors))
        case "dict":
            return {decode(key, tensors): decode(item, tensors) for key, item in value["items"]}
        case _:
            return {key: decode(item, tensors) for key, item in value.items()}


def _in_memory_as_saved(tensors: Mapping[str, Tensor], value: Mapping[str, Any]) -> Tensor:
    order = value["order"]
    return tensors[value["path"]].permute(sorted(range(len(order)), key=order.__getitem__))
