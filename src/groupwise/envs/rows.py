"""Copies of one Gymnasium environment as rows that start independently."""

import copy
import ctypes
import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import cloudpickle
import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import SyncVectorEnv
from tensordict import TensorDict
from torch import Tensor

from groupwise import plugins
from groupwise import system as processes
from groupwise.config.run import StartMode
from groupwise.data.rollout import Nested
from groupwise.data.spaces import leaf_spaces, nested_action, obs_spec, obs_to_tensor, subspaces
from groupwise.envs.base import EnvStep, GroupEnv, Mask, Seeds, success_of_row, task_of_row
from groupwise.envs.snapshots import Snapshot, SnapshotAdapter, adapter_for, reseed_noise
from groupwise.errors import DataError, EnvError, nearest
from groupwise.seeding import derive_seed

# Numbers of an environment's info for the metrics: env.log_info.

LOGGED = "groupwise/log_info"
"""Key of the numbers in the info of an episode's last step."""


class LogInfo(gymnasium.Wrapper):
    """Adds the numbers of some entries to the info of each episode's last step.

    Raises:
        EnvError: an entry is missing there, or is no number.
    """

    def __init__(self, env: gymnasium.Env, keys: Sequence[str]) -> None:
        super().__init__(env)
        self._keys = tuple(keys)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step; see ``gymnasium.Env.step``."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            info = {**info, LOGGED: np.array([_number(info, key) for key in self._keys])}
        return obs, reward, terminated, truncated, info


def by_name(numbers: npt.NDArray[Any], keys: Sequence[str]) -> dict[str, Tensor]:
    """The entries [N] of all rows, by name, from their numbers [N, K]."""
    return dict(zip(keys, torch.from_numpy(numbers.copy()).unbind(1), strict=True))


def _number(info: Mapping[str, Any], key: str) -> float:
    if key not in info:
        raise EnvError(
            f"env.log_info has no entry {key!r} at the end of an episode{nearest(key, info)}; known: {', '.join(sorted(info))}"
        )
    value = np.asarray(info[key])
    if value.size != 1 or value.dtype.kind not in "biuf":
        raise EnvError(f"env.log_info: info[{key!r}] is {info[key]!r:.80}, expected a number; fix: leave it out")
    return float(value.item())


# Single environments of one process, stepped one after another; each row starts on its own.

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


# Rows in worker processes, which write observations and rewards into shared memory.

_Column: TypeAlias = tuple[Any, tuple[int, ...], str]
"""Shared memory, which can be passed to a new process only among its arguments; shape of a row; dtype."""


class _Worker(NamedTuple):
    child: processes.Child
    first: int
    """Number of its first row."""
    end: int


class WorkerRows:
    """``LocalRows`` of several processes. A step is one message to each process that has running rows.

    A process that dies, or gives no answer in ``cfg.timeout`` seconds, is killed. With ``cfg.on_error="report"`` another
    takes its place, and all its rows have failed.

    Raises:
        EnvError: the environment cannot be sent to a process or made there.
    """

    def __init__(self, cfg: RowCfg, layout: Layout, num_rows: int, num_workers: int) -> None:
        self._cfg = cfg
        self._columns: dict[str, _Column] = {}
        for name, (shape, dtype) in layout.items():
            size = num_rows * math.prod(shape) * np.dtype(dtype).itemsize
            self._columns[name] = processes.context().RawArray(ctypes.c_byte, size), shape, dtype
        self.arrays = _arrays(self._columns)
        try:
            self._payload = plugins.pickled(cfg)
        except Exception as error:
            raise EnvError(
                f"what makes {cfg.env_id} cannot be sent to another process: {error!r}; fix: make locks, files and "
                "generators inside the callable, or vectorization='sync'"
            ) from error
        bounds = np.linspace(0, num_rows, min(num_workers, num_rows) + 1).astype(int).tolist()
        self._workers = [self._launch(first, end) for first, end in pairwise(bounds)]
        self._await_launched(self._workers)

    def step(self, rows: npt.NDArray[Any], actions: npt.NDArray[Any]) -> bool:
        """One step of these rows; whether any ended or failed."""
        self._ask("step", rows, actions)
        return any(self.arrays[name].any() for name in ("terminated", "truncated", "failed"))

    def start(self, rows: npt.NDArray[Any], start_seeds: npt.NDArray[Any], noise_seeds: npt.NDArray[Any]) -> None:
        """Start these rows."""
        self._ask("start", rows, start_seeds, noise_seeds)

    def close(self, seconds: float = processes.SECONDS_TO_CLOSE) -> None:
        """End the processes; those that do not end by themselves in that time are killed."""
        since = time.monotonic()
        for worker in self._workers:
            worker.child.send(None)
        for worker in self._workers:
            worker.child.close(since + seconds - time.monotonic())
        self._workers = []

    def _launch(self, first: int, end: int) -> _Worker:
        """A process that makes these rows; its first answer says whether it could."""
        name = f"groupwise rows {first}-{end - 1}"
        return _Worker(processes.Child(_work, self._payload, self._columns, slice(first, end), name=name), first, end)

    def _await_launched(self, workers: Sequence[_Worker]) -> None:
        lost, error = self._gather(workers, max(processes.SECONDS_TO_IMPORT, self._cfg.timeout))
        for worker, why in lost[:1]:
            self._give_up(worker, why)
        if error is not None:
            self.close()
            raise error

    def _ask(self, command: str, rows: npt.NDArray[Any], *columns: npt.NDArray[Any]) -> None:
        """Send each worker its rows with their entries of the columns, and wait for the answers."""
        if not self._workers:
            raise EnvError(f"the worker processes of {self._cfg.env_id} have ended; fix: make the environment again")
        asked = []
        try:
            for worker in self._workers:
                chosen = (rows >= worker.first) & (rows < worker.end)
                if chosen.any():
                    worker.child.send((command, rows[chosen] - worker.first, *(column[chosen] for column in columns)))
                    asked.append(worker)
            lost, error = self._gather(asked, self._cfg.timeout)
        except BaseException:  # interrupted: an unread answer would be taken for that to the next message
            self.close(0.0)
            raise
        for worker, why in lost:
            if self._cfg.on_error == "raise":
                self._give_up(worker, why)
            self._replace(worker, why)
        if error is not None:
            raise error

    def _gather(self, workers: Sequence[_Worker], seconds: float) -> tuple[list[tuple[_Worker, str]], EnvError | None]:
        """The workers that give no answer in time, with why, and the first error of the others."""
        lost, errors, since = [], [], time.monotonic()
        for worker in workers:
            try:
                _, error = worker.child.answer(seconds, since)
            except processes.LostChildError as why:
                lost.append((worker, str(why)))
                continue
            if error is not None:
                errors.append(EnvError(f"{self._cfg.env_id} failed in {worker.child.process.name}:\n{error[1]}"))
        return lost, errors[0] if errors else None

    def _replace(self, worker: _Worker, why: str) -> None:
        """Start a lost worker again; its rows have failed."""
        log.error("%s of %s %s, and was replaced", worker.child.process.name, self._cfg.env_id, why)
        worker.child.close(0.0)
        for name in OUTCOMES:
            self.arrays[name][worker.first : worker.end] = name == "failed"
        launched = self._launch(worker.first, worker.end)
        self._workers[self._workers.index(worker)] = launched
        self._await_launched([launched])

    def _give_up(self, worker: _Worker, why: str) -> NoReturn:
        process = worker.child.process
        fix = (
            "a larger env.timeout, if it is slow; vectorization='sync' shows where it hangs"
            if process.is_alive()
            else "a script needs `if __name__ == '__main__':` around what it runs, a simulator may have crashed or run out of "
            "memory; vectorization='sync' shows where"
        )
        processes.kill(process)  # closing would wait for it
        self.close()
        raise EnvError(f"{process.name} of {self._cfg.env_id} {why}; its output is above; fix: {fix}")


def _arrays(columns: dict[str, _Column]) -> Arrays:
    """Views of all rows."""
    return {name: np.frombuffer(memory, dtype).reshape(-1, *shape) for name, (memory, shape, dtype) in columns.items()}


def _work(connection: Connection, payload: bytes, columns: dict[str, _Column], rows: slice) -> None:
    """The main function of a worker."""
    torch.set_num_threads(1)
    processes.serve(connection, _local_rows(payload, columns, rows))


@contextmanager
def _local_rows(payload: bytes, columns: dict[str, _Column], rows: slice) -> Iterator[Callable[[Any], Any]]:
    """What steps and starts the rows, as a message says; they write into the columns."""
    arrays = {name: array[rows] for name, array in _arrays(columns).items()}
    local = LocalRows(cloudpickle.loads(payload), arrays, rows.start)
    commands: dict[str, Callable[..., Any]] = {"step": local.step, "start": local.start}
    yield lambda message: commands[message[0]](*message[1:])
    local.close()


class RowsGroupEnv(GroupEnv):
    """Copies of one Gymnasium environment, stepped one after another in this process or in several.

    What a step returns is overwritten by the next one.

    Args:
        num_workers: processes that share the rows among them; 0: this process steps them all.
        device: where observations go.

    Raises:
        EnvError: the environment cannot be made, here or in a worker.
    """

    def __init__(self, cfg: RowCfg, num_envs: int, *, num_workers: int = 0, device: torch.device | str = "cpu") -> None:
        self.env_id = cfg.env_id
        self.num_envs = num_envs
        self.observation_space = cfg.observation_space
        self.action_space = cfg.action_space
        self.obs_spec = obs_spec(cfg.observation_space)
        self.max_episode_steps = cfg.max_episode_steps
        self.start_mode = cfg.start_mode
        self.device = torch.device(device)
        self.notes = cfg.notes
        self._live: Mask = np.zeros(num_envs, dtype=np.bool_)
        self._live_rows = np.flatnonzero(self._live)
        self._not_started: Mask = np.zeros(num_envs, dtype=np.bool_)
        self._reset_seed = 0
        self._num_resets = [0] * num_envs
        layout = layout_of(cfg)
        self._rows: LocalRows | WorkerRows
        if num_workers:
            self._rows = WorkerRows(cfg, layout, num_envs, num_workers)
            arrays = self._rows.arrays
        else:
            arrays = {name: np.zeros((num_envs, *shape), dtype) for name, (shape, dtype) in layout.items()}
            self._rows = LocalRows(cfg, arrays)
        self._obs = _obs_tensor(cfg.observation_space, arrays)
        outcomes = [torch.from_numpy(arrays[name]) for name in OUTCOMES]
        self._reward, self._terminated, self._truncated, self._failed, self._success, self._tells_success = outcomes
        self._reward_parts = torch.from_numpy(arrays["reward_parts"]) if cfg.reward_parts else None
        self._executed = torch.from_numpy(arrays["executed"]) if cfg.chunked else None
        self._task = arrays["task"]
        self._log_info, self._info = cfg.log_info, arrays.get("info")
        self._of_step = [array for name, array in arrays.items() if name in (*OUTCOMES, "reward_parts", "executed")]

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...]; see ``VectorEnv.reset``. Each row has its own stream of resets."""
        if seed is not None:
            self._reset_seed, self._num_resets = seed, [0] * self.num_envs
        mask = np.ones_like(self._live) if mask is None else mask
        start_seed, noise_seed = np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, np.int64)
        for row in np.flatnonzero(mask).tolist():
            start_seed[row] = derive_seed(self._reset_seed, "start", row, self._num_resets[row])
            noise_seed[row] = derive_seed(self._reset_seed, "noise", row, self._num_resets[row])
            self._num_resets[row] += 1
        return self.start(mask, start_seed, noise_seed)

    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, ...] after starting the rows of ``mask``; see ``GroupEnv.start``.

        With ``cfg.on_error="report"``, the next step tells which rows failed here.
        """
        failed = self._failed.numpy()
        failed.fill(False)
        self._rows.start(np.flatnonzero(mask), start_seed[mask], noise_seed[mask])
        self._set_live(self._live | mask)
        self._not_started = self._not_started & ~mask | failed & self._live
        self.pause(self._not_started)
        return self._obs.to(self.device)

    def pause(self, mask: Mask) -> None:
        """Pause the rows of ``mask`` until they are started again."""
        self._set_live(self._live & ~mask)

    def step(self, action: Tensor) -> EnvStep:
        """One step of every row that is not paused with environment actions [N, ...]."""
        actions = action.cpu().numpy()
        if len(self._live_rows) < self.num_envs:
            actions = actions[self._live_rows]
        for array in self._of_step:  # 0 for rows that take no step
            array.fill(0)
        if self._info is not None:
            self._info.fill(np.nan)
        failed = success = info = None
        any_ended = self._rows.step(self._live_rows, actions)
        if self._not_started.any():
            self._failed |= torch.from_numpy(self._not_started)
            self._not_started = np.zeros_like(self._live)
            any_ended = True
        if any_ended:
            self.pause((self._terminated | self._truncated | self._failed).numpy())
            failed = self._failed.clone() if self._failed.any() else None
            success = self._success if self._tells_success.any() else None
            info = None if self._info is None else by_name(self._info, self._log_info)
        return EnvStep(
            self._obs.to(self.device),
            self._reward,
            self._terminated,
            self._truncated,
            failed=failed,
            reward_parts=self._reward_parts,
            success=success,
            executed=self._executed,
            info=info,
            task=None if success is None else self._task,
        )

    def close(self) -> None:
        """Free the environments and the processes."""
        self._rows.close()

    def _set_live(self, live: Mask) -> None:
        self._live, self._live_rows = live, np.flatnonzero(live)


def _obs_tensor(space: Any, arrays: Arrays, path: tuple[str, ...] = ()) -> Nested:
    """Observations [N, ...] of all rows; shares memory with the arrays."""
    children = subspaces(space)
    if children is None:
        leaf: Tensor = torch.from_numpy(arrays[obs_name(path)])
        return leaf
    leaves = {name: _obs_tensor(child, arrays, (*path, name)) for name, child in children.items()}
    return TensorDict(leaves, batch_size=[len(arrays["reward"])])
