"""Single environments of one process, stepped one after another; each row starts on its own."""

import copy
import logging
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import SyncVectorEnv

from groupwise.config.env import StartMode
from groupwise.data.nested_actions import nested_action
from groupwise.data.spaces import leaf_spaces, obs_spec, obs_to_tensor, subspaces
from groupwise.envs.log_info import LOGGED
from groupwise.envs.snapshots import Snapshot, SnapshotAdapter, adapter_for, reseed_noise
from groupwise.envs.success import success_of_row, task_of_row
from groupwise.errors import DataError, EnvError

log = logging.getLogger(__name__)

EnvMaker: TypeAlias = Callable[[], gymnasium.Env]
OnError: TypeAlias = Literal["raise", "report"]
"""An error of an environment is raised, or the row is reported as failed and paused."""

_STARTS_KEPT = 64

Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Layout: TypeAlias = dict[str, tuple[tuple[int, ...], str]]
"""Shape of one row and dtype, by name."""

OUTCOMES = ("reward", "terminated", "truncated", "failed", "success", "tells_success")
"""What a step returns for a row, besides the observation; the last two where the episode ends."""
_TASK = "U64"
"""The first 64 characters of a task's name."""


class RowCfg(NamedTuple):
    """What a row is."""

    make: EnvMaker
    env_id: str
    observation_space: Any
    action_space: Any
    max_episode_steps: int | None
    """Steps, or chunks, after which the environment truncates; None if it does not."""
    start_mode: StartMode = "seed"
    """How episodes share a start; not ``native``."""
    reward_parts: tuple[str, ...] = ()
    log_info: tuple[str, ...] = ()
    chunked: bool = False
    """Whether an action is a chunk of several."""
    on_error: OnError = "raise"
    notes: tuple[str, ...] = ()
    timeout: float = 60.0
    """Seconds that rows in another process may take for an answer."""


class EnvRow:
    """One environment with all its wrappers.

    Args:
        make: returns a new environment at each call.
        starts: with ``snapshot``, captured states and first observations by seed, shared by the rows of a process.
    """

    def __init__(self, make: EnvMaker, start_mode: StartMode, starts: dict[int, tuple[Snapshot, Any]]) -> None:
        self.env = make()
        self._make = make
        self._fresh, self._shares = start_mode == "fresh", start_mode != "none"
        self._starts = starts
        self._adapter = adapter_for(self.env) or SnapshotAdapter() if start_mode == "snapshot" else None
        self._was_reset = False

    def start(self, start_seed: int, noise_seed: int) -> Any:
        """The first observation of an episode from this seed's start, with noise of its own afterwards.

        With ``start_mode`` ``none``, the seed of the noise decides the start, too.
        """
        start_seed = start_seed if self._shares else noise_seed
        obs = self._reset(start_seed) if self._adapter is None else self._shared_start(start_seed, self._adapter)
        reseed_noise(self.env, noise_seed)
        return obs

    def renew(self) -> None:
        """Replace the environment. The old one may be broken, so it is not closed."""
        self.env = self._make()
        self._was_reset = False

    def _shared_start(self, seed: int, adapter: SnapshotAdapter) -> Any:
        if seed not in self._starts:
            obs = self._reset(seed)
            self._starts[seed] = adapter.capture(self.env), copy.deepcopy(obs)
            if len(self._starts) > _STARTS_KEPT:
                del self._starts[next(iter(self._starts))]
            return obs
        if not self._was_reset:  # the first reset of an environment creates some of its attributes
            self._reset(0)
        state, obs = self._starts[seed]
        adapter.restore(self.env, state)
        return obs

    def _reset(self, seed: int) -> Any:
        if self._fresh and self._was_reset:
            self.env.close()
            self.env = self._make()
        self._was_reset = True
        return self.env.reset(seed=seed)[0]


class LocalRows:
    """Environments that are stepped one after another in this process and write into arrays.

    Args:
        arrays: as ``layout_of`` describes them.
        first: number of the first row, for messages.
    """

    def __init__(self, cfg: RowCfg, arrays: Arrays, first: int = 0) -> None:
        self._cfg = cfg
        self._arrays = arrays
        self._first = first
        starts: dict[int, tuple[Snapshot, Any]] = {}
        self.rows = [EnvRow(cfg.make, cfg.start_mode, starts) for _ in arrays["reward"]]
        leaves = leaf_spaces(cfg.observation_space).items()
        self._leaves = [(path, arrays[obs_name(path)], tuple(leaf.shape)) for path, leaf in leaves]
        self._has_nested_actions = subspaces(cfg.action_space) is not None
        self._outcomes = [arrays[name] for name in OUTCOMES]
        self._task = arrays["task"]
        self._has_failed = False

    def step(self, rows: npt.NDArray[Any], actions: Sequence[Any] | npt.NDArray[Any]) -> bool:
        """One step of these rows; whether any ended or failed."""
        parts = self._cfg.reward_parts
        reward, terminated, truncated, _, success, tells_success = self._outcomes
        any_ended = False
        if self._has_nested_actions:
            actions = [nested_action(self._cfg.action_space, action) for action in actions]
        for row, action in zip(rows.tolist(), actions, strict=True):
            try:
                obs, reward[row], ended, cut, info = self.rows[row].env.step(action)
            except Exception as error:
                self._fail(row, explained_step(error, self._cfg.env_id))
                any_ended = True
                continue
            self._write(row, obs, "step")
            if ended or cut:
                terminated[row], truncated[row], any_ended = ended, cut, True
                flag = success_of_row(info)
                success[row], tells_success[row] = bool(flag), flag is not None
                self._task[row] = task_of_row(info)
                if self._cfg.log_info:
                    self._arrays["info"][row] = info[LOGGED]
            if self._cfg.chunked:
                self._arrays["executed"][row] = info["executed"]
            if parts:
                self._store_parts(row, info)
        return any_ended

    def start(self, rows: npt.NDArray[Any], start_seeds: npt.NDArray[Any], noise_seeds: npt.NDArray[Any]) -> None:
        """Start these rows."""
        for row, start, noise in zip(rows.tolist(), start_seeds.tolist(), noise_seeds.tolist(), strict=True):
            try:
                obs = self.rows[row].start(start, noise)
            except Exception as error:
                self._fail(row, error)
                continue
            self._write(row, obs, "reset")

    def close(self) -> None:
        """Free the environments."""
        for row in self.rows:
            row.env.close()

    def _write(self, row: int, obs: Any, method: Literal["reset", "step"]) -> None:
        try:
            for path, array, shape in self._leaves:
                leaf = obs
                for key in path:
                    leaf = leaf[int(key)] if isinstance(leaf, tuple | list | np.ndarray) else leaf[key]
                if np.shape(leaf) != shape:
                    raise ValueError
                array[row] = leaf
        except (KeyError, IndexError, TypeError, ValueError):
            refuse_misfit(obs, self._cfg.observation_space, f"{method}() of {self._cfg.env_id}")
            raise

    def _store_parts(self, row: int, info: dict[str, Any]) -> None:
        try:
            self._arrays["reward_parts"][row] = [info[key] for key in self._cfg.reward_parts]
        except KeyError as error:
            raise EnvError(
                f"{self._cfg.env_id} has no reward part {error}: its info holds {sorted(info)}; fix: credit.reward.names"
            ) from error

    def _fail(self, row: int, error: Exception) -> None:
        where = f"row {self._first + row} of {self._cfg.env_id}"
        if self._cfg.on_error == "raise":
            error.add_note(f"in {where}")
            raise error
        log.error("%s failed, and was replaced: %r", where, error, exc_info=None if self._has_failed else error)
        self._has_failed = True
        self.rows[row].renew()
        self._arrays["reward"][row] = 0.0
        self._arrays["failed"][row] = True


def refuse_misfit(obs: Any, space: Any, source: str) -> None:
    """Raise a ``DataError`` that says what came from ``source`` and what was declared, if the space does not allow it."""
    try:
        obs_to_tensor(space, obs, batched=False)
    except DataError as error:
        raise DataError(f"{source} returned what its observation_space does not allow: {error}") from None


def explained_step(error: Exception, env_id: str) -> Exception:
    """An error of a step: the environment's own, or one that says what it must return where that could not be stored."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_globals.get("__name__") not in (__name__, SyncVectorEnv.__module__):
        return error
    explained = DataError(
        f"step() of {env_id} returned something else than (observation, reward, terminated, truncated, info) with a number "
        f"as reward and truth values as ends ({error}); fix: the environment, as by float(reward)"
    )
    explained.__cause__ = error
    return explained


def layout_of(cfg: RowCfg) -> Layout:
    """Layout for rows of ``cfg``.

    Raises:
        UnsupportedSpaceError: such observations cannot be stored.
    """
    leaves = {obs_name(path): obs_spec(leaf) for path, leaf in leaf_spaces(cfg.observation_space).items()}
    layout: Layout = {name: (spec.shape, str(spec.dtype).removeprefix("torch.")) for name, spec in leaves.items()}  # type: ignore[union-attr]
    layout |= {name: ((), "float32" if name == "reward" else "bool") for name in OUTCOMES} | {"task": ((), _TASK)}
    if cfg.chunked:
        layout["executed"] = ((), "int64")
    if cfg.reward_parts:
        layout["reward_parts"] = ((len(cfg.reward_parts),), "float32")
    if cfg.log_info:
        layout["info"] = ((len(cfg.log_info),), "float64")
    return layout


def obs_name(path: tuple[str, ...]) -> str:
    """Name of a leaf of the observation in the arrays."""
    return "/".join(("obs", *path))
