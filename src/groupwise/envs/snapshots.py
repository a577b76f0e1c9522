"""States of Gymnasium environments, captured and restored: the simulator's and that of every wrapper around it.

A snapshot is bytes, plus the simulator's own copy where there is one, so no later step can change it.
"""

import functools
import pickle
import random
import sys
import types
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from hashlib import blake2b
from io import BytesIO
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils import EzPickle
from gymnasium.vector import VectorEnv

from groupwise.envs import atari
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
MUJOCO_DATA = "mujoco._structs.MjData"
_MUJOCO_MODEL = "mujoco._structs.MjModel"
ALE = "ale_py._ale_py.ALEInterface"
_NOT_PICKLED = (pickle.PicklingError, TypeError, AttributeError, RecursionError, ValueError)
_STAYING_KINDS = {
    MUJOCO_DATA,
    _MUJOCO_MODEL,
    ALE,
    "gymnasium.envs.mujoco.mujoco_rendering.MujocoRenderer",
    "gymnasium_robotics.utils.mujoco_utils.MujocoModelNames",
    "pygame.surface.Surface",
    "pygame.time.Clock",
    "pygame.font.Font",
    "pygame.window.Window",
    "_thread.lock",
    "_thread.RLock",
}

_Key: TypeAlias = tuple[int, str]
"""Layer and name of an attribute."""
_SHARED_LAYER = -1
"""In place of the layer, for an object that several environments share, with its id as the name."""
Snapshot: TypeAlias = tuple[bytes, Any]
"""Attributes of the layers, and a simulator's own state. Picklable; only the adapter that made it can read it."""


@runtime_checkable
class HasState(Protocol):
    """An environment, or a wrapper, that captures and restores itself and all that it wraps."""

    def clone_state(self) -> Any:
        """Complete state of the environment, picklable; ``np_random`` need not be in it."""

    def restore_state(self, state: Any) -> None:
        """Go back to a state from ``clone_state``, here or in another environment made the same way."""


@runtime_checkable
class DrawsOnDemand(Protocol):
    """An environment whose images take long, so that the caller decides when it draws."""

    draws: bool
    """Whether ``step`` draws. Otherwise its observation keeps the last drawn images; ``reset`` always draws."""

    def image(self) -> np.ndarray:
        """The images of the present state, as ``obs["image"]``."""


class SnapshotAdapter:
    """Captures and restores the attributes of every layer, and a simulator's own state in subclasses.

    The attributes may miss state that is kept elsewhere, so the start check compares restored environments.

    Args:
        num_layers: outer layers whose attributes are captured; None: all.
    """

    def __init__(self, num_layers: int | None = None) -> None:
        self.num_layers = num_layers
        self.shared: Mapping[int, Any] = {}
        """The ``shared_objects`` of the environments in this process, which stay where they are."""

    def capture(self, env: gymnasium.Env) -> Snapshot:
        """The state of the whole wrapper stack and the simulator. It can be restored any number of times.

        Raises:
            EnvError: an attribute cannot be copied; names it.
        """
        layers = list(_layers(env))
        states = [_attributes(layer, layers) for layer in layers[: self.num_layers]]
        buffer, names = BytesIO(), {number: (_SHARED_LAYER, str(number)) for number in self.shared}
        names |= {id(value): key for value, key in _named(layers)}
        try:
            _Pickler(buffer, names).dump(states)
        except _NOT_PICKLED as error:
            raise EnvError(
                f"{_culprit(layers[: self.num_layers], names)} cannot be copied: {error}; fix: give the environment "
                "clone_state() and restore_state(state), or start groups by seed"
            ) from error
        return buffer.getvalue(), self.capture_simulator(env)

    def restore(self, env: gymnasium.Env, snapshot: Snapshot) -> None:
        """Put an environment into a captured state: the one that was captured, or another one made the same way."""
        attributes, simulator = snapshot
        layers = list(_layers(env))
        objects = {(_SHARED_LAYER, str(number)): value for number, value in self.shared.items()}
        objects |= {key: value for value, key in _named(layers)}
        states = _Unpickler(BytesIO(attributes), objects).load()
        for layer, (staying, state) in zip(layers[: self.num_layers], states, strict=True):
            here = vars(layer)
            kept = {name for name, value in here.items() if _is_kept(value, layers)}
            for name in [name for name in here if name not in state and name not in staying]:
                if name not in kept:
                    del here[name]
            here.update({name: value for name, value in state.items() if name not in kept})
        self.restore_simulator(env, simulator)

    def capture_simulator(self, env: gymnasium.Env) -> Any:
        """The simulator's state, which the attributes do not hold."""

    def restore_simulator(self, env: gymnasium.Env, state: Any) -> None:
        """Restore the state from ``capture_simulator``."""


def adapter_for(env: gymnasium.Env) -> SnapshotAdapter | None:
    """The adapter that knows this environment's simulator, or the environment's own way; None if there is neither."""
    layers = list(_layers(env))
    own = next((number for number, layer in enumerate(layers) if isinstance(layer, HasState)), None)
    if own in (None, len(layers) - 1) and attribute(env, ALE) is not None:
        return _Ale()  # Atari's own pair leaves the action that sticks out
    if own is not None:
        return _Own(own)
    is_mujoco = attribute(env, MUJOCO_DATA) is not None and attribute(env, _MUJOCO_MODEL) is not None
    return _Mujoco() if is_mujoco else None


def reseed_noise(env: gymnasium.Env, noise_seed: int) -> None:
    """Seed everything random after the start.

    This covers ``np_random``, generators in attributes of the environment or a wrapper (also in dictionaries, lists,
    tuples and other objects there), spaces in attributes that have a generator, and the simulator's own. They are seeded in
    place, as others may refer to them.
    """
    seeds = [(generator, derive_seed(noise_seed, name)) for name, generator in _kept_generators(env)]
    for generator, seed in [*seeds, (env.unwrapped.np_random, noise_seed)]:
        if isinstance(generator, np.random.Generator):
            kind: Any = type(generator.bit_generator)
            generator.bit_generator.state = kind(seed).state
        else:
            generator.seed(seed)
    if (ale := attribute(env, ALE)) is not None:
        atari.reseed_ale(ale, noise_seed)


Generator: TypeAlias = np.random.Generator | np.random.RandomState | random.Random
_NEVER_SHARED = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    frozenset,
    tuple,
    Enum,
    np.generic,
    types.NoneType,
    Generator,
    *_NO_STATE,
)
_NO_ENTRIES = (gymnasium.Env, *_NO_STATE)
_PLAIN = frozenset({bool, int, float, str, types.NoneType, np.ndarray, np.float64, np.float32, np.int64})
"""Most attributes, which are passed over at once: every episode begins with this search."""
_MOST_KEPT = 32
"""Larger containers hold data; searching them would cost more than the start."""


def _kept_generators(env: gymnasium.Env) -> Iterator[tuple[str, Generator | gymnasium.Space]]:
    """Generators besides ``np_random`` and used spaces in attributes, or entries of one, with unique names."""
    for index, layer in enumerate(_layers(env)):
        for name, value in vars(layer).items():
            if type(value) in _PLAIN:
                continue
            if isinstance(value, gymnasium.Space):
                if getattr(value, "_np_random", None) is not None:
                    yield f"{index}.{name}", value
            elif isinstance(value, Generator):
                if name != "_np_random":
                    yield f"{index}.{name}", value
            else:
                for key, entry in _entries(value):
                    if isinstance(entry, Generator):
                        yield f"{index}.{name}.{key}", entry


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Entries of a small container, or attributes of an object that is no environment, by name or number."""
    if isinstance(value, list | tuple):
        yield from enumerate(value) if len(value) <= _MOST_KEPT else ()
    elif isinstance(value, dict):
        yield from value.items() if len(value) <= _MOST_KEPT else ()
    elif not isinstance(value, _NO_ENTRIES):
        yield from getattr(value, "__dict__", {}).items()


def shared_objects(envs: Sequence[gymnasium.Env]) -> dict[int, Any]:
    """Objects that attributes of several environments hold, or entries of these, by id: they are the state of none.

    To be called before the first reset, which may choose among objects that all environments know.
    """
    owners, found = dict[int, int](), dict[int, Any]()
    for number, env in enumerate(envs):
        for layer in _layers(env):
            for value in vars(layer).values():
                for one in (value, *(entry for _, entry in _entries(value))):
                    if not isinstance(one, _NEVER_SHARED) and owners.setdefault(id(one), number) != number:
                        found[id(one)] = one
    return found


class _Own(SnapshotAdapter):
    """``clone_state`` and ``restore_state`` of the layer inside the captured ones, which cover all that it wraps."""

    def capture_simulator(self, env: gymnasium.Env) -> bytes:
        own = self._own(env)
        try:
            return pickle.dumps((own.clone_state(), env.np_random), protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise EnvError(
                f"the state that {type(own).__name__}.clone_state() returned cannot be pickled: {error}; fix: return "
                "plain data (numbers, arrays, dictionaries)"
            ) from error

    def restore_simulator(self, env: gymnasium.Env, state: bytes) -> None:
        own_state, np_random = pickle.loads(state)  # noqa: S301  made by ``capture_simulator`` in this process or its parent
        self._own(env).restore_state(own_state)
        env.unwrapped.np_random = np_random

    def _own(self, env: gymnasium.Env) -> Any:
        assert self.num_layers is not None
        return list(_layers(env))[self.num_layers]


class _Mujoco(SnapshotAdapter):
    """A copy of ``MjData``, which unlike MuJoCo's state vectors restores bit for bit, in the environment's own model."""

    def capture_simulator(self, env: gymnasium.Env) -> Any:
        import mujoco

        model = attribute(env, _MUJOCO_MODEL)
        copy = mujoco.MjData(model)
        mujoco.mj_copyData(copy, model, attribute(env, MUJOCO_DATA))
        return copy

    def restore_simulator(self, env: gymnasium.Env, state: Any) -> None:
        import mujoco

        mujoco.mj_copyData(attribute(env, MUJOCO_DATA), attribute(env, _MUJOCO_MODEL), state)


class _Ale(SnapshotAdapter):
    """The Atari machine."""

    def capture_simulator(self, env: gymnasium.Env) -> bytes:
        return atari.capture_ale(attribute(env, ALE))

    def restore_simulator(self, env: gymnasium.Env, state: bytes) -> None:
        atari.restore_ale(attribute(env, ALE), state)


def _layers(env: gymnasium.Env) -> Iterator[gymnasium.Env]:
    """The wrappers, outermost first, and the environment itself."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env
    yield env


def attribute(env: gymnasium.Env, kind: str) -> Any:
    """The attribute of the innermost environment whose class has this full name; None without one."""
    return next((value for value in vars(env.unwrapped).values() if kind_of(value) == kind), None)


def _attributes(layer: gymnasium.Env, layers: Sequence[gymnasium.Env]) -> tuple[list[str], dict[str, Any]]:
    """Names of the attributes that stay, and the other attributes."""
    attributes = vars(layer)
    staying = [name for name, value in attributes.items() if _is_kept(value, layers)]
    return staying, {name: value for name, value in attributes.items() if name not in staying}


def stays(value: Any) -> bool:
    """Whether an attribute is not captured: it is no state, or its adapter handles it."""
    return isinstance(value, _NO_STATE) or kind_of(value) in _STAYING_KINDS


def _is_kept(value: Any, layers: Sequence[gymnasium.Env]) -> bool:
    """Whether an attribute stays when an environment is restored. What is code, and found by name, may change in an episode."""
    if isinstance(value, types.MethodType):
        name = getattr(value, "__name__", "")
        return not any(value.__self__ is layer and getattr(layer, name, None) == value for layer in layers)
    if isinstance(value, types.FunctionType | type):
        try:
            return attrgetter(value.__qualname__)(sys.modules[value.__module__]) is not value
        except (AttributeError, KeyError):
            return True
    return stays(value)


def kind_of(value: Any) -> str:
    """Full name of the class."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _named(layers: list[gymnasium.Env]) -> Iterator[tuple[Any, _Key]]:
    """Objects that copied attributes refer to by key instead of copying them."""
    for index, layer in enumerate(layers):
        yield layer, (index, "")
        for name, value in vars(layer).items():
            if _is_kept(value, layers):
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
        for name, value in _attributes(layer, layers)[1].items():
            try:
                _Pickler(BytesIO(), names).dump(value)
            except _NOT_PICKLED:
                return f"{type(layer).__name__}.{name} ({type(value).__name__})"
    return "the environment"


# State of Gymnasium environments as plain data, for running episodes in checkpoints

_ENVS = (gymnasium.Env, VectorEnv)
_MOST_VALUES = 100_000
"""More (such as tables of transitions) would make checkpoints slow."""
MOST_OF_ROWS = 1_000_000
"""Most values of all rows together; half of what can be read again."""
_BYTES_OF_VALUE = 16
"""Bytes of an array that count as a value: all rows have at most 16 MB."""
_COST_OF_SCALAR = 100
"""Values that a number of NumPy's counts as: a checkpoint has a tensor for each."""
_CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "deque": deque}
_SHARED = (np.ndarray, list, deque, dict)
"""Objects that several attributes may hold, and one of them may change."""
_MOST_PARTS = 100
"""More parts of one array are not compared with each other."""


class _CannotCaptureError(Exception):
    pass


def capture(
    env: gymnasium.Env | VectorEnv, room: Iterator[int] | None = None, shared: Collection[int] = ()
) -> dict[str, Any] | None:
    """The attributes of an environment, its wrappers and everything inside as plain data; None if they hold anything else.

    Args:
        room: an item for each value that fits; several environments may share it.
        shared: ids of the ``shared_objects`` of these environments, which are left out.
    """
    budget = islice(range(_MOST_VALUES) if room is None else room, _MOST_VALUES)
    numbers = {one: number for number, one in enumerate(shared)}
    try:
        captured: dict[str, Any] = _captured(env, _Seen({}, defaultdict(list), numbers), budget)
        return captured | {"shared": len(numbers)}
    except _CannotCaptureError:
        return None


def restore(env: gymnasium.Env | VectorEnv, state: Mapping[str, Any], shared: Mapping[int, Any] | None = None) -> None:
    """Put an environment made the same way, and reset at least once, into a captured state.

    Args:
        shared: the ``shared_objects`` of these environments.

    Raises:
        EnvError: it is made of other objects than the captured one.
    """
    name = str(env)  # of all its wrappers, which a half restored one may lack
    try:
        made = [*(shared or {}).values()]
        if state["shared"] != len(made):
            raise ValueError(f"environments share {len(made)} objects, and shared {state['shared']}")
        _restored(env, state, made)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise EnvError(f"the captured state does not fit {name}: {error}; fix: make it the same way") from error


class _Seen(NamedTuple):
    """Objects that were captured so far."""

    objects: dict[int, tuple[int, Any]]
    """Number and object of each environment, array and container by its id. One that comes twice is captured once, so that it is
    one object again when it is restored."""
    arrays: dict[int, list[np.ndarray]]
    """Arrays by the id of the one whose memory they are parts of."""
    shared: Mapping[int, int]
    """Numbers of the objects that are left out, by id; those of ``objects`` follow them."""

    def add(self, value: Any) -> None:
        """Give the object the next number."""
        self.objects[id(value)] = len(self.shared) + len(self.objects), value

    def is_part(self, array: np.ndarray) -> bool:
        """Whether the array shares memory with another one; it is noted."""
        root = array
        while isinstance(root.base, np.ndarray):
            root = root.base
        others = self.arrays[id(root)]
        shares = len(others) > _MOST_PARTS or any(np.shares_memory(array, other) for other in others)
        others.append(array)
        return shares


def _captured(value: Any, seen: _Seen, budget: Iterator[int]) -> Any:
    if id(value) in seen.shared:
        return {"kind": "same", "number": seen.shared[id(value)]}
    is_number, cost = isinstance(value, np.generic) and not isinstance(value, str), 1
    if is_number or type(value) is np.ndarray:
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8 or not value.dtype.isnative:
            raise _CannotCaptureError
        cost = _COST_OF_SCALAR if is_number else 1 + value.nbytes // _BYTES_OF_VALUE
    if len([*islice(budget, cost)]) < cost:
        raise _CannotCaptureError
    if value is None or is_number or (isinstance(value, bool | int | float | str) and not isinstance(value, Enum)):
        return value
    if type(value) in _SHARED:
        if id(value) in seen.objects:
            return {"kind": "same", "number": seen.objects[id(value)][0]}
        seen.add(value)
    if type(value) is np.ndarray:
        if seen.is_part(value):
            raise _CannotCaptureError
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
        if id(value) in seen.objects:
            return {"kind": "stays"}
        seen.add(value)
        if isinstance(value, HasState):
            parts = {"state": value.clone_state(), "np_random": value.np_random}
            return {"kind": "own", **{name: _captured(part, seen, budget) for name, part in parts.items()}}
        attributes = {name: _captured(part, seen, budget) for name, part in vars(value).items()}
        return {"kind": "env", "attributes": attributes}
    for kind, container in _CONTAINERS.items():
        if type(value) is container:
            return {"kind": kind, "items": [_captured(item, seen, budget) for item in cast(Any, value)]}
    if type(value) is dict:
        items = [[_captured(key, seen, budget), _captured(part, seen, budget)] for key, part in value.items()]
        return {"kind": "dict", "items": items}
    if kind_of(value) == MUJOCO_DATA:
        arrays = {name: array.copy() for name, array in _mujoco_arrays(value)}
        return {"kind": "mujoco", "time": value.time, "arrays": arrays, "model": _digest(value.model)}
    if isinstance(value, types.MethodType | types.FunctionType | type):
        return {"kind": "code", "name": getattr(value, "__name__", "")}
    if isinstance(value, functools.partial) or (stays(value) and kind_of(value) != ALE):
        return {"kind": "stays"}
    raise _CannotCaptureError


def _restored(now: Any, saved: Any, made: list[Any]) -> Any:
    """The restored value; ``now`` itself, where it is an object that is changed in place.

    Args:
        made: the objects that are numbered in a captured state, so far.
    """
    if not isinstance(saved, Mapping):
        if isinstance(saved, np.ndarray):
            made.append(saved.copy())
            return made[-1]
        return saved
    match saved["kind"]:
        case "stays":
            return now
        case "code":
            if getattr(now, "__name__", "") != saved["name"]:
                raise TypeError(f"an attribute was {saved['name']!r:.80}, and is another function after a reset")
            return now
        case "same":
            return made[saved["number"]]
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

            if _digest(now.model) != saved["model"]:  # such as one that resets randomise
                raise ValueError("its MjModel is another one now")
            mujoco.mj_resetData(now.model, now)
            now.time = saved["time"]
            for name, array in _mujoco_arrays(now):
                array[...] = saved["arrays"][name]
        case "env":
            made.append(now)
            mine, attributes = vars(now), saved["attributes"]
            restored = {name: _restored(mine.get(name), part, made) for name, part in attributes.items()}
            mine.clear()  # only now: an environment whose state does not fit can still be reset
            mine.update(restored)
        case "own":
            made.append(now)
            now.restore_state(_restored(now.clone_state(), saved["state"], made))
            _restored(now.np_random, saved["np_random"], made)
        case "dict":
            table: dict[Any, Any] = {}
            made.append(table)
            before = now if isinstance(now, dict) else {}
            for saved_key, part in saved["items"]:
                key = _restored(None, saved_key, made)
                table[key] = _restored(before.get(key), part, made)
            return table
        case "tuple":
            return tuple(_items(now, saved["items"], made))
        case kind:
            items: Any = deque(maxlen=now.maxlen) if kind == "deque" else []
            made.append(items)
            items.extend(_items(now, saved["items"], made))
            return items
    return now


def _items(now: Any, saved: list[Any], made: list[Any]) -> Iterator[Any]:
    """The restored items of a list, tuple or deque."""
    old = list(now) if isinstance(now, list | tuple | deque) else []
    old += [None] * len(saved)
    for mine, item in zip(old, saved, strict=False):
        yield _restored(mine, item, made)


def _digest(model: Any) -> str:
    """A digest of all numbers of an ``MjModel``."""
    import mujoco

    buffer = np.zeros(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return blake2b(buffer.tobytes(), digest_size=16).hexdigest()


def _mujoco_arrays(data: Any) -> list[tuple[str, np.ndarray]]:
    """The arrays of ``MjData`` whose size follows from the model, also derived ones, since rewards read them.

    Contacts and constraints are recomputed in each step.
    """
    import mujoco

    empty = mujoco.MjData(data.model)
    names = sorted(name for name, part in vars(type(data)).items() if isinstance(part, property))
    arrays = [(name, getattr(data, name), getattr(empty, name)) for name in names]
    return [(n, now) for n, now, new in arrays if isinstance(now, np.ndarray) and now.size and now.shape == new.shape]
