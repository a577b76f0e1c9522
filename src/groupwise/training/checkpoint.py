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
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import safetensors.torch
import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn

from groupwise import plugins
from groupwise import system as files
from groupwise.config.base import explain, flat
from groupwise.config.load import load_config
from groupwise.config.run import CommonCfg
from groupwise.errors import CheckpointError, ConfigError, GroupwiseError
from groupwise.policies.base import Policy
from groupwise.report.folder import Count, RunFolder
from groupwise.system import printable

if TYPE_CHECKING:
    from groupwise.training.trainer import Trainer


# Nested states as JSON and tensors


def encode(value: object, tensors: dict[str, Tensor], path: str) -> Any:
    """Nested data as JSON; tensors go to ``tensors`` by path. ``{"$": kind, ...}`` marks types that JSON lacks."""
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
        return {"$": "dict", "items": [[encode(key, tensors, f"{path}/key"), item] for key, item in pairs]}
    raise CheckpointError(
        f"a checkpoint holds plain data and tensors only, but {path!r} is a {type(value).__name__}; "
        "fix: return such data from state_dict()"
    )


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Nested data from the JSON and tensors of ``encode``."""
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


log = logging.getLogger(__name__)
Content = TypeVar("Content")

FORMAT = 4
POLICY, ALGORITHM, STATE, MANIFEST = "policy.safetensors", "algorithm.safetensors", "state.json", "manifest.json"
DAMAGES = (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError)
"""Errors of code that reads a state with wrong entries."""
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
    """Entries of a state with counters of progress."""

    iteration: Count
    env_steps: Count
    epochs: float = 0.0
    seconds: float = 0.0


class Checkpoint(NamedTuple):
    """Content of a checkpoint."""

    policy: dict[str, Tensor]
    """State dict of the policy."""
    state: dict[str, Any]
    """Plain data and tensors: counters, callbacks, algorithm; counters only in ``best/``."""
    identity: Identity | None = None
    """Environment that it was read for; None before it is written."""


def serialize(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The content of a checkpoint's files, which training cannot change any more.

    Raises:
        CheckpointError: the state holds something that is neither plain data nor a tensor, or more than is read again.
    """
    tensors: dict[str, Tensor] = {}
    state = encode(checkpoint.state, tensors, "")

    def own(tensors: Mapping[str, Tensor]) -> bytes:
        """Copies that share no memory: safetensors refuses tied weights."""
        copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        return safetensors.torch.save(copies)

    # with an indent, the state would take five times as long
    content = {POLICY: own(checkpoint.policy), ALGORITHM: own(tensors), STATE: json.dumps(state).encode()}
    for name, limit in _limits(checkpoint.policy).items():
        try:
            files.check_size(len(content[name]), limit)
            if name == STATE:
                files.parse_json(content[name])
        except ValueError as error:
            raise CheckpointError(
                f"{name} of a checkpoint could not be read again: {error}; fix: return less from state_dict(), and arrays "
                "as tensors"
            ) from error
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
    """Counts at the checkpoint, as ``Trainer.counts``; zeros if there is none.

    Raises:
        CheckpointError: it is damaged, and so are those before it.
    """

    def read(found: Path) -> dict[str, int | float]:
        try:
            return _counts_of(files.parse_json(files.read(found / STATE, MAX_STATE)))
        except (OSError, *DAMAGES) as error:
            raise _DamageError(f"{found / STATE} is missing or damaged ({_in_short(error)})") from error

    return _newest(folder, read) if has_checkpoint(folder) else {"iterations": 0, "steps": 0, "epochs": 0.0}


def find_checkpoints(folder: Path) -> list[Path]:
    """A checkpoint and those before it, newest first: ``latest``, ``latest.1``, ``latest.2``; without those that miss."""
    older = [p for p in folder.parent.glob("*") if re.fullmatch(re.escape(folder.name) + r"\.[0-9]{1,9}", p.name)]
    found = [folder, *sorted(older, key=lambda path: int(path.suffix[1:]))]
    return [path for path in found if path.is_dir()]


def load_policy(policy: nn.Module, weights: Mapping[str, Tensor], where: Path) -> None:
    """Load weights into a policy of the same architecture.

    Raises:
        CheckpointError: a tensor is missing, unexpected, of another shape, or a parameter that is not finite (names it).
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
    if (bad := nonfinite_parameter(policy)) is not None:
        raise CheckpointError(f"{where}: the parameter {bad!r} is not finite, so actions mean nothing; {_FIX}")


def nonfinite_parameter(policy: nn.Module) -> str | None:
    """The name of the first parameter with an element that is not finite; None without one."""
    return next((name for name, values in policy.named_parameters() if not bool(values.isfinite().all())), None)


def load_state(run: "Trainer", state: dict[str, Any], where: Path) -> None:
    """Restore the state of a run; a ``CheckpointError`` if an entry is missing, or of another type or shape.

    A ``ConfigError`` names the setting if that is because ``config.json`` was changed.
    """
    fresh = run.state_dict()
    changed = _settings_changed(state, fresh)

    def refuse(names: Iterable[str], cause: Exception | None = None) -> None:
        for name in names:
            raise ConfigError(
                f"{name} cannot change from {changed[name][0]!r:.80} to {changed[name][1]!r:.80}: the checkpoint {where} was "
                "made with it; fix: the former value in config.json, or a new run"
            ) from cause

    # the checkpoint would take the place of these without a word
    refuse(
        name
        for name, (old, _) in changed.items()
        if name.startswith("algorithm.optimizer.") or (name.endswith(".init_from") and old is None)
    )
    try:
        _check_like(state, fresh | {"callbacks": None}, "state")
        _counts_of(state)
        if any(not name.startswith("logging.") for name in changed):  # whatever ended the run, it shall go on
            state = state | {"callbacks": {key: part for key, part in state["callbacks"].items() if key != "StopEarly"}}
        if others := [name for name in changed if changes_scores(name)]:
            state = state | {"callbacks": {key: part for key, part in state["callbacks"].items() if key != "Evaluate"}}
            if run.engine.rank == 0:
                log.warning(
                    "%s changed since the checkpoint: scores of earlier evaluations do not count any more, and checkpoints/best "
                    "is the best from now on",
                    ", ".join(others),
                )
        of_env = [name for name in changed if name.startswith("env.") and name not in _NOT_OF_EPISODES]
        if of_env and not any(map(is_fixed, of_env)):  # the episodes under way are of the former environments
            state = state | {"collector": {key: part for key, part in state["collector"].items() if key != "running"}}
        run.load_state_dict(state)
    except GroupwiseError:
        raise
    except DAMAGES as error:
        refuse((name for name, (old, _) in changed.items() if is_fixed(name, old)), error)
        raise CheckpointError(f"{where} is damaged: its state does not fit ({_in_short(error)}); {_FIX}") from error


def _settings_changed(state: dict[str, Any], fresh: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that are others in the saved state of ``SaveCheckpoints`` than in the present one."""
    settings = []
    for part in (state, fresh):
        callbacks = part.get("callbacks")
        entry = callbacks.get("SaveCheckpoints") if isinstance(callbacks, dict) else None
        if isinstance(entry, dict) and isinstance(entry.get("settings"), dict):
            settings.append(entry["settings"])
    return changes(*settings) if len(settings) == 2 else {}


def changes(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Former and present value of each setting that differs, by its path. None where there is none."""
    before, after = ({name: value for name, value in flat(tree).items() if value != {}} for tree in (saved, now))
    pairs = {name: (before.get(name), after.get(name)) for name in (*before, *after)}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


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
    """The counts in the entries of a state; an error if they are no counts."""
    found = _Counters.model_validate(state)
    return {"iterations": found.iteration, "steps": found.env_steps, "epochs": found.epochs}


class _DamageError(Exception):
    """Something in a checkpoint is missing or not as it was written."""


def _newest(folder: Path, read: Callable[[Path], Content], candidates: list[Path] | None = None) -> Content:
    """Content that ``read`` finds in the newest checkpoint that is not damaged; a ``CheckpointError`` if there is none.

    Args:
        candidates: newest first. None: all of the folder.
    """
    existing = find_checkpoints(folder) if candidates is None else candidates
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
    path, content = folder / MANIFEST, {}
    try:
        manifest: dict[str, Any] = files.parse_json(files.read(path, files.MAX_SETTINGS))
        version, digests, here = manifest["format"], manifest["sha256"], [manifest[key] for key in Identity._fields]
        if type(version) is not int or not all(isinstance(digests[name], str) for name in limits):
            raise TypeError(f"format is {version!r:.80}, expected a number, and digests are {digests!r:.80}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _DamageError(f"{path} is missing or damaged ({_in_short(error)})") from error
    if version != FORMAT:
        raise CheckpointError(
            f"{folder} was made by {'a later' if version > FORMAT else 'an earlier'} version of groupwise (format {version}, "
            f"this one reads format {FORMAT}); fix: train again, or use that version"
        )
    for field, found, want in zip(Identity._fields, here, identity or here, strict=True):
        if found != want:
            raise CheckpointError(
                f"{folder} belongs to another environment: its {field} is {found!r:.200}, here it is {want!r}; "
                "fix: use the environment it was trained in"
            )
    for name, limit in limits.items():
        try:
            with files.reading(folder / name, limit) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digests[name]:  # before all of it is in memory
                    raise ValueError(f"its SHA-256 is not the one in {MANIFEST}")
                file.seek(0)
                content[name] = file.read()
        except (OSError, ValueError) as error:
            what = "is missing" if isinstance(error, OSError) else "is damaged"
            raise _DamageError(f"{folder / name} {what}: {error}") from error
    try:
        weights, tensors = (safetensors.torch.load(content[name]) for name in (POLICY, ALGORITHM))
        state = decode(files.parse_json(content[STATE]), tensors)
        if not isinstance(state, dict):
            raise TypeError(f"its state is a {type(state).__name__}, expected an object")
    except (*DAMAGES, SafetensorError) as error:
        raise _DamageError(f"{folder} is damaged: {_in_short(error)}") from error
    return Checkpoint(weights, state, Identity(*here))


def _limits(policy: Mapping[str, Any] | None) -> dict[str, int]:
    """The most bytes of each file, for the weights of a policy, of which optimiser and reference keep several copies."""
    if policy is None:
        return {POLICY: 2**63, ALGORITHM: 2**63, STATE: MAX_STATE}
    size = sum(value.nbytes for value in policy.values() if isinstance(value, Tensor))
    return {POLICY: MAX_EXTRA + 2 * size, ALGORITHM: MAX_EXTRA + 16 * size, STATE: MAX_STATE}


def _in_short(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return explain(error.errors())[0]
    return f"{error!r:.200}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error!s:.200}"


def _make_room(folder: Path) -> None:
    """Rename ``folder`` to the one before it, and so on; at every moment all of them are complete."""

    def name(number: int) -> Path:
        return folder.with_name(f"{folder.name}.{number}") if number else folder

    free = next(number for number in count() if not os.path.lexists(name(number)))
    for number in range(free, 0, -1):
        os.replace(name(number - 1), name(number))


# Initial weights from another policy's checkpoint


def initialize(policy: Policy, source: Path, identity: Identity | None = None) -> str:
    """Give a policy the weights of another one, but not where one lacks ``value_modules`` of the other; says what was done.

    Args:
        source: a run folder (its latest checkpoint), or a checkpoint.
        identity: of the environment it will act in.

    Raises:
        RunFolderError: there is no run.
        CheckpointError: there is no checkpoint, or its policy differs (names the tensors, and the spaces if these differ).
    """
    is_checkpoint = source.parent.name == "checkpoints" or (source / MANIFEST).is_file()
    folder = source if is_checkpoint else RunFolder.open(source).latest
    checkpoint, own = load_checkpoint(folder, policy=policy), policy.state_dict()
    weights = checkpoint.policy
    of_values = {name for name in own.keys() ^ weights.keys() if name.partition(".")[0] in policy.value_modules}
    absent, unused = of_values - weights.keys(), of_values - own.keys()
    taken = {name: weight for name, weight in weights.items() if name not in unused}
    try:
        load_policy(policy, taken | {name: own[name] for name in absent}, folder)
    except CheckpointError as error:
        why = "" if identity is None else _other_spaces(checkpoint.identity, identity)
        raise CheckpointError(f"init_from: {error}{why}") from error
    parts = [f"Weights: {len(taken)} tensors from {folder}"]
    for names, what in ((absent, "{} starts fresh"), (unused, "its {} is not used")):
        if names:
            parts.append(what.format(", ".join(sorted({name.partition(".")[0] for name in names}))))
    return f"{'; '.join(parts)}."


def _other_spaces(saved: Identity | None, own: Identity) -> str:
    """Says how the spaces of two environments differ, from shortly before the first difference; empty if they do not."""
    differ = []
    for kind in ("observation_space", "action_space"):
        there, here = (printable(getattr(one, kind)) for one in (saved, own))  # the first is a stranger's
        if there != here:
            alike = next((i for i, (a, b) in enumerate(zip(there, here, strict=False)) if a != b), 0)
            begin = max(0, alike - 60)
            shown = [f"{'... ' * (begin > 0)}{text[begin:]:.240}" for text in (there, here)]
            differ.append(f"{kind} {shown[0]} there, {shown[1]} here")
    settings = "env.action_chunk, env.obs_keys, env.action_masks and env.kwargs"
    return f"; the environments differ: {'; '.join(differ)}; see {settings}" if differ else ""


# Forks: new runs that begin at a checkpoint of another run

CheckpointName: TypeAlias = Literal["latest", "best"] | int
"""A checkpoint of a run; a number is that of its environment steps."""

FIXED = (
    "env.id",
    "env.num_envs",
    "env.vectorization",
    "env.action_chunk",
    "env.obs_keys",
    "env.action_masks",
    "policy",
    "model",
    "task.data",
    "algorithm.name",
    "algorithm.optimizer",
)
"""Settings that the content of a checkpoint depends on."""
_NOT_OF_EPISODES = ("env.timeout", "env.log_info")
"""Settings of environments with which running episodes go on."""
_SCORING = ("seed", "env.", "evaluation.", "task.", "sampling.", "algorithm.collection.horizon")
_NOT_SCORING = (
    *(f"evaluation.{name}" for name in ("interval", "episodes", "prompts", "video_interval", "num_logged_groups")),
    *(f"env.{name}" for name in ("vectorization", "start_mode", "num_random_noops")),
    *(
        f"task.{name}"
        for name in ("data_size", "start_mode", "env_threads", "env_timeout", "tool_timeout", "keep_cache")
    ),
    *_NOT_OF_EPISODES,
)
"""Settings that do not change scores of evaluations; after changing others, ``best``'s score cannot be compared."""


def fork(path: Path | str, run_dir: Path | str, *, checkpoint: CheckpointName = "latest", **fields: Any) -> Path:
    """A new run folder that begins at a checkpoint of the run in ``path``; ``resume`` trains on in it.

    Its metrics up to there are copied. ``best`` holds weights only, so the optimiser and episodes start afresh. A
    finished run needs a larger budget.

    Args:
        run_dir: does not exist, or is empty.
        checkpoint: ``latest``, ``best``, or the environment steps of one of the latest.
        fields: changed settings, as of ``gw.train``: ``algorithm={"learning_rate": 1e-4}``, ``total_steps=200_000``.

    Raises:
        ConfigError: a setting is wrong or cannot change, the budget is used up, or there is no such checkpoint.
        RunFolderError: ``path`` is no run folder, or ``run_dir`` is taken.
        CheckpointError: the checkpoint is damaged.
    """
    return fork_run(Path(path), Path(run_dir), checkpoint, partial(load_config, allow_programs=True, **fields))


def fork_run(
    path: Path, run_dir: Path, checkpoint: CheckpointName, read: Callable[[Path], CommonCfg], *, finished: bool = False
) -> Path:
    """``fork`` with the settings that ``read`` makes of the file with those of the run.

    Args:
        finished: whether the checkpoint may have used up the budget.
    """
    folder = RunFolder.open(path)
    known = folder.read_provenance()
    with plugins.blaming_absence(path, known["plugins"]):
        folder.check_format()
        cfg = read(folder.config)
    if cfg.run_dir is not None:
        raise ConfigError(f"run_dir = {str(cfg.run_dir)!r}, but the fork goes to {run_dir}; fix: leave run_dir out")
    settings = cfg.model_dump(mode="json")
    changed = changes(folder.read_config(), settings)
    for name, (old, new) in changed.items():
        if is_fixed(name, old):
            # otherwise the weights do not, or it is text
            fits = "policy" in settings and not name.startswith("policy.")
            begin = f" with policy.init_from={str(folder.path)!r}" if fits else ""
            raise ConfigError(
                f"{name} cannot change from {old!r:.80} to {new!r:.80}: the checkpoint was made with it; fix: a new run{begin}"
            )
    if checkpoint == "best" and getattr(cfg.algorithm, "kl_coef", 0) > 0:
        raise ConfigError(
            f"{folder.best} has no reference for algorithm.kl_coef; fix: checkpoint='latest' (--from latest), or its environment steps"
        )
    existing = find_checkpoints(folder.latest)
    if checkpoint == "best":
        found = folder.best
    elif checkpoint == "latest":
        found = folder.latest
    else:
        by_steps = {int(saved_counts(path)["steps"]): path for path in existing}
        if checkpoint not in by_steps:
            there = ", ".join(map(str, sorted(by_steps))) or "no step"
            raise ConfigError(f"checkpoint={checkpoint}: {folder.path} has {there}; fix: one of these, latest or best")
        found = by_steps[checkpoint]
    # in place of a damaged latest one, the one before it
    candidates = existing if checkpoint == "latest" else [found]
    found, state = _newest(found, lambda there: (there, _read_checkpoint(there, None, _limits(None)).state), candidates)
    iteration, steps = (state[name] for name in ("iteration", "env_steps"))
    if not finished:
        cfg.budget.check_exceeds(saved_counts(found)[cfg.budget.unit], found)
    kept = [entry for entry in folder.read_metrics() if entry["iteration"] <= iteration]
    used = list(dict.fromkeys([*known["plugins"], *plugins.loaded()]))
    given, source = known["given_in_python"], [str(folder.path), f"{steps:,}"]
    new = RunFolder.create(settings, run_dir, given_in_python=given, plugins=used, forked_from=source)
    try:
        new.checkpoints.mkdir()
        shutil.copytree(found, new.latest, ignore=_others)
        if (
            not any(map(changes_scores, changed))
            and has_checkpoint(folder.best)
            and saved_counts(folder.best)["steps"] <= steps
        ):
            shutil.copytree(folder.best, new.best, ignore=_others)
        files.write(new.metrics, "".join(f"{json.dumps(entry)}\n" for entry in kept).encode())
    except BaseException as error:
        files.remove(new.path)
        if isinstance(error, shutil.Error):  # of several files, such as links that lead nowhere
            raise CheckpointError(f"{path} cannot be copied: {error!s:.300}; fix: restore it, or make room") from error
        raise
    return new.path


def changes_scores(name: str) -> bool:
    """Whether scores of evaluations from before and after a change of this setting cannot be compared."""
    return name.startswith(_SCORING) and name not in _NOT_SCORING


def _others(folder: str, names: list[str]) -> set[str]:
    """Names in a folder that are no part of a checkpoint; they may be of any kind or size."""
    return {*names} - {POLICY, ALGORITHM, STATE, MANIFEST}


def is_fixed(name: str, old: Any = ...) -> bool:
    """Whether the content of a checkpoint depends on the setting at this path, whose value was ``old``."""
    if name == "algorithm.kl_coef":
        return bool(old == 0)  # there is no reference
    if name.endswith(".init_from"):
        return old is None  # the checkpoint's weights would take the place of these
    return any(f"{name}.".startswith(f"{prefix}.") for prefix in FIXED)
