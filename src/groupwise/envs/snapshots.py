"""States of Gymnasium environments, captured and restored: the simulator's and that of every wrapper around it.

A snapshot is bytes, plus the simulator's own copy where there is one, so no later step can change it.
"""

import pickle
import random
import types
from collections.abc import Iterator, Mapping
from importlib import import_module
from io import BytesIO
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import EzPickle

from groupwise.errors import EnvError
from groupwise.seeding import derive_seed

_NO_STATE = (
    gymnasium.Space,
    EnvSpec,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)
_Key = tuple[int, str]
"""Layer and name of an attribute."""
MUJOCO_DATA = "mujoco._structs.MjData"
_MUJOCO_MODEL = "mujoco._structs.MjModel"
_FURTHER_ADAPTERS = {"ale_py._ale_py.ALEInterface": "groupwise.contrib.atari:AleAdapter"}
"""Adapters of further simulators (``module:attribute``), by the class of the environment's attribute that holds one."""
_NOT_PICKLED = (pickle.PicklingError, TypeError, AttributeError, RecursionError, ValueError)
_STAYING_KINDS = {
    MUJOCO_DATA,
    *_FURTHER_ADAPTERS,
    _MUJOCO_MODEL,
    "gymnasium.envs.mujoco.mujoco_rendering.MujocoRenderer",
    "pygame.surface.Surface",
    "pygame.time.Clock",
    "pygame.font.Font",
    "pygame.window.Window",
    "_thread.lock",
    "_thread.RLock",
}


Snapshot: TypeAlias = Any
"""A captured state. Picklable; only the adapter that made it can read it."""


@runtime_checkable
class HasState(Protocol):
    """An environment, or a wrapper, that captures and restores itself and all that it wraps."""

    def clone_state(self) -> Any:
        """Its complete state, picklable; ``np_random`` need not be in it."""

    def restore_state(self, state: Any) -> None:
        """Go back to what ``clone_state`` returned, here or in another environment made alike."""


class SnapshotAdapter:
    """Captures and restores every attribute of every layer, and a simulator's own state in subclasses.

    The attributes may miss state that is kept elsewhere, so the start check compares restored environments.
    """

    def capture(self, env: gymnasium.Env) -> Snapshot:
        """The state of the whole wrapper stack and the simulator. It can be restored any number of times.

        Raises:
            EnvError: an attribute cannot be copied; names it.
        """
        return _capture(env)._replace(simulator=self.capture_simulator(env))

    def restore(self, env: gymnasium.Env, snapshot: Snapshot) -> None:
        """Put an environment into a captured state: the one that was captured, or another one made alike.

        Raises:
            EnvError: the environment has other wrappers than the captured one.
        """
        _restore(env, snapshot)
        self.restore_simulator(env, snapshot.simulator)

    def capture_simulator(self, env: gymnasium.Env) -> Any:
        """The simulator's state, which the attributes do not hold."""

    def restore_simulator(self, env: gymnasium.Env, state: Any) -> None:
        """Restore the state from ``capture_simulator``."""

    def reseed(self, env: gymnasium.Env, seed: int) -> None:
        """Seed the simulator's own randomness."""


def adapter_for(env: gymnasium.Env) -> SnapshotAdapter | None:
    """The adapter that knows this environment's simulator, or the environment's own way; None if there is neither."""
    kinds = {kind_of(value) for value in vars(env.unwrapped).values()}
    outer, own = next(((i, layer) for i, layer in enumerate(_layers(env)) if isinstance(layer, HasState)), (0, None))
    if own in (None, env.unwrapped) and (further := _further_adapter(env)):
        return further  # Atari's own pair leaves the sticky actions out
    if own is not None:
        return _Own(outer)
    return _Mujoco() if {MUJOCO_DATA, _MUJOCO_MODEL} <= kinds else None


def _further_adapter(env: gymnasium.Env) -> SnapshotAdapter | None:
    """The adapter of a simulator that ``_FURTHER_ADAPTERS`` knows."""
    for value in vars(env.unwrapped).values():
        if path := _FURTHER_ADAPTERS.get(kind_of(value)):
            module, _, name = path.partition(":")
            adapter: SnapshotAdapter = getattr(import_module(module), name)()
            return adapter
    return None


def reseed_noise(env: gymnasium.Env, noise_seed: int) -> None:
    """Seed everything random after the start.

    That is ``np_random``, generators in attributes of the environment or a wrapper (also in dictionaries, lists and
    tuples), and the simulator's own.
    """
    for name, generator in _kept_generators(env):
        seed_in_place(generator, derive_seed(noise_seed, name))
    env.unwrapped.np_random = np.random.default_rng(noise_seed)
    if (further := _further_adapter(env)) is not None:
        further.reseed(env, noise_seed)


Generator: TypeAlias = np.random.Generator | np.random.RandomState | random.Random


def seed_in_place(generator: Generator, seed: int) -> None:
    """Seed it in place, as others may refer to it."""
    if isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        generator.seed(seed)


_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_MOST_KEPT = 32
"""Larger containers hold data; searching them would cost more than the start."""


def _kept_generators(env: gymnasium.Env) -> Iterator[tuple[str, Generator]]:
    """Generators besides ``np_random`` in attributes, or entries of one, with unique names."""
    for index, layer in enumerate(_layers(env)):
        for name, value in vars(layer).items():
            if isinstance(value, _GENERATORS):
                if name != "_np_random":
                    yield f"{index}.{name}", value
            elif isinstance(value, dict | list | tuple) and len(value) <= _MOST_KEPT:
                for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
                    if isinstance(entry, _GENERATORS):
                        yield f"{index}.{name}.{key}", entry


class _Captured(NamedTuple):
    stack: tuple[str, ...]
    """Classes of the layers, outermost first."""
    attributes: bytes
    simulator: Any = None


class _Own(SnapshotAdapter):
    """``clone_state`` and ``restore_state`` of the outermost layer that has them, which cover the layers inside it.

    Args:
        outer: number of layers around it.
    """

    def __init__(self, outer: int) -> None:
        self._outer = outer

    def capture(self, env: gymnasium.Env) -> Snapshot:
        own = self._own(env)
        captured = _capture(env, self._outer)
        try:
            state = pickle.dumps((own.clone_state(), env.np_random), protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise EnvError(
                f"the state that {type(own).__name__}.clone_state() returned cannot be pickled: {error}; fix: return "
                "plain data (numbers, arrays, dictionaries)"
            ) from error
        return captured._replace(simulator=state)

    def restore(self, env: gymnasium.Env, snapshot: Snapshot) -> None:
        _restore(env, snapshot, self._outer)
        state, np_random = pickle.loads(snapshot.simulator)
        self._own(env).restore_state(state)
        env.unwrapped.np_random = np_random

    def _own(self, env: gymnasium.Env) -> Any:
        return list(_layers(env))[self._outer]


class _Mujoco(SnapshotAdapter):
    """A copy of ``MjData``, which unlike MuJoCo's state vectors restores bit for bit, in the environment's own model."""

    def capture_simulator(self, env: gymnasium.Env) -> Any:
        import mujoco

        model, data = self._parts(env)
        copy = mujoco.MjData(model)
        mujoco.mj_copyData(copy, model, data)
        return copy

    def restore_simulator(self, env: gymnasium.Env, state: Any) -> None:
        import mujoco

        model, data = self._parts(env)
        mujoco.mj_copyData(data, model, state)

    @staticmethod
    def _parts(env: gymnasium.Env) -> tuple[Any, Any]:
        return attribute(env, _MUJOCO_MODEL), attribute(env, MUJOCO_DATA)


def _layers(env: gymnasium.Env) -> Iterator[gymnasium.Env]:
    """The wrappers, outermost first, and the environment itself."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def attribute(env: gymnasium.Env, kind: str) -> Any:
    """The attribute of the innermost environment whose class has this full name; None without one."""
    return next((value for value in vars(env.unwrapped).values() if kind_of(value) == kind), None)


def _capture(env: gymnasium.Env, outer: int | None = None) -> _Captured:
    """The attributes of the (outer) layers as bytes; of simulators, spaces, viewers and code only the names."""
    layers = list(_layers(env))
    state = [_attributes(layer) for layer in layers[:outer]]
    buffer, names = BytesIO(), {id(value): key for value, key in _named(layers)}
    try:
        _Pickler(buffer, names).dump(state)
    except _NOT_PICKLED as error:
        raise EnvError(
            f"{_culprit(layers[:outer], names)} cannot be copied: {error}; fix: give the environment clone_state() and "
            "restore_state(state), or start groups by seed"
        ) from error
    return _Captured(_stack(layers), buffer.getvalue())


def _restore(env: gymnasium.Env, snapshot: _Captured, outer: int | None = None) -> None:
    layers = list(_layers(env))
    if _stack(layers) != snapshot.stack:
        raise EnvError(
            f"a state captured from {' in '.join(reversed(snapshot.stack))} cannot be restored in "
            f"{' in '.join(reversed(_stack(layers)))}; fix: make both environments by the same callable"
        )
    objects = {key: value for value, key in _named(layers)}
    states = _Unpickler(BytesIO(snapshot.attributes), objects).load()
    for layer, (staying, state) in zip(layers[:outer], states, strict=True):
        here = vars(layer)
        for name in [name for name in here if name not in state and name not in staying]:
            if not stays(here[name]):
                del here[name]
        here.update({name: value for name, value in state.items() if name not in here or not stays(here[name])})


def _attributes(layer: gymnasium.Env) -> tuple[list[str], dict[str, Any]]:
    """Names of the attributes that stay, and the other attributes."""
    attributes = vars(layer)
    staying = [name for name, value in attributes.items() if stays(value)]
    return staying, {name: value for name, value in attributes.items() if name not in staying}


def _stack(layers: list[gymnasium.Env]) -> tuple[str, ...]:
    return tuple(type(layer).__qualname__ for layer in layers)


def stays(value: Any) -> bool:
    """Whether an attribute is not captured: it is no state, or its adapter handles it."""
    return isinstance(value, _NO_STATE) or kind_of(value) in _STAYING_KINDS


def kind_of(value: Any) -> str:
    """Full name of the class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _named(layers: list[gymnasium.Env]) -> Iterator[tuple[Any, _Key]]:
    """Objects that copied attributes refer to by key instead of copying them."""
    for index, layer in enumerate(layers):
        yield layer, (index, "")
        for name, value in vars(layer).items():
            if stays(value):
                yield value, (index, name)


class _Pickler(pickle.Pickler):
    """Refers to layers, simulators and spaces by name instead of copying them."""

    def __init__(self, file: BytesIO, names: Mapping[int, _Key]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._names = names

    def persistent_id(self, obj: Any) -> _Key | None:
        if isinstance(obj, gymnasium.Env | EzPickle) and id(obj) not in self._names:
            # EzPickle would silently restore it as it was made
            raise pickle.PicklingError(f"it holds {type(obj).__name__}, which pickles without its state")
        return self._names.get(id(obj))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BytesIO, objects: Mapping[_Key, Any]) -> None:
        super().__init__(file)
        self._objects = objects

    def persistent_load(self, pid: _Key) -> Any:
        if pid not in self._objects:
            raise EnvError(f"the captured state refers to attribute {pid[1]!r}, which this environment does not have")
        return self._objects[pid]


def _culprit(layers: list[gymnasium.Env], names: Mapping[int, _Key]) -> str:
    """Which attribute cannot be pickled, for the error."""
    for layer in layers:
        for name, value in _attributes(layer)[1].items():
            try:
                _Pickler(BytesIO(), names).dump(value)
            except _NOT_PICKLED:
                return f"{type(layer).__name__}.{name} ({type(value).__name__})"
    return "the environment"
