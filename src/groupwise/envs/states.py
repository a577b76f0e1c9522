"""The whole state of Gymnasium environments as plain data, for running episodes in checkpoints.

Numbers, strings, arrays, containers of them and NumPy's generators are captured; spaces, functions and viewers are not.
Nothing is pickled. An environment that holds anything else, such as a simulator, cannot be captured.
"""

import functools
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from groupwise.envs.snapshots import SIMULATORS, kind_of, stays
from groupwise.errors import EnvError

_ENVS = (gymnasium.Env, VectorEnv)
_MOST_VALUES = 100_000
"""More (such as tables of transitions) would make checkpoints slow."""
_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "deque": deque}


class _CannotCaptureError(Exception):
    pass


def capture(env: gymnasium.Env | VectorEnv) -> dict[str, Any] | None:
    """The attributes of an environment, its wrappers and everything inside as plain data; None if they hold anything else."""
    try:
        captured: dict[str, Any] = _captured(env, set(), iter(range(_MOST_VALUES)))
        return captured
    except _CannotCaptureError:
        return None


def restore(env: gymnasium.Env | VectorEnv, state: Mapping[str, Any]) -> None:
    """Put an environment made the same way, and reset at least once, into a captured state.

    Raises:
        EnvError: it is made of other objects than the captured one.
    """
    try:
        _restored(env, state)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise EnvError(
            f"the captured state does not fit {env}: {error!r}; fix: make the environment the same way"
        ) from error


def _captured(value: Any, seen: set[int], budget: Iterator[int]) -> Any:
    if next(budget, None) is None:
        raise _CannotCaptureError
    if value is None or (isinstance(value, bool | int | float | str | np.generic) and not isinstance(value, Enum)):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return value.copy()
    if isinstance(value, Enum):
        return {"kind": "enum", "name": value.name}
    if isinstance(value, np.random.Generator):
        return {"kind": "generator", "state": value.bit_generator.state}
    if isinstance(value, _ENVS):
        if id(value) in seen:
            return {"kind": "stays"}
        seen.add(id(value))
        return {
            "kind": "env",
            "attributes": {name: _captured(part, seen, budget) for name, part in vars(value).items()},
        }
    for kind, container in _CONTAINERS.items():
        if type(value) is container:
            return {"kind": kind, "items": [_captured(item, seen, budget) for item in cast(Any, value)]}
    if type(value) is dict:
        return {
            "kind": "dict",
            "items": [[_captured(key, seen, budget), _captured(part, seen, budget)] for key, part in value.items()],
        }
    if isinstance(value, functools.partial) or (stays(value) and kind_of(value) not in SIMULATORS):
        return {"kind": "stays"}
    raise _CannotCaptureError


def _restored(now: Any, saved: Any) -> Any:
    """The restored value; ``now`` itself, where it is an object that is changed in place."""
    if not isinstance(saved, Mapping):
        return saved.copy() if isinstance(saved, np.ndarray) else saved
    match saved["kind"]:
        case "stays":
            return now
        case "enum":
            return type(now)[saved["name"]]
        case "generator":
            now.bit_generator.state = saved["state"]
        case "env":
            mine, attributes = vars(now), saved["attributes"]
            for name in [name for name in mine if name not in attributes]:
                del mine[name]
            mine.update({name: _restored(mine.get(name), part) for name, part in attributes.items()})
        case "dict":
            before = now if isinstance(now, dict) else {}
            return {key: _restored(before.get(key), part) for key, part in saved["items"]}
        case kind:
            old = list(now) if isinstance(now, list | tuple | deque) else []
            old += [None] * len(saved["items"])
            items = [_restored(mine, item) for mine, item in zip(old, saved["items"], strict=False)]
            return deque(items, now.maxlen) if kind == "deque" else _CONTAINERS[kind](items)
    return now
