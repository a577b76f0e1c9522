"""States of Gymnasium environments, captured and restored: the simulator's and that of every wrapper around it.

A state is plain data in a checkpoint. As the start that members of a group share, it may also hold copies of other objects.
"""

import copy
import functools
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from groupwise.envs import atari
from groupwise.errors import EnvError
from groupwise.seeding import derive_seed

MUJOCO_DATA = "mujoco._structs.MjData"
ALE = "ale_py._ale_py.ALEInterface"
_NO_STATE = (
    gymnasium.Space,
    EnvSpec,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
)
_STAYING_KINDS = {
    "mujoco._structs.MjModel",
    "gymnasium.envs.mujoco.mujoco_rendering.MujocoRenderer",
    "pygame.surface.Surface",
    "pygame.time.Clock",
    "pygame.font.Font",
    "pygame.window.Window",
    "_thread.lock",
    "_thread.RLock",
}
_MOST_VALUES = 100_000
"""More (such as tables of transitions) would make checkpoints slow."""
_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "deque": deque}


@runtime_checkable
class HasState(Protocol):
    """An environment, or a wrapper, that captures and restores itself and all that it wraps."""

    def clone_state(self) -> Any:
        """Complete state of the environment, which can be copied; ``np_random`` need not be in it."""

    def restore_state(self, state: Any) -> None:
        """Go back to a state from ``clone_state``, here or in another environment made the same way."""


@runtime_checkable
class DrawsOnDemand(Protocol):
    """An environment whose images take long, so that the caller decides when it draws."""

    draws: bool
    """Whether ``step`` draws. Otherwise its observation keeps the last drawn images; ``reset`` always draws."""

    def image(self) -> np.ndarray:
        """The images of the present state, as ``obs["image"]``."""


def capture(env: gymnasium.Env | VectorEnv) -> dict[str, Any] | None:
    """The attributes of an environment, its wrappers and everything inside as plain data; None if they hold anything else."""
    try:
        return _Capture(copies=False)(env, "")  # type: ignore[no-any-return]
    except EnvError:
        return None


def capture_start(env: gymnasium.Env) -> dict[str, Any]:
    """The same with copies of simulators and other objects, which are faster. It can be restored any number of times.

    They may miss state that is kept elsewhere, so the start check compares restored environments.

    Raises:
        EnvError: an attribute cannot be copied; names it.
    """
    return _Capture(copies=True)(env, "")  # type: ignore[no-any-return]


def is_copied_exactly(env: gymnasium.Env) -> bool:
    """Whether a captured start misses nothing: the environment captures itself, or its simulator is MuJoCo."""
    return any(map(_captures_itself, _layers(env))) or attribute(env, MUJOCO_DATA) is not None


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


def reseed_noise(env: gymnasium.Env, noise_seed: int) -> None:
    """Seed everything random after the start.

    This covers ``np_random``, generators in attributes of the environment or a wrapper (also in dictionaries, lists and
    tuples), and the simulator's own. They are seeded in place, as others may refer to them.
    """
    for name, generator in _kept_generators(env):
        seed = derive_seed(noise_seed, name)
        if isinstance(generator, np.random.Generator):
            kind: Any = type(generator.bit_generator)
            generator.bit_generator.state = kind(seed).state
        else:
            generator.seed(seed)
    env.unwrapped.np_random = np.random.default_rng(noise_seed)
    if (ale := attribute(env, ALE)) is not None:
        atari.reseed_ale(ale, noise_seed)


Generator: TypeAlias = np.random.Generator | np.random.RandomState | random.Random
_MOST_KEPT = 32
"""Larger containers hold data; searching them would cost more than the start."""


def _kept_generators(env: gymnasium.Env) -> Iterator[tuple[str, Generator]]:
    """Generators besides ``np_random`` in attributes, or entries of one, with unique names."""
    for index, layer in enumerate(_layers(env)):
        for name, value in vars(layer).items():
            if isinstance(value, Generator):
                if name != "_np_random":
                    yield f"{index}.{name}", value
            elif isinstance(value, dict | list | tuple) and len(value) <= _MOST_KEPT:
                for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
                    if isinstance(entry, Generator):
                        yield f"{index}.{name}.{key}", entry


class _Capture:
    """Captures the parts of one environment.

    Args:
        copies: whether objects that are no plain data are copied; otherwise they are refused.
    """

    def __init__(self, *, copies: bool) -> None:
        self._copies = copies
        self._seen: set[int] = set()
        self._budget = iter(range(_MOST_VALUES))

    def __call__(self, value: Any, where: str) -> Any:
        """The part as plain data.

        Args:
            where: the attribute that holds it, for errors.

        Raises:
            EnvError: it is no plain data, or cannot be copied.
        """
        if next(self._budget, None) is None:
            raise EnvError(f"{where} holds too many values to be captured")
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
        if isinstance(value, gymnasium.Env | VectorEnv):
            return self._environment(value)
        for kind, container in _CONTAINERS.items():
            if type(value) is container:
                return {"kind": kind, "items": [self(item, where) for item in cast(Any, value)]}
        if type(value) is dict:
            return {"kind": "dict", "items": [[self(key, where), self(part, where)] for key, part in value.items()]}
        if stays(value):
            return {"kind": "stays"}
        if self._copies:
            return {"kind": "copy", "of": self._copy(value, f"{where} ({type(value).__name__})")}
        if kind_of(value) == MUJOCO_DATA:
            arrays = {name: array.copy() for name, array in _mujoco_arrays(value)}
            return {"kind": "mujoco", "time": value.time, "arrays": arrays}
        raise EnvError(f"{where} is no plain data")

    def _environment(self, env: Any) -> dict[str, Any]:
        if id(env) in self._seen:
            return {"kind": "stays"}
        self._seen.add(id(env))
        name = type(env).__name__
        if not _captures_itself(env):
            attributes = {key: self(part, f"{name}.{key}") for key, part in vars(env).items()}
            return {"kind": "env", "attributes": attributes}
        where, state, np_random = f"the state of {name}.clone_state()", env.clone_state(), self(env.np_random, name)
        if self._copies:
            return {"kind": "own copy", "state": self._copy(state, where), "np_random": np_random}
        return {"kind": "own", "state": self(state, where), "np_random": np_random}

    def _copy(self, value: Any, where: str) -> Any:
        try:
            return copy.deepcopy(value)
        except Exception as error:  # classes of others raise different ones
            raise EnvError(
                f"{where} cannot be copied: {error}; fix: give the environment clone_state() and restore_state(state) "
                "of plain data, or start groups by seed"
            ) from error


def _captures_itself(env: Any) -> bool:
    """Whether ``clone_state`` holds everything; Atari's leaves out the action that sticks."""
    return isinstance(env, HasState) and (isinstance(env, gymnasium.Wrapper) or attribute(env, ALE) is None)


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
            import mujoco

            mujoco.mj_resetData(now.model, now)
            now.time = saved["time"]
            for name, array in _mujoco_arrays(now):
                array[...] = saved["arrays"][name]
        case "env":
            mine, attributes = vars(now), saved["attributes"]
            changing = [name for name in mine if not stays(mine[name])]  # a viewer may have been opened since
            for name in [name for name in changing if name not in attributes]:
                del mine[name]
            parts = {name: part for name, part in attributes.items() if name in changing or name not in mine}
            mine.update({name: _restored(mine.get(name), part) for name, part in parts.items()})
        case "copy" if kind_of(now) == MUJOCO_DATA:
            import mujoco

            mujoco.mj_copyData(now, now.model, saved["of"])
        case "copy":
            return copy.deepcopy(saved["of"])
        case "own copy":
            now.restore_state(copy.deepcopy(saved["state"]))
            _restored(now.np_random, saved["np_random"])
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


def _layers(env: gymnasium.Env) -> Iterator[gymnasium.Env]:
    """The wrappers, outermost first, and the environment itself."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def attribute(env: Any, kind: str) -> Any:
    """The attribute of the innermost environment whose class has this full name; None without one."""
    return next((value for value in vars(env.unwrapped).values() if kind_of(value) == kind), None)


def stays(value: Any) -> bool:
    """Whether an attribute is not captured, as it is no state."""
    return isinstance(value, _NO_STATE) or kind_of(value) in _STAYING_KINDS


def kind_of(value: Any) -> str:
    """Full name of the class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _mujoco_arrays(data: Any) -> list[tuple[str, np.ndarray]]:
    """The arrays of ``MjData`` whose size follows from the model, also derived ones, since rewards read them.

    Contacts and constraints are recomputed in each step.
    """
    import mujoco

    empty = mujoco.MjData(data.model)
    names = sorted(name for name, part in vars(type(data)).items() if isinstance(part, property))
    arrays = [(name, getattr(data, name), getattr(empty, name)) for name in names]
    return [
        (name, now) for name, now, new in arrays if isinstance(now, np.ndarray) and now.size and now.shape == new.shape
    ]
