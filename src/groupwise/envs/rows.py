"""Copies of one Gymnasium environment as rows that start independently, in this process or in several."""

import copy
import ctypes
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple, NoReturn, SupportsFloat, TypeAlias

import cloudpickle
import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from groupwise import plugins
from groupwise import system as processes
from groupwise.config.run import StartMode
from groupwise.data.rollout import Nested, TensorDict
from groupwise.data.spaces import fits, leaf_spaces, limits_of, nested_action, obs_spec, obs_to_tensor, subspaces
from groupwise.envs import snapshots
from groupwise.envs.base import EnvStep, GroupEnv, Mask, Seeds, arose_outside, first_of, success_of_row, task_of_row
from groupwise.envs.snapshots import Snapshot, SnapshotAdapter, adapter_for, reseed_noise, shared_objects
from groupwise.errors import DataError, EnvError, GroupwiseError, nearest
from groupwise.seeding import row_seeds

log = logging.getLogger(__name__)

EnvMaker: TypeAlias = Callable[[], gymnasium.Env]
OnError: TypeAlias = Literal["raise", "report"]
"""An error of an environment is raised, or the row is reported as failed and paused."""
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]
Layout: TypeAlias = dict[str, tuple[tuple[int, ...], str]]
"""Shape of one row and dtype, by name."""

OUTCOMES = ("reward", "terminated", "truncated", "failed", "success")
"""Results of a step for a row, besides the observation; ``success`` where the episode ends: 0 untold, 1 no, 2 yes."""
_DTYPES = {"reward": "float32", "success": "uint8"}
_TASK = "U64"
"""The first 64 characters of a task's name."""
_STARTS_KEPT = 64
_NUMBERS, _TRUTHS = frozenset({float, int, np.float32, np.float64}), frozenset({bool, np.bool_})


class RowCfg(NamedTuple):
    """Settings that all rows share."""

    make: EnvMaker
    env_id: str
    observation_space: Any
    action_space: Any
    max_episode_steps: int | None
    """Decisions after which the environment truncates; None if it does not."""
    start_mode: StartMode = "seed"
    """How episodes share a start; not ``native``."""
    reward_parts: tuple[str, ...] = ()
    log_info: tuple[str, ...] = ()
    chunked: bool = False
    """Whether an action takes several environment steps."""
    on_error: OnError = "raise"
    notes: tuple[str, ...] = ()
    timeout: float = 60.0
    """Seconds that rows in another process may take for an answer."""


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
        self.envs = [cfg.make() for _ in arrays["reward"]]
        self._was_reset = [False] * len(self.envs)
        self._adapter = adapter_for(self.envs[0]) or SnapshotAdapter() if cfg.start_mode == "snapshot" else None
        self.shared = shared_objects(self.envs)
        if self._adapter is not None:
            self._adapter.shared = self.shared
        self._starts: dict[int, tuple[Snapshot, Any]] = {}
        """Captured states and first observations by seed, with ``snapshot``."""
        leaves = leaf_spaces(cfg.observation_space).items()
        self._leaves = [(path, arrays[obs_name(path)], leaf, limits_of(leaf)) for path, leaf in leaves]
        self._has_nested_actions = subspaces(cfg.action_space) is not None
        self._has_failed = False

    def step(
        self, rows: npt.NDArray[Any], actions: Sequence[Any] | npt.NDArray[Any], are_cut: npt.NDArray[Any]
    ) -> bool:
        """One step of these rows; whether any ended, failed, or is one that the collector cuts."""
        cfg, arrays, any_ended = self._cfg, self._arrays, False
        reward, terminated, truncated = arrays["reward"], arrays["terminated"], arrays["truncated"]
        if self._has_nested_actions:
            actions = [nested_action(cfg.action_space, action) for action in actions]
        else:
            actions = np.asarray(actions, dtype=cfg.action_space.dtype)
        for row, action, is_cut in zip(rows.tolist(), actions, are_cut.tolist(), strict=True):
            found: Any = None
            try:
                found = self.envs[row].step(action)
                obs, earned, ended, cut, info = found
                if (
                    earned.__class__ not in _NUMBERS
                    or ended.__class__ not in _TRUTHS
                    or cut.__class__ not in _TRUTHS
                    or info.__class__ is not dict
                ):
                    check_outcome(earned, ended, cut, info)
                reward[row] = earned
                if cfg.log_info and (ended or cut):
                    arrays["log_info"][row] = logged(info, cfg.log_info)
            except Exception as error:
                self._fail(row, explained_step(error, cfg.env_id, found))
                any_ended = True
                continue
            self._write(row, obs, "step")
            if ended or cut or is_cut:
                terminated[row], truncated[row], any_ended = ended, cut, True
                flag = success_of_row(info)
                arrays["success"][row] = 0 if flag is None else 1 + flag
                arrays["task"][row] = task_of_row(info)
            if cfg.chunked:
                arrays["executed"][row] = info["executed"]
            if cfg.reward_parts:
                try:
                    arrays["reward_parts"][row] = [info[key] for key in cfg.reward_parts]
                except KeyError as error:
                    raise EnvError(
                        f"{cfg.env_id} has no reward part {error}: its info holds {sorted(info)}; fix: credit.reward.names"
                    ) from error
        return any_ended

    def start(self, rows: npt.NDArray[Any], start_seeds: npt.NDArray[Any], noise_seeds: npt.NDArray[Any]) -> None:
        """Begin episodes in these rows, from the starts of their seeds, with noise of their own afterwards.

        With ``start_mode`` ``none``, the seed of the noise decides the start, too. A negative seed of the noise stands for a
        plain reset, and a negative seed of its start continues the environment's own stream.
        """
        for row, start, noise in zip(rows.tolist(), start_seeds.tolist(), noise_seeds.tolist(), strict=True):
            try:
                if noise < 0:
                    self._was_reset[row] = True
                    obs, _ = first_of(self.envs[row], self._cfg.env_id, seed=None if start < 0 else start)
                elif self._adapter is not None:
                    obs = self._restore(row, start, self._adapter)
                else:
                    obs = self._reset(row, noise if self._cfg.start_mode == "none" else start)
                if noise >= 0:
                    reseed_noise(self.envs[row], noise)
            except Exception as error:
                self._fail(row, error)
                continue
            self._write(row, obs, "reset")

    def close(self) -> None:
        """Free the environments."""
        for env in self.envs:
            env.close()

    def _reset(self, row: int, seed: int) -> Any:
        """The first observation of a seeded reset, in a new environment with ``fresh``."""
        if self._cfg.start_mode == "fresh" and self._was_reset[row]:
            self.envs[row].close()
            self.envs[row] = self._cfg.make()
        self._was_reset[row] = True
        return first_of(self.envs[row], self._cfg.env_id, seed=seed)[0]

    def _restore(self, row: int, seed: int, adapter: SnapshotAdapter) -> Any:
        """The first observation of the state that the seed's first reset was captured in, in any row."""
        if seed not in self._starts:
            obs = self._reset(row, seed)
            self._starts[seed] = adapter.capture(self.envs[row]), copy.deepcopy(obs)
            if len(self._starts) > _STARTS_KEPT:
                del self._starts[next(iter(self._starts))]
            return obs
        if not self._was_reset[row]:  # the first reset of an environment creates some of its attributes
            self._reset(row, 0)
        state, obs = self._starts[seed]
        adapter.restore(self.envs[row], state)
        return obs

    def _write(self, row: int, obs: Any, method: Literal["reset", "step"]) -> None:
        try:
            for path, array, space, limits in self._leaves:
                leaf = obs
                for key in path:
                    leaf = leaf[int(key)] if isinstance(leaf, tuple | list | np.ndarray) else leaf[key]
                given, leaf = leaf, np.asarray(leaf)
                if leaf.shape != space.shape or leaf.dtype.kind not in "biuf" or isinstance(given, np.ma.MaskedArray):
                    raise ValueError
                if limits is not None and not fits(leaf, space, limits):
                    raise ValueError
                array[row] = leaf
        except (KeyError, IndexError, TypeError, ValueError):
            try:  # to name the given and the declared values
                obs_to_tensor(self._cfg.observation_space, obs, batched=False)
            except DataError as error:
                where = f"{method}() of {self._cfg.env_id}"
                raise DataError(f"{where} returned what its observation_space does not allow: {error}") from None
            raise

    def _fail(self, row: int, error: Exception) -> None:
        """Raise the error, or replace the environment. The old one may be broken, so it is not closed."""
        where = f"row {self._first + row} of {self._cfg.env_id}"
        if self._cfg.on_error == "raise":
            error.add_note(f"in {where}")
            raise error
        log.error("%s failed, and was replaced: %r", where, error, exc_info=None if self._has_failed else error)
        self._has_failed = True
        self.envs[row], self._was_reset[row] = self._cfg.make(), False
        self._arrays["reward"][row] = 0.0
        self._arrays["failed"][row] = True


def logged(info: Mapping[str, Any], keys: Sequence[str]) -> list[float]:
    """The numbers of ``env.log_info`` in an episode's last info; an ``EnvError`` if one is missing, or no number."""
    numbers = []
    for key in keys:
        if key not in info:
            raise EnvError(
                f"env.log_info has no entry {key!r} at the end of an episode{nearest(key, info)}; known: {', '.join(sorted(info))}"
            )
        value = np.asarray(info[key])
        if value.size != 1 or value.dtype.kind not in "biuf":
            raise EnvError(f"env.log_info: info[{key!r}] is {info[key]!r:.80}, expected a number; fix: leave it out")
        numbers.append(float(value.item()))
    return numbers


def check_outcome(reward: Any, terminated: Any, truncated: Any, info: Any) -> None:
    """Raise a ``TypeError`` for what is no number, although NumPy would make it one."""
    for name, value in {"reward": reward, "terminated": terminated, "truncated": truncated}.items():
        array = np.asarray(value)
        if not isinstance(value, SupportsFloat) or array.dtype.kind not in "biufO" or array.size != 1:
            raise TypeError(f"{name} is {value!r:.80}")
    if not isinstance(info, Mapping):
        raise TypeError(f"info is {info!r:.80}")


def explained_step(error: Exception, env_id: str, found: object) -> Exception:
    """An error of a step: the environment's own, or one that says what it must return where ``found`` could not be stored."""
    if isinstance(error, GroupwiseError) or not arose_outside(error):
        return error
    kinds = ", ".join(type(part).__name__ for part in found) if isinstance(found, tuple) else type(found).__name__
    explained = DataError(
        f"step() of {env_id} returned {'something else' if found is None else f'({kinds})'}: {error}; expected (observation, "
        "reward, terminated, truncated, info) with a number as reward and truth values as ends; fix: return obs, "
        "float(reward), terminated, truncated, info"
    )
    explained.__cause__ = error
    return explained


def layout_of(cfg: RowCfg) -> Layout:
    """Layout for rows of ``cfg``; an ``UnsupportedSpaceError`` if observations cannot be stored."""
    leaves = {obs_name(path): obs_spec(leaf) for path, leaf in leaf_spaces(cfg.observation_space).items()}
    layout: Layout = {name: (spec.shape, str(spec.dtype).removeprefix("torch.")) for name, spec in leaves.items()}  # type: ignore[union-attr]
    layout |= {name: ((), _DTYPES.get(name, "bool")) for name in OUTCOMES} | {"task": ((), _TASK)}
    if cfg.chunked:
        layout["executed"] = ((), "int64")
    if cfg.reward_parts:
        layout["reward_parts"] = ((len(cfg.reward_parts),), "float32")
    if cfg.log_info:
        layout["log_info"] = ((len(cfg.log_info),), "float64")
    return layout


def obs_name(path: tuple[str, ...]) -> str:
    """Name of a leaf of the observation in the arrays."""
    return "/".join(("obs", *path))


# Rows in worker processes, which write observations and rewards into shared memory

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

    def step(self, rows: npt.NDArray[Any], actions: npt.NDArray[Any], are_cut: npt.NDArray[Any]) -> bool:
        """One step of these rows; whether any ended, failed, or is one that the collector cuts."""
        self._ask("step", rows, actions, are_cut)
        ended = any(self.arrays[name].any() for name in ("terminated", "truncated", "failed"))
        return ended or bool(are_cut.any())

    def start(self, rows: npt.NDArray[Any], start_seeds: npt.NDArray[Any], noise_seeds: npt.NDArray[Any]) -> None:
        """Start these rows."""
        self._ask("start", rows, start_seeds, noise_seeds)

    def close(self, seconds: float = processes.SECONDS_TO_CLOSE) -> None:
        """End the processes; those that are still running after that time are killed."""
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
    """A function that steps or starts the rows, as a message says; they write into the columns."""
    arrays = {name: array[rows] for name, array in _arrays(columns).items()}
    local = LocalRows(cloudpickle.loads(payload), arrays, rows.start)
    commands: dict[str, Callable[..., Any]] = {"step": local.step, "start": local.start}
    yield lambda message: commands[message[0]](*message[1:])
    local.close()


class RowsGroupEnv(GroupEnv):
    """Copies of one Gymnasium environment, stepped one after another in this process or in several.

    Each step overwrites the arrays that the last one returned.

    Args:
        num_workers: processes that share the rows among them; 0: this process steps them all.
        device: where observations go.

    Raises:
        EnvError: the environment cannot be made, here or in a worker.
    """

    def __init__(self, cfg: RowCfg, num_envs: int, *, num_workers: int = 0, device: torch.device | str = "cpu") -> None:
        spaces = cfg.observation_space, cfg.action_space
        super().__init__(cfg.env_id, num_envs, spaces, cfg.max_episode_steps, device)
        self.start_mode, self.notes = cfg.start_mode, cfg.notes
        self._cfg = cfg
        self._live: Mask = np.zeros(num_envs, dtype=np.bool_)
        self._live_rows = np.flatnonzero(self._live)
        self._not_started: Mask = np.zeros(num_envs, dtype=np.bool_)
        self._age = np.zeros(num_envs, dtype=np.int64)
        layout = layout_of(cfg)
        self._rows: LocalRows | WorkerRows
        if num_workers:
            self._rows = WorkerRows(cfg, layout, num_envs, num_workers)
            arrays = self._rows.arrays
        else:
            arrays = {name: np.zeros((num_envs, *shape), dtype) for name, (shape, dtype) in layout.items()}
            self._rows = LocalRows(cfg, arrays)
        self._arrays = arrays
        self._obs = _obs_tensor(cfg.observation_space, arrays)
        self._reward, self._terminated, self._truncated, self._failed, self._success = (
            torch.from_numpy(arrays[name]) for name in OUTCOMES
        )
        of_step = {name: arrays[name] for name in ("reward_parts", "executed") if name in arrays}
        self._info: dict[str, Tensor] = {name: torch.from_numpy(array) for name, array in of_step.items()}
        self._zeroed = [*(arrays[name] for name in OUTCOMES), *of_step.values()]

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...]; see ``VectorEnv.reset``. Each row has its own stream."""
        mask = np.ones_like(self._live) if mask is None else mask
        own_stream = np.full(self.num_envs, -1)
        return self.start(mask, own_stream if seed is None else np.array(row_seeds(seed, self.num_envs)), own_stream)

    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, ...] after starting the rows of ``mask``; see ``GroupEnv.start``.

        With ``cfg.on_error="report"``, the next step reports which rows failed here.
        """
        failed = self._failed.numpy()
        failed.fill(False)
        self._rows.start(np.flatnonzero(mask), start_seed[mask], noise_seed[mask])
        self._set_live(self._live | mask)
        self._age[mask] = 0
        self._not_started = self._not_started & ~mask | failed & self._live
        self.pause(self._not_started)
        return self._obs.to(self.device)

    def pause(self, mask: Mask) -> None:
        """Pause the rows of ``mask`` until they are started again."""
        self._set_live(self._live & ~mask)

    def step(self, action: Tensor) -> EnvStep:
        """One step of every row that is not paused with environment actions [N, ...]."""
        actions, arrays = action.cpu().numpy(), self._arrays
        info: dict[str, Any] = {**self._info}
        if len(self._live_rows) < self.num_envs:
            actions = actions[self._live_rows]
        for array in self._zeroed:  # also in rows that take no step
            array.fill(0)
        if self._cfg.log_info:
            arrays["log_info"].fill(np.nan)
        self._age[self._live_rows] += 1
        are_cut = self._age[self._live_rows] >= (self.horizon or math.inf)
        any_ended, failed = self._rows.step(self._live_rows, actions, are_cut), None
        if self._not_started.any():
            self._failed |= torch.from_numpy(self._not_started)
            self._not_started = np.zeros_like(self._live)
            any_ended = True
        if any_ended:
            self.pause((self._terminated | self._truncated | self._failed).numpy())
            failed = self._failed.clone() if self._failed.any() else None
            if self._success.any():
                info["success"] = self._success == 2
            if (arrays["task"] != "").any():
                info["task"] = arrays["task"].copy()
            if self._cfg.log_info:
                logged_numbers = torch.from_numpy(arrays["log_info"].copy()).unbind(1)
                info["log_info"] = dict(zip(self._cfg.log_info, logged_numbers, strict=True))
        return EnvStep(
            self._obs.to(self.device), self._reward, self._terminated, self._truncated, failed=failed, info=info
        )

    def state_dict(self) -> dict[str, Any] | None:
        """The state of all rows as plain data; None for rows in other processes and simulators that cannot be read."""
        if isinstance(self._rows, WorkerRows):
            return None
        rows, room = list[Any](), iter(range(snapshots.MOST_OF_ROWS))
        for env in self._rows.envs:
            if (row := snapshots.capture(env, room, self._rows.shared)) is None:
                return None
            rows.append(row)
        return {"rows": rows, "live": self._live}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved ``state_dict``; paused rows show no observation until they are started again."""
        if not isinstance(self._rows, LocalRows):
            raise EnvError(f"rows of {self.env_id} in other processes take no state; fix: env.vectorization='sync'")
        self.reset(seed=0)  # the first reset creates some of an environment's attributes
        for env, row in zip(self._rows.envs, state["rows"], strict=True):
            snapshots.restore(env, row, self._rows.shared)
        self._set_live(state["live"])

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
