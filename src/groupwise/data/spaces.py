"""Observation spaces in tensors: how a Gymnasium space is stored in a rollout, and how its observations get there.

Spaces come in as ``Any``: this module never imports Gymnasium, and recognises its classes by name.

| space | stored as |
|---|---|
| Box of floats | float32 |
| Box of uint8 (images), of bool | as it is |
| Box of other integers | int64 |
| Discrete, MultiDiscrete | int64, the raw number (``start`` is not subtracted) |
| MultiBinary | int8 |
| Dict, Tuple | TensorDict; a Tuple's keys are "0", "1", ... |
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from groupwise.data.rollout import Nested, Spec, TensorDict, TensorSpec
from groupwise.errors import ConfigError, DataError, GroupwiseError, UnsupportedSpaceError, nearest

SpaceKind = Literal["box", "discrete", "multi_discrete", "multi_binary", "dict", "tuple", "unsupported"]

_KINDS: dict[str, SpaceKind] = {
    "Box": "box",
    "Discrete": "discrete",
    "MultiDiscrete": "multi_discrete",
    "MultiBinary": "multi_binary",
    "Dict": "dict",
    "Tuple": "tuple",
}
_DTYPES: dict[SpaceKind, torch.dtype] = {
    "discrete": torch.int64,
    "multi_discrete": torch.int64,
    "multi_binary": torch.int8,
}


def space_kind(space: Any) -> SpaceKind:
    """The one of Gymnasium's spaces that this is, subclasses included, found by the names of its class and bases."""
    ours = (base.__name__ for base in type(space).__mro__ if base.__module__.partition(".")[0] == "gymnasium")
    return next((_KINDS[name] for name in ours if name in _KINDS), "unsupported")


def obs_spec(space: Any) -> Spec:
    """Shape and dtype of the space's observations in a rollout; nested for Dict and Tuple spaces.

    Raises:
        UnsupportedSpaceError: Text, Graph, Sequence, OneOf and others without a fixed shape; keys that are no strings.
    """
    for key in space.spaces if space_kind(space) == "dict" else ():
        if not isinstance(key, str):
            raise UnsupportedSpaceError(
                f"observation space {space!s:.80} has the key {key!r}, expected a string; fix: {str(key)!r}"
            )
    children = subspaces(space)
    if children is not None:
        return {name: obs_spec(child) for name, child in children.items()}
    dtype = _leaf_dtype(space)  # first, as unsupported spaces have no shape
    if 0 in space.shape:
        raise UnsupportedSpaceError(f"observation space {space} is empty; fix: leave it out, or a Box of shape (1,)")
    return TensorSpec(tuple(space.shape), dtype)


def subspaces(space: Any) -> dict[str, Any] | None:
    """The named children of a Dict or Tuple space, None for every other space."""
    kind = space_kind(space)
    if kind == "dict":
        return dict(space.spaces)
    return {str(i): child for i, child in enumerate(space.spaces)} if kind == "tuple" else None


def leaf_spaces(space: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """The spaces inside a (nested) Dict or Tuple space by their paths; any other space is its own leaf at ``()``."""
    children = subspaces(space)
    if children is None:
        return {path: space}
    return {p: leaf for name, child in children.items() for p, leaf in leaf_spaces(child, (*path, name)).items()}


def chosen_entries(space: Any, keys: Sequence[str] | None, setting: str) -> Any:
    """The Dict space with these entries only; the space itself if ``keys`` is None.

    Args:
        setting: where the keys come from, for errors.

    Raises:
        ConfigError: a key that the space does not have.
    """
    if keys is None:
        return space
    if space_kind(space) != "dict":
        raise ConfigError(f"{setting} names keys, and the observation is {space}, which has none; fix: leave it out")
    for key in keys:
        if key not in space.spaces:
            known = ", ".join(space.spaces)
            raise ConfigError(f"{setting}: the observation has no {key!r}{nearest(key, space.spaces)}; known: {known}")
    return type(space)({key: child for key, child in space.spaces.items() if key in keys})


def obs_to_tensor(
    space: Any, obs: Any, device: torch.device | str = "cpu", *, batched: bool, name: str = "obs"
) -> Nested:
    """The observation, or a batch of them, as ``obs_spec(space)`` describes it.

    Shares memory with ``obs`` where dtype and device allow, so copy ``obs`` first if you keep the result.

    Args:
        obs: numpy arrays (or numbers, lists, tensors) in the space's structure.
        batched: whether every leaf has a leading batch dimension.
        name: of the observation in errors.

    Raises:
        DataError: a leaf that is missing, no array of numbers, of another shape, or with numbers that its space cannot hold;
            names it.
        UnsupportedSpaceError: as ``obs_spec``.
    """
    children = subspaces(space)
    if children is None:
        return _leaf_tensor(space, _leaf_array(obs, name), device, batched, name)
    leaves = {
        key: obs_to_tensor(child, _child(obs, key, name), device, batched=batched, name=f"{name}.{key}")
        for key, child in children.items()
    }
    batch = [len(next(iter(leaves.values())))] if batched else []
    return TensorDict(leaves, batch_size=batch, device=torch.device(device))


def is_batched(space: Any, obs: Any) -> bool:
    """Whether ``obs`` is a batch of observations rather than one, by the dimensions of its first leaf.

    Raises:
        DataError: it has the dimensions of neither.
    """
    name = "obs"
    while (children := subspaces(space)) is not None:
        key = next(iter(children))
        space, obs, name = children[key], _child(obs, key, name), f"{name}.{key}"
    leaf = _leaf_array(obs, name)
    extra = leaf.ndim - len(space.shape)
    if extra not in (0, 1):
        raise DataError(_shape_message(name, tuple(leaf.shape), tuple(space.shape)))
    return extra == 1


def _leaf_tensor(space: Any, leaf: np.ndarray | Tensor, device: torch.device | str, batched: bool, name: str) -> Tensor:
    dtype, shape = _leaf_dtype(space), tuple(space.shape)
    if tuple(leaf.shape[batched:]) != shape or leaf.ndim != len(shape) + batched:
        raise DataError(_shape_message(name, tuple(leaf.shape), shape))
    if dtype != torch.float32:
        check_fits(space, leaf, name)
    if not isinstance(leaf, Tensor):
        # from_numpy takes neither strides < 0 nor read-only memory
        leaf = torch.from_numpy(np.require(leaf, requirements=["C", "W"]))
    return leaf.to(device, dtype)


def _leaf_array(obs: Any, name: str) -> np.ndarray | Tensor:
    if isinstance(obs, Tensor):
        return obs
    try:
        leaf = np.asarray(obs)
    except ValueError as error:
        raise DataError(f"{name} is no array: {error}") from error
    if isinstance(obs, np.ma.MaskedArray):
        raise DataError(f"{name} is a masked array, whose hidden numbers would be read; fix: obs.filled(0)")
    if leaf.dtype.kind not in "biuf":
        raise DataError(f"{name} has dtype {leaf.dtype}, expected numbers: {obs!r}")
    return leaf


def _leaf_dtype(space: Any) -> torch.dtype:
    kind = space_kind(space)
    if kind == "unsupported":
        raise UnsupportedSpaceError(
            f"observation space {space} is not supported; supported: Box, Discrete, MultiDiscrete, MultiBinary, and "
            "Dict or Tuple of them; fix: wrap the environment with gymnasium.wrappers.TransformObservation"
        )
    if kind == "box" and space.dtype.kind == "f":
        return torch.float32
    return _DTYPES.get(kind) or {"uint8": torch.uint8, "bool": torch.bool}.get(space.dtype.name, torch.int64)


def _child(obs: Any, key: str, name: str) -> Any:
    if not isinstance(obs, Mapping | TensorDict | Sequence):
        raise DataError(f"{name} is a {type(obs).__name__}, expected a dictionary or tuple with an entry {key!r}")
    try:
        return obs[int(key)] if isinstance(obs, Sequence) else obs[key]
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(f"{name} has no entry {key!r}, which its space has") from error


def _shape_message(name: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    batch = f"[B, {', '.join(map(str, expected))}]" if expected else "[B]"
    return f"{name} has shape {list(shape)}, expected {list(expected)} for one observation or {batch} for a batch"


# Numbers that a space can hold: they are never changed to fit

Limits = tuple[Any, Any]
"""The least and the greatest integer of a space, numbers or arrays of its shape."""


def limits_of(space: Any) -> Limits | None:
    """The integers that a space without children can hold, in its dtype and as options of its choices; None for floats."""
    kind = space_kind(space)
    if kind in ("discrete", "multi_discrete"):
        low, high = space.start, space.start + (space.n if kind == "discrete" else space.nvec) - 1
        return (int(low), int(high)) if kind == "discrete" else (low, high)
    if space.dtype.kind == "f":
        return None
    if kind == "multi_binary" or space.dtype.kind == "b":
        return 0, 1
    whole = np.iinfo(space.dtype)
    return int(whole.min), min(int(whole.max), 2**63 - 1)


def fits(numbers: np.ndarray, space: Any, limits: Limits) -> bool:
    """Whether a space of integers or truth values can hold these numbers; integers of any dtype, but no floats."""
    if not _kind_fits(numbers, space):
        return False
    low, high = limits
    if numbers.ndim == 0:  # several times as fast
        return bool(low <= numbers.item() <= high)
    return bool((numbers >= low).all() and (numbers <= high).all())


def check_fits(space: Any, numbers: np.ndarray | Tensor, name: str) -> None:
    """Refuse numbers that the space's dtype would change, and options that a choice does not have.

    Integers fit a space of floats, truth values one of integers, and floats are rounded to the space's precision.

    Args:
        numbers: of a space without children, with any leading dimensions.
        name: of the numbers in the error.

    Raises:
        DataError: names both dtypes; or the number and what is allowed.
    """
    if isinstance(numbers, Tensor):
        numbers = (numbers.float() if numbers.is_floating_point() else numbers).cpu().numpy()
    limits = limits_of(space)
    if limits is None or fits(numbers, space, limits):
        return
    if not _kind_fits(numbers, space):
        raise DataError(
            f"{name} has dtype {numbers.dtype}, expected {space.dtype} for {space!s:.80}, and numbers are not changed to fit; "
            f"fix: return {space.dtype}, or declare a Box of {numbers.dtype}"
        )
    low, high = limits
    outside = (numbers < low) | (numbers > high)
    least, greatest = (np.broadcast_to(limit, numbers.shape)[outside][0] for limit in limits)
    if space.dtype == np.uint64:
        raise DataError(f"{name} holds {numbers[outside][0]}, more than torch's {greatest}; fix: a Box of float64")
    raise DataError(
        f"{name} holds {numbers[outside][0]}, expected {least} to {greatest} for {space!s:.80}; fix: a number in the space, or a "
        "larger space"
    )


def check_dtypes(spec: Spec, obs: Any, name: str) -> None:
    """Refuse observations in tensors that a rollout of ``spec`` would change. Their numbers are not read: a GPU would wait.

    Raises:
        DataError: names both dtypes.
    """
    if isinstance(spec, Mapping):
        for key, child in spec.items():
            check_dtypes(child, obs[key], f"{name}.{key}")
        return
    is_whole = not obs.dtype.is_floating_point and spec.dtype in (torch.int64, torch.int8)
    if not (spec.dtype.is_floating_point or obs.dtype == spec.dtype or is_whole):
        raise DataError(
            f"{name} has dtype {obs.dtype}, expected {spec.dtype} by its space, and numbers are not changed to fit; fix: return "
            f"{spec.dtype}, or declare a Box of {obs.dtype}"
        )


def _kind_fits(numbers: np.ndarray, space: Any) -> bool:
    """Whether the numbers are integers, or for a space of truth values such."""
    return numbers.dtype.kind == "b" or (numbers.dtype.kind in "iu" and space.dtype.kind != "b")


# Masks of allowed actions: the entry action_mask of a Dict observation, for Discrete and MultiDiscrete actions

KEY = "action_mask"


def options(action_space: Any) -> list[int]:
    """The number of options of each choice; nothing for actions that are no choices."""
    kind = space_kind(action_space)
    if kind == "discrete":
        return [int(action_space.n)]
    return action_space.nvec.ravel().tolist() if kind == "multi_discrete" else []


def has_mask(observation_space: Any, action_space: Any) -> bool:
    """Whether observations say which actions are allowed; a ``ConfigError`` if their mask is of another size."""
    if space_kind(observation_space) != "dict" or KEY not in observation_space.spaces or not options(action_space):
        return False
    shape, size = observation_space[KEY].shape or (), sum(options(action_space))
    if math.prod(shape) != size:
        raise ConfigError(
            f"the observation's {KEY!r} has shape {list(shape)}, and the actions have {size} options ({action_space}); fix: "
            "one number for each option, or another name for what is no mask of actions"
        )
    return True


def allowed_logits(logits: Float[Tensor, "*batch option"], mask: Tensor) -> Float[Tensor, "*batch option"]:
    """The logits, with a number so low that the probability is 0 where an option is not allowed. So is its gradient.

    Where a choice has no option, as after an episode's end, any may be taken. ``mask`` has as many numbers as ``logits``.
    """
    forbidden = (mask == 0).reshape(logits.shape)
    return logits.masked_fill(forbidden, torch.finfo(logits.dtype).min)


def check(mask: Any, action_space: Any, where: str = "obs", *, error: type[GroupwiseError] = DataError) -> None:
    """Refuse a mask, or a batch of them, that leaves a choice no option, by a ``DataError`` or another ``error``."""
    rows = (torch.as_tensor(mask) != 0).reshape(-1, sum(options(action_space)))
    open_choices = [part.any(dim=-1) for part in torch.split(rows, options(action_space), dim=-1)]
    closed = ~torch.stack(open_choices).all(dim=0)
    if closed.any():
        raise error(
            f"{KEY} of {where} allows no action: {rows[closed][0].int().tolist()}; fix: at least one option of each choice, "
            "until the episode ends"
        )


def allowed_action(action: Tensor, obs: Any, action_space: Any) -> Tensor:
    """Environment actions ``[B, ...]`` that were drawn without regard to masks, as allowed ones: the number modulo their count.

    The same action and mask give the same one. Without masks in the observations they stay as they are.
    """
    if isinstance(obs, Tensor) or KEY not in obs.keys() or not options(action_space):  # noqa: SIM118  # a TensorDict
        return action
    mask = (obs[KEY] != 0).reshape(len(action), -1).cpu()
    start = torch.as_tensor(np.asarray(action_space.start)).reshape(-1)
    numbers, found = action.reshape(len(action), -1) - start, []
    for number, part in zip(numbers.unbind(-1), torch.split(mask, options(action_space), dim=-1), strict=True):
        place = number % part.sum(dim=-1).clamp(min=1) + 1
        found.append(((part.cumsum(dim=-1) == place.unsqueeze(-1)) & part).int().argmax(dim=-1))
    return (torch.stack(found, dim=-1) + start).reshape(action.shape)


# Actions of Dict and Tuple spaces as one vector: their leaves one after another. Never imports Gymnasium.


def nested_action(space: Any, action: np.ndarray | np.generic) -> Any:
    """Environment actions ``[*batch, ...]`` as the space has them; those of a Dict or Tuple space from vectors."""
    children = subspaces(space)
    if children is None:
        return action.astype(space.dtype, copy=False)
    ends = np.cumsum(
        [sum(math.prod(leaf.shape) for leaf in leaf_spaces(child).values()) for child in children.values()]
    )
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
