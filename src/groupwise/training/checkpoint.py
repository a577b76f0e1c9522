"""Checkpoints: a folder of tensors (safetensors) and plain data (JSON), never pickle.

    latest/
      policy.safetensors      weights and normaliser statistics
      algorithm.safetensors   tensors of the optimiser, the reference policy, ...
      state.json              plain data of the state, with references to those tensors
      manifest.json           format, environment, SHA-256 of the files above
    latest.1/, latest.2/    the ones before it
    best/                   the policy only

A new checkpoint takes the place of the old one only when it is complete, so a usable one survives a kill at any moment. If
the newest is damaged, the one before it is loaded.

A checkpoint may come from a stranger: sizes and kinds of its files are checked before they are read.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import safetensors.torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn

from groupwise.config.base import explain
from groupwise.errors import CheckpointError, GroupwiseError
from groupwise.report.folder import Count
from groupwise.system import files
from groupwise.system.terminal import printable
from groupwise.training.plain_data import decode, encode

if TYPE_CHECKING:
    from groupwise.training.trainer import Trainer

log = logging.getLogger(__name__)
Content = TypeVar("Content")

FORMAT = 2
POLICY, ALGORITHM, STATE, MANIFEST = "policy.safetensors", "algorithm.safetensors", "state.json", "manifest.json"
DAMAGES = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)
"""What code raises that reads a state with wrong entries."""
MAX_STATE = 64 * files.MIB
"""Bytes of ``state.json``."""
MAX_EXTRA = 1024 * files.MIB
"""Bytes of a file of tensors, besides those that grow with the policy."""
_FIX = "fix: take another checkpoint of the run, such as checkpoints/best to evaluate, or train again"


class Identity(NamedTuple):
    """The environment of a checkpoint, which must match when it is loaded."""

    env_id: str
    observation_space: str
    action_space: str


class _Counters(BaseModel, strict=True):
    """Entries of a state that say what was done."""

    iteration: Count
    env_steps: Count
    epochs: float = 0.0


class Checkpoint(NamedTuple):
    """Content of a checkpoint."""

    policy: dict[str, Tensor]
    """State dict of the policy."""
    state: dict[str, Any]
    """Plain data and tensors: counters, callbacks, algorithm; counters only in ``best/``."""


def save_checkpoint(folder: Path, checkpoint: Checkpoint, identity: Identity) -> None:
    """Write a checkpoint in place of the one in ``folder``.

    Raises:
        CheckpointError: as ``serialize``.
        OSError: as ``write_checkpoint``.
    """
    write_checkpoint(folder, serialize(checkpoint), identity)


def serialize(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The content of a checkpoint's files, which training cannot change any more.

    Raises:
        CheckpointError: the state holds something that is neither plain data nor a tensor, or more than is read again.
    """
    tensors: dict[str, Tensor] = {}
    state = encode(checkpoint.state, tensors, "")
    content = {
        POLICY: safetensors.torch.save(_own(checkpoint.policy)),
        ALGORITHM: safetensors.torch.save(_own(tensors)),
        STATE: json.dumps(state).encode(),  # with an indent it would take five times as long
    }
    _check_readable(content, checkpoint.policy)
    return content


def write_checkpoint(folder: Path, content: Mapping[str, bytes], identity: Identity, keep: int = 1) -> None:
    """Write a checkpoint atomically.

    Args:
        content: as ``serialize`` gives it.
        keep: complete checkpoints that stay, with the new one.

    Raises:
        OSError: it cannot be written; those that exist are as they were.
    """
    manifest = {
        "format": FORMAT,
        **identity._asdict(),
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in content.items()},
    }
    content = {**content, MANIFEST: json.dumps(manifest, indent=1).encode()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = files.fresh_name(folder)
    try:
        partial.mkdir()
        for name, data in content.items():
            files.create(partial / name, data)
        files.sync_folder(partial)
        _make_room(folder)
        os.replace(partial, folder)
        files.sync_folder(folder.parent)
    except BaseException:
        if not folder.exists() and (before := folder.with_name(f"{folder.name}.1")).exists():
            before.rename(folder)
        files.remove(partial)
        raise
    for older in find_checkpoints(folder)[keep:]:
        files.remove(older)


def load_checkpoint(folder: Path, identity: Identity | None = None, policy: nn.Module | None = None) -> Checkpoint:
    """Content of a checkpoint, verified. If it is damaged, that of the newest one before it that is not.

    Args:
        identity: of the environment it is used in; None does not compare.
        policy: which the weights are for: its size limits that of the files. None reads files of any size.

    Raises:
        CheckpointError: all are missing, damaged or too large, or the newest is of another format or environment.
    """
    limits = _limits(None if policy is None else policy.state_dict())
    return _newest(folder, lambda found: _read_checkpoint(found, identity, limits))


def has_checkpoint(folder: Path) -> bool:
    """Whether a complete checkpoint was ever written there."""
    return bool(find_checkpoints(folder))


def saved_counts(folder: Path) -> dict[str, int | float]:
    """What was done at the checkpoint, as ``Trainer.counts``; nothing if there is none.

    Raises:
        CheckpointError: it is damaged, and so are those before it.
    """
    return _newest(folder, _read_counts) if has_checkpoint(folder) else {"iterations": 0, "steps": 0, "epochs": 0.0}


def find_checkpoints(folder: Path) -> list[Path]:
    """A checkpoint and those before it, newest first: ``latest``, ``latest.1``, ``latest.2``; without those that miss."""
    older = [
        path for path in folder.parent.glob("*") if re.fullmatch(re.escape(folder.name) + r"\.[0-9]{1,9}", path.name)
    ]
    found = [folder, *sorted(older, key=lambda path: int(path.suffix[1:]))]
    return [path for path in found if path.is_dir()]


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


def load_state(run: "Trainer", state: dict[str, Any], where: Path) -> None:
    """Restore the state of a run.

    Raises:
        CheckpointError: an entry is missing or of another type or shape.
    """
    try:
        _check_like(state, run.state_dict() | {"callbacks": None}, "state")
        _counts_of(state)
        run.load_state_dict(state)
    except GroupwiseError:
        raise
    except DAMAGES as error:
        raise CheckpointError(f"{where} is damaged: its state does not fit ({_in_short(error)}); {_FIX}") from error


def _check_like(saved: Any, fresh: Any, path: str) -> None:
    """Raise an error if an entry of a saved state has another type or shape than that of a fresh one."""
    if fresh is None or saved is None:
        return
    kinds: tuple[Any, ...] = (int | float, str, dict, list, tuple, Tensor, np.ndarray)
    if kind := next((kind for kind in kinds if isinstance(fresh, kind) and not isinstance(saved, kind)), None):
        raise TypeError(f"{path} is {saved!r:.80}, expected {kind}")
    if isinstance(fresh, Tensor) and saved.shape != fresh.shape:
        raise ValueError(f"{path} has shape {tuple(saved.shape)}, expected {tuple(fresh.shape)}")
    if isinstance(fresh, dict):
        for key in fresh.keys() & saved.keys():
            _check_like(saved[key], fresh[key], f"{path}.{key}")
    elif isinstance(fresh, list | tuple):
        for index, (entry, value) in enumerate(zip(saved, fresh, strict=False)):
            _check_like(entry, value, f"{path}.{index}")


def _counts_of(state: Mapping[str, Any]) -> dict[str, int | float]:
    """What is done, by the entries of a state; an error if they are no counts."""
    found = _Counters.model_validate(state)
    return {"iterations": found.iteration, "steps": found.env_steps, "epochs": found.epochs}


class _DamageError(Exception):
    """Something in a checkpoint is missing or not as it was written."""


def _newest(folder: Path, read: Callable[[Path], Content]) -> Content:
    """What ``read`` finds in the newest checkpoint that is not damaged; a ``CheckpointError`` if there is none."""
    existing = find_checkpoints(folder)
    if not existing:
        raise CheckpointError(f"no checkpoint at {folder}; fix: give a run folder that has checkpoints/{folder.name}")
    damages = [] if existing[0] == folder else [f"{folder} is missing"]
    for found in existing:
        try:
            content = read(found)
        except _DamageError as damage:
            damages.append(str(damage))
            continue
        if damages:
            log.warning("%s", printable(f"{'; '.join(damages)}; using {found} instead"))
        return content
    raise CheckpointError(f"{'; '.join(damages)}; {_FIX}")


def _read_checkpoint(folder: Path, identity: Identity | None, limits: Mapping[str, int]) -> Checkpoint:
    manifest = _read_manifest(folder)
    for field, want in ({} if identity is None else identity._asdict()).items():
        if manifest[field] != want:
            raise CheckpointError(
                f"{folder} belongs to another environment: its {field} is {manifest[field]!r:.200}, here it is {want!r}; "
                "fix: use the environment it was trained in"
            )
    content = {name: _read_verified(folder / name, manifest["sha256"][name], limits[name]) for name in limits}
    try:
        weights, tensors = (safetensors.torch.load(content[name]) for name in (POLICY, ALGORITHM))
        state = decode(files.parse_json(content[STATE]), tensors)
        if not isinstance(state, dict):
            raise TypeError(f"its state is a {type(state).__name__}, expected an object")
    except (*DAMAGES, SafetensorError) as error:
        raise _DamageError(f"{folder} is damaged: {_in_short(error)}") from error
    return Checkpoint(weights, state)


def _read_counts(folder: Path) -> dict[str, int | float]:
    path = folder / STATE
    try:
        return _counts_of(files.parse_json(files.read(path, MAX_STATE)))
    except (OSError, *DAMAGES) as error:
        raise _DamageError(f"{path} is missing or damaged ({_in_short(error)})") from error


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = files.parse_json(files.read(path, files.MAX_SETTINGS))
        version, _ = manifest["format"], [manifest[key] for key in Identity._fields]
        if type(version) is not int:
            raise TypeError(f"format is {version!r:.80}, expected a number")
        digests = {name: manifest["sha256"][name] for name in (POLICY, ALGORITHM, STATE)}
        if wrong := [name for name, digest in digests.items() if not isinstance(digest, str)]:
            raise TypeError(f"the SHA-256 of {wrong[0]} is {digests[wrong[0]]!r:.80}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _DamageError(f"{path} is missing or damaged ({_in_short(error)})") from error
    if version != FORMAT:
        raise CheckpointError(
            f"{folder} was made by {'a later' if version > FORMAT else 'an earlier'} version of groupwise (format {version}, "
            f"this one reads format {FORMAT}); fix: train again, or use that version"
        )
    return manifest


def _read_verified(path: Path, digest: str, limit: int) -> bytes:
    try:
        with files.reading(path, limit) as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:  # before all of it is in memory
                raise ValueError(f"its SHA-256 is not the one in {MANIFEST}")
            file.seek(0)
            return file.read()
    except OSError as error:
        raise _DamageError(f"{path} is missing ({error})") from error
    except ValueError as error:
        raise _DamageError(f"{path} is damaged: {error}") from error


def _limits(policy: Mapping[str, Any] | None) -> dict[str, int]:
    """The most bytes of each file, for the weights of a policy, of which optimiser and reference keep several copies."""
    if policy is None:
        return {POLICY: 2**63, ALGORITHM: 2**63, STATE: MAX_STATE}
    size = sum(value.nbytes for value in policy.values() if isinstance(value, Tensor))
    return {POLICY: MAX_EXTRA + 2 * size, ALGORITHM: MAX_EXTRA + 16 * size, STATE: MAX_STATE}


def _check_readable(content: Mapping[str, bytes], policy: Mapping[str, Any]) -> None:
    """Raise a ``CheckpointError`` if a checkpoint could not be loaded again."""
    for name, limit in _limits(policy).items():
        try:
            files.check_size(len(content[name]), limit)
            if name == STATE:
                files.parse_json(content[name])
        except ValueError as error:
            raise CheckpointError(
                f"{name} of a checkpoint could not be read again: {error}; fix: return less from state_dict(), and arrays "
                "as tensors"
            ) from error


def _in_short(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return explain(error.errors()[0])
    return f"{error!r:.200}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error!s:.200}"


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that share no memory: safetensors refuses tied weights."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}


def _make_room(folder: Path) -> None:
    """Rename ``folder`` to the one before it, and so on; at every moment all of them are complete."""

    def name(number: int) -> Path:
        return folder.with_name(f"{folder.name}.{number}") if number else folder

    free = next(number for number in count() if not os.path.lexists(name(number)))
    for number in range(free, 0, -1):
        os.replace(name(number - 1), name(number))
