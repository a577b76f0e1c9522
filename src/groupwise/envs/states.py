"""The whole state of Gymnasium environments as plain data, for running episodes in checkpoints.

Numbers, strings, arrays, containers of them, random generators and MuJoCo's data are captured; spaces, functions,
models and viewers are not. An environment with ``clone_state`` and ``restore_state`` says itself what its state is. Nothing
is pickled. An environment that holds anything else cannot be captured.
"""

import functools
import random
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from groupwise.envs.snapshots import ALE, MUJOCO_DATA, HasState, kind_of, stays
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
    if isinstance(value, np.random.RandomState):
        return {"kind": "random_state", "state": value.get_state(legacy=False)}
    if type(value) is random.Random:
        return {"kind": "random", "state": value.getstate()}
    if isinstance(value, _ENVS):
        if id(value) in seen:
            return {"kind": "stays"}
        seen.add(id(value))
        if isinstance(value, HasState):
            parts = {"state": value.clone_state(), "np_random": value.np_random}
            return {"kind": "own", **{name: _captured(part, seen, budget) for name, part in parts.items()}}
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
    if kind_of(value) == MUJOCO_DATA:
        return {"kind": "mujoco", **_mujoco_arrays(value)}
    if isinstance(value, functools.partial) or (stays(value) and kind_of(value) != ALE):
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
        case "random_state":
            now.set_state(saved["state"])
        case "random":
            now.setstate(saved["state"])
        case "mujoco":
            _put_mujoco(now, saved)
        case "env":
            mine, attributes = vars(now), saved["attributes"]
            for name in [name for name in mine if name not in attributes]:
                del mine[name]
            mine.update({name: _restored(mine.get(name), part) for name, part in attributes.items()})
        case "own":
            now.restore_state(_restored(now.clone_state(), saved["state"]))
            _restored(now.np_random, saved["np_random"])
        case "dict":
            before = now if isinstance(now, dict) else {}
            return {key: _restored(before.get(key), part) for key, part in saved["items"]}
        case kind:
            old = list(now) if isinstance(now, list | tuple | deque) else []
            old += [None] * len(saved["items"])
            items = [_restored(mine, item) for mine, item in zip(old, saved["items"], strict=False)]
            return deque(items, now.maxlen) if kind == "deque" else _CONTAINERS[kind](items)
    return now


def _mujoco_arrays(data: Any) -> dict[str, np.ndarray]:
    """Every array of ``MjData`` of fixed size, joined by dtype; also derived ones, since rewards read them."""
    parts: dict[str, list[np.ndarray]] = {}
    for array in _mujoco_views(data):
        parts.setdefault(array.dtype.name, []).append(array.reshape(-1))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()} | {"time": np.array(data.time)}


def _put_mujoco(data: Any, saved: Mapping[str, Any]) -> None:
    import mujoco

    mujoco.mj_resetData(data.model, data)
    data.time = float(saved["time"])
    taken = dict.fromkeys(saved, 0)
    for array in _mujoco_views(data):
        name, begin = array.dtype.name, taken[array.dtype.name]
        array[...] = saved[name][begin : begin + array.size].reshape(array.shape)
        taken[name] += array.size


def _mujoco_views(data: Any) -> list[np.ndarray]:
    """The arrays whose size follows from the model; contacts and constraints are recomputed in each step."""
    import mujoco

    empty = mujoco.MjData(data.model)
    names = [name for name, part in vars(type(data)).items() if isinstance(part, property)]
    pairs = [(getattr(empty, name), getattr(data, name)) for name in sorted(names)]
    return [now for before, now in pairs if isinstance(now, np.ndarray) and now.size and now.shape == before.shape]
