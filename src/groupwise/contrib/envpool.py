"""EnvPool's environments, which run in C++ threads: as a plain vector, and in groups that share their starts.

EnvPool fixes its seeds when a pool is made and gives no access to states. So a group starts in a fresh pool, all of
whose members have the group's seed; making one costs 0.1 to 2 ms a row, 100 ms for Atari. Members that are over are
paused by stepping the others alone. There is one seed for the start and for everything after it: members share
their noise.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from groupwise.data.rollout import Nested, allocate
from groupwise.data.spaces import obs_spec, obs_to_tensor
from groupwise.envs.base import EnvStep, GroupEnv, Mask, Seeds, VectorEnv
from groupwise.envs.success import success_of_rows
from groupwise.errors import EnvError, UnknownNameError, require_extra
from groupwise.seeding import row_seeds
from groupwise.system.cpus import num_cpus

_OURS = ("num_envs", "batch_size", "seed", "env_seed", "gym_reset_return_info")
"""Arguments of ``envpool.make`` that are set here."""


class EnvPoolSource:
    """One of EnvPool's tasks, and how pools of it are made.

    Args:
        kwargs: of ``envpool.make``, such as ``frame_skip`` or ``num_threads``.
        max_episode_steps: instead of the task's own limit.

    Raises:
        MissingExtraError: EnvPool is not installed.
        UnknownNameError: it has no such task.
        EnvError: it does not take these arguments, or several players share an environment.
    """

    def __init__(self, task: str, kwargs: Mapping[str, Any], max_episode_steps: int | None = None) -> None:
        require_extra("envpool", "envpool")
        import envpool

        if task not in (known := envpool.list_all_envs()):
            raise UnknownNameError("EnvPool environment", task, known)
        if taken := sorted(set(kwargs) & set(_OURS)):
            raise EnvError(f"kwargs of {task} hold {', '.join(taken)}, which groupwise sets; fix: leave it out")
        self.task = task
        limit = {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}
        self._kwargs = {**kwargs, **limit}
        with _explained(task):
            spec = envpool.make_spec(task, **self._kwargs)
            self.observation_space: Any = spec.observation_space
            self.action_space: Any = spec.action_space
        config = spec.config._asdict()
        if config["max_num_players"] > 1:
            raise EnvError(f"{task} has {config['max_num_players']} players; fix: take an environment with one")
        self.max_episode_steps: int | None = config.get("max_episode_steps")

    def make(self, seeds: list[int], num_threads: int) -> Any:
        """A pool with one row a seed, and its first observations."""
        import envpool

        settings = {"num_threads": num_threads, **self._kwargs}
        with _explained(self.task):
            pool = envpool.make_gymnasium(self.task, num_envs=len(seeds), env_seed=seeds, **settings)
            return pool, pool.reset()[0]


class EnvPoolVectorEnv(VectorEnv):
    """EnvPool as it is: a row that ended is reset by its next step, which ignores the action."""

    autoreset = "next_step"

    def __init__(self, source: EnvPoolSource, num_envs: int, *, device: torch.device | str = "cpu") -> None:
        _describe(self, source, num_envs)
        self.device = torch.device(device)
        self._source = source
        self._pool: Any = None

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...]; see ``VectorEnv.reset``. A seed makes a new pool."""
        if mask is not None:
            raise EnvError(
                f"{self.env_id} resets itself (next_step), so single rows cannot be reset; fix: EnvPoolGroupEnv"
            )
        if self._pool is not None and seed is None:
            return self._tensor(self._pool.reset()[0])
        self.close()
        self._pool, obs = self._source.make(row_seeds(seed or 0, self.num_envs), num_cpus())
        return self._tensor(obs)

    def step(self, action: Tensor) -> EnvStep:
        """One step of every row with environment actions [N, ...]."""
        if self._pool is None:
            raise _not_started(self.env_id)
        obs, reward, terminated, truncated, info = self._pool.step(action.cpu().numpy())
        success = success_of_rows(info, self.num_envs)
        return EnvStep(self._tensor(obs), *_outcome(reward, terminated, truncated), success=success)

    def close(self) -> None:
        """Free the pool."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _tensor(self, obs: Any) -> Nested:
        return obs_to_tensor(self.observation_space, obs, self.device, batched=True)


class _Pool(NamedTuple):
    env: Any
    rows: npt.NDArray[np.int64]
    """The rows that live in this pool."""
    members: npt.NDArray[np.int32]
    """Where in the pool each of them is."""

    def without(self, mask: Mask) -> "_Pool":
        """What remains when the rows of ``mask`` go elsewhere."""
        stays = ~mask[self.rows]
        return self._replace(rows=self.rows[stays], members=self.members[stays])


class EnvPoolGroupEnv(GroupEnv):
    """EnvPool's rows, started by making a pool for them, and paused by leaving them out of the step.

    Rows that start together live in one pool, so it is fastest where whole groups do. ``noise_seed`` has no effect.

    Args:
        block_size: neighbours that only start together, as members of a group; 1 lets each row start alone, at the
            cost of a pool each.

    Raises:
        EnvError: the rows do not divide into blocks.
    """

    start_mode = "seed"
    notes = ("Members share all randomness, also after the start: EnvPool takes one seed for both.",)

    def __init__(
        self, source: EnvPoolSource, num_envs: int, *, block_size: int = 1, device: torch.device | str = "cpu"
    ) -> None:
        if num_envs % block_size:
            raise EnvError(
                f"{num_envs} rows of {source.task} do not divide into groups of {block_size}; fix: num_envs = "
                f"{max(1, num_envs // block_size) * block_size}"
            )
        _describe(self, source, num_envs)
        self.block_size = block_size
        self.device = torch.device(device)
        self._source = source
        self._pools: list[_Pool] = []
        self._obs = allocate(self.obs_spec, num_envs, device=device)
        self._paused: Mask = np.ones(num_envs, dtype=np.bool_)

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...]; see ``VectorEnv.reset``. Without a seed, rows continue their pool's streams."""
        if seed is not None or not self._pools:
            seeds = np.array(row_seeds(seed or 0, self.num_envs))
            return self.start(np.ones(self.num_envs, dtype=np.bool_) if mask is None else mask, seeds, seeds)
        obs = self._obs.clone()
        for pool in self._pools:
            chosen = slice(None) if mask is None else mask[pool.rows]
            if len(pool.members[chosen]):
                self._show(obs, pool.rows[chosen], pool.env.reset(pool.members[chosen])[0])
        self._paused = np.zeros_like(self._paused) if mask is None else self._paused & ~mask
        self._obs = obs
        return obs

    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, ...] after starting the rows of ``mask``; see ``GroupEnv.start``."""
        rows = np.flatnonzero(mask)
        if not len(rows):
            return self._obs
        self._drop(mask)
        num_threads = max(1, num_cpus() * len(rows) // self.num_envs)
        env, first = self._source.make(start_seed[rows].tolist(), num_threads)
        self._pools.append(_Pool(env, rows, np.arange(len(rows), dtype=np.int32)))
        self._paused = self._paused & ~mask
        self._obs = self._obs.clone()
        self._show(self._obs, rows, first)
        return self._obs

    def pause(self, mask: Mask) -> None:
        """Pause the rows of ``mask`` until they are started again."""
        self._paused = self._paused | mask

    def step(self, action: Tensor) -> EnvStep:
        """One step of every row that is not paused with environment actions [N, ...]."""
        if not self._pools:
            raise _not_started(self.env_id)
        actions, waiting = action.cpu().numpy(), []
        for pool in self._pools:  # all of them work at once
            live = ~self._paused[pool.rows]
            if live.any():
                pool.env.send(actions[pool.rows[live]], pool.members[live])
                waiting.append((pool.env, pool.rows[live]))
        reward = np.zeros(self.num_envs, dtype=np.float32)
        terminated, truncated = np.zeros_like(self._paused), np.zeros_like(self._paused)
        success: Tensor | None = None
        self._obs = self._obs.clone()
        for env, rows in waiting:
            obs, reward[rows], terminated[rows], truncated[rows], info = env.recv()
            self._show(self._obs, rows, obs)
            if (flags := success_of_rows(info, len(rows))) is not None:
                success = torch.zeros(self.num_envs, dtype=torch.bool) if success is None else success
                success[torch.from_numpy(rows)] = flags
        self._paused = self._paused | terminated | truncated
        return EnvStep(self._obs, *_outcome(reward, terminated, truncated), success=success)

    def close(self) -> None:
        """Free the pools."""
        self._drop(np.ones(self.num_envs, dtype=np.bool_))

    def _show(self, obs: Nested, rows: npt.NDArray[np.int64], new: Any) -> None:
        obs[torch.from_numpy(rows)] = obs_to_tensor(self.observation_space, new, self.device, batched=True)

    def _drop(self, mask: Mask) -> None:
        """Take the rows of ``mask`` out of their pools, and close those that are empty then."""
        left = [pool.without(mask) for pool in self._pools]
        for pool in left:
            if not len(pool.rows):
                pool.env.close()
        self._pools = [pool for pool in left if len(pool.rows)]


def _describe(env: VectorEnv, source: EnvPoolSource, num_envs: int) -> None:
    env.env_id = source.task
    env.num_envs = num_envs
    env.observation_space = source.observation_space
    env.action_space = source.action_space
    env.obs_spec = obs_spec(source.observation_space)
    env.max_episode_steps = source.max_episode_steps


def _outcome(reward: npt.NDArray[np.float32], terminated: Mask, truncated: Mask) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.from_numpy(np.asarray(reward, dtype=np.float32)),
        torch.from_numpy(terminated),
        torch.from_numpy(truncated),
    )


def _not_started(env_id: str) -> EnvError:
    return EnvError(f"{env_id} was stepped before anything started; fix: call start or reset first")


@contextmanager
def _explained(task: str) -> Iterator[None]:
    """Turn EnvPool's errors about arguments into ours, and keep quiet about bounds that float32 rounds."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        try:
            yield
        except (TypeError, ValueError, AssertionError) as error:
            raise EnvError(f"EnvPool cannot make {task}: {error}") from error
