"""Checkpoints: a folder of tensors (safetensors) and plain data (JSON), never pickle.

    latest/
      policy.safetensors      weights and normaliser statistics
      algorithm.safetensors   tensors of the optimiser, the reference policy, ...
      state.json              plain data of the state, with references to those tensors
    manifest.json           format, environment, SHA-256 of the files above

A new checkpoint replaces the old one only when it is complete, so a usable one survives a kill at any moment. ``best/``
holds the policy only.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from groupwise.errors import CheckpointError
from groupwise.policies.base import Policy
from groupwise.report.folder import write_through

FORMAT = 2
POLICY, ALGORITHM, STATE, MANIFEST = "policy.safetensors", "algorithm.safetensors", "state.json", "manifest.json"
_FIX = "fix: take another checkpoint of the run, or train again"


class Identity(NamedTuple):
    """The environment of a checkpoint, which must match when it is loaded."""

    env_id: str
    observation_space: str
    action_space: str


class Checkpoint(NamedTuple):
    """Content of a checkpoint."""

    policy: dict[str, Tensor]
    """State dict of the policy."""
    state: dict[str, Any]
    """Plain data and tensors: counters, callbacks, algorithm; counters only in ``best/``."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint, identity: Identity) -> None:
    """Write a checkpoint atomically.

    Raises:
        CheckpointError: the state holds something that is neither plain data nor a tensor.
    """
    partial, previous = _beside(folder, "partial"), _beside(folder, "previous")
    tensors: dict[str, Tensor] = {}
    state = _encode(checkpoint.state, tensors, "")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files = {
        POLICY: safetensors.torch.save(_own(checkpoint.policy)),
        ALGORITHM: safetensors.torch.save(_own(tensors)),
        STATE: json.dumps(state, indent=1).encode(),
    }
    manifest = {"format": FORMAT, **identity._asdict(), "sha256": {name: _digest(data) for name, data in files.items()}}
    for name, data in (files | {MANIFEST: json.dumps(manifest, indent=1).encode()}).items():
        write_through(partial / name, data)
    _sync_folder(partial)
    _swap(partial, folder, previous)


def load_checkpoint(folder: Path, identity: Identity | None = None) -> Checkpoint:
    """Content of a checkpoint, verified.

    Args:
        identity: of the environment it is used in; None does not compare.

    Raises:
        CheckpointError: it is missing, damaged, of a newer format or of another environment.
    """
    folder = find_checkpoint(folder)
    manifest = _read_manifest(folder)
    for field, want in ({} if identity is None else identity._asdict()).items():
        if manifest[field] != want:
            raise CheckpointError(
                f"{folder} belongs to another environment: its {field} is {manifest[field]!r}, here it is {want!r}; "
                "fix: use the environment it was trained in"
            )
    files = {name: _read_verified(folder / name, digest) for name, digest in manifest["sha256"].items()}
    policy, tensors = (safetensors.torch.load(files[name]) for name in (POLICY, ALGORITHM))
    return Checkpoint(policy, _decode(json.loads(files[STATE]), tensors))


def has_checkpoint(folder: Path) -> bool:
    """Whether a complete checkpoint was ever written there."""
    return folder.is_dir() or _beside(folder, "previous").is_dir()


def saved_steps(folder: Path) -> int | None:
    """Environment steps at the checkpoint; None if there is none.

    Raises:
        CheckpointError: it is damaged.
    """
    if not has_checkpoint(folder):
        return None
    path = find_checkpoint(folder) / STATE
    try:
        return int(json.loads(path.read_bytes())["env_steps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is missing or damaged ({error!r}); {_FIX}") from error


def find_checkpoint(folder: Path) -> Path:
    """Path of the complete checkpoint: ``folder``, or the previous one if a kill came between two renames.

    Raises:
        CheckpointError: there is none.
    """
    if not has_checkpoint(folder):
        raise CheckpointError(f"no checkpoint at {folder}; fix: give a run folder that has checkpoints/{folder.name}")
    return folder if folder.is_dir() else _beside(folder, "previous")


def load_policy(policy: nn.Module, weights: Mapping[str, Tensor], where: Path) -> None:
    """Load weights into a policy of the same architecture.

    Raises:
        CheckpointError: a tensor is missing, unexpected or of another shape (names it).
    """
    own = policy.state_dict()
    for name in sorted({*own, *weights}):
        have, want = (tuple(d[name].shape) if name in d else None for d in (weights, own))
        if have != want:
            raise CheckpointError(
                f"{where}: tensor {name!r} has shape {have}, but the policy needs {want} (None: absent); "
                "fix: build the policy with the settings that it was trained with"
            )
    policy.load_state_dict(dict(weights))


class Initialized(NamedTuple):
    """How a policy got its first weights."""

    folder: Path
    """The checkpoint."""
    taken: int
    """Tensors that were taken over."""
    fresh: tuple[str, ...]
    """Modules that the checkpoint lacks, and that keep their own first weights."""
    unused: tuple[str, ...]
    """Modules of the checkpoint that the policy lacks."""

    def __str__(self) -> str:
        parts = [f"Weights: {self.taken} tensors from {self.folder}"]
        parts += [f"{', '.join(self.fresh)} starts fresh"] if self.fresh else []
        parts += [f"its {', '.join(self.unused)} is not used"] if self.unused else []
        return f"{'; '.join(parts)}."


def initialize(policy: Policy, source: Path) -> Initialized:
    """Give a policy the weights of another one, except those of its ``value_modules`` that the other lacks.

    Args:
        source: a run folder (its latest checkpoint), or a checkpoint.

    Raises:
        CheckpointError: there is none, or its policy differs (names the tensors).
    """
    folder = find_checkpoint(source / "checkpoints" / "latest" if (source / "checkpoints").is_dir() else source)
    weights, own = load_checkpoint(folder).policy, policy.state_dict()
    absent, unused = own.keys() - weights.keys(), weights.keys() - own.keys()
    differing = [name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape]
    of_values = {name for name in absent | unused if name.partition(".")[0] in policy.value_modules}
    for names, what in (
        (absent - of_values, "lacks"),
        (unused - of_values, "has, which the policy lacks,"),
        (differing, "has in another shape"),
    ):
        if names:
            raise CheckpointError(
                f"policy.init_from: {folder} {what} {', '.join(sorted(names))}; fix: the settings of the policy that it was "
                "trained with"
            )
    policy.load_state_dict({**own, **{name: weights[name] for name in own.keys() & weights.keys()}})
    fresh, left = (tuple(sorted({name.partition(".")[0] for name in names})) for names in (absent, unused))
    return Initialized(folder, len(own) - len(absent), fresh, left)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        version, _ = manifest["format"], [manifest[key] for key in Identity._fields]
        manifest["sha256"] = dict(manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is missing or damaged ({error!r}); {_FIX}") from error
    if version != FORMAT:
        raise CheckpointError(
            f"{folder} was made by {'a later' if version > FORMAT else 'an earlier'} version of groupwise (format {version}, "
            f"this one reads format {FORMAT}); fix: train again, or use that version"
        )
    return manifest


def _read_verified(path: Path, digest: str) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} is missing ({error}); {_FIX}") from error
    if _digest(data) != digest:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {MANIFEST}; {_FIX}")
    return data


def _encode(value: object, tensors: dict[str, Tensor], path: str) -> Any:
    """Nested data as JSON; tensors go to ``tensors`` by their path. ``{"$": kind, ...}`` marks what JSON lacks."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return {**_encode(torch.from_numpy(np.array(value)), tensors, path), "$": kind}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        order = sorted(range(value.dim()), key=value.stride, reverse=True)  # rounding depends on the memory layout
        tensors[path] = value.permute(order)
        return {"$": "tensor", "path": path, "order": order}
    if isinstance(value, list | tuple):
        items = [_encode(item, tensors, f"{path}/{i}") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$": "tuple", "items": items}
    if isinstance(value, Mapping):
        pairs = [(key, _encode(item, tensors, f"{path}/{key}")) for key, item in value.items()]
        if all(isinstance(key, str) for key in value) and "$" not in value:
            return dict(pairs)
        return {"$": "dict", "items": [[_encode(key, {}, path), item] for key, item in pairs]}
    raise CheckpointError(
        f"a checkpoint holds plain data and tensors only, but {path!r} is a {type(value).__name__}; "
        "fix: return such data from state_dict()"
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
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
            return tuple(_decode(value["items"], tensors))
        case "dict":
            return {_decode(key, tensors): _decode(item, tensors) for key, item in value["items"]}
        case _:
            return {key: _decode(item, tensors) for key, item in value.items()}


def _in_memory_as_saved(tensors: Mapping[str, Tensor], value: Mapping[str, Any]) -> Tensor:
    order = value["order"]
    return tensors[value["path"]].permute(sorted(range(len(order)), key=order.__getitem__))


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that share no memory: safetensors refuses tied weights."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.{suffix}")


def _swap(partial: Path, folder: Path, previous: Path) -> None:
    """Replace ``folder`` by ``partial``; at every moment ``folder`` or ``previous`` is complete."""
    if folder.is_dir():
        shutil.rmtree(previous, ignore_errors=True)
        os.replace(folder, previous)
    os.replace(partial, folder)
    _sync_folder(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Make renames and new files survive a power cut; Windows needs no such call."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
