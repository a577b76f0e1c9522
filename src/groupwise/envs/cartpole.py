"""Gymnasium's vectorised CartPole with rows that start where they are told."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from torch import Tensor

from groupwise.data.rollout import Nested
from groupwise.data.spaces import obs_spec
from groupwise.envs.base import EnvStep, GroupEnv, Mask, Seeds, Snapshot, stand_in_note
from groupwise.envs.cartpole_physics import CartPolePhysics
from groupwise.errors import EnvError

log = logging.getLogger(__name__)


@lru_cache(maxsize=1024)
def _start_state(seed: int) -> npt.NDArray[np.float64]:
    """The state [4] in which the single CartPole begins after ``reset(seed=seed)``. Siblings ask for the same one."""
    return np.random.default_rng(seed).uniform(-0.05, 0.05, size=4)


class CartPoleState(NamedTuple):
    """One row's state."""

    state: npt.NDArray[np.float64]
    steps: int
    """Taken since the start of the episode."""


_Outcome: TypeAlias = tuple[npt.NDArray[np.float32], Mask, Mask]
"""Reward, terminated, truncated."""


class CartPoleGroupEnv(GroupEnv):
    """``CartPoleVectorEnv`` that resets nobody by itself, starts single rows, and holds finished ones.

    Gymnasium's class cannot disable autoreset, take a seed a row or reset some rows, but its state is public: so it
    is set from outside. Every row behaves bit for bit like the single environment. After the start nothing is random,
    so the noise seed has no effect.
    """

    start_tier = "native"
    can_branch = True
    _state: npt.NDArray[np.float64]

    def __init__(self, env: CartPoleVectorEnv, *, env_id: str, device: torch.device | str = "cpu") -> None:
        self.env_id = env_id
        self.num_envs = env.num_envs
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.obs_spec = obs_spec(self.observation_space)
        self.max_episode_steps = env.max_episode_steps
        self.device = torch.device(device)
        self._env: Any = env  # Gymnasium declares its public state as None
        self._held: Mask = np.zeros(env.num_envs, dtype=np.bool_)
        self._physics = CartPolePhysics(env) if CartPolePhysics.knows(env) else None
        env.reset(seed=0)
        self._pays_each_step = bool(env.step(np.zeros(env.num_envs, dtype=np.int64))[1][0])
        """Or only for the fall, as Sutton and Barto have it."""
        self.reset(seed=0)
        if self._physics is not None:
            self.note = stand_in_note(env_id)
            log.info(self.note)

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, 4]. All rows draw from one stream, as Gymnasium's class does."""
        if mask is None:
            self._env.reset(seed=seed)
            self._state = self._env.state
            self._held[:] = False
        else:
            drawn = self._env.np_random.uniform(self._env.low, self._env.high, size=(4, int(mask.sum())))
            self._begin(mask, drawn)
        return self._obs()

    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, 4] after starting the rows of ``mask``; see ``GroupEnv.start``."""
        if mask.any():
            self._begin(mask, np.stack([_start_state(seed) for seed in start_seed[mask].tolist()], axis=1))
        return self._obs()

    def hold(self, mask: Mask) -> None:
        """Hold the rows of ``mask`` until they are started again."""
        self._held |= mask

    def step(self, action: Tensor) -> EnvStep:
        """One step of every row that is not held with actions [N]."""
        actions = action.cpu().numpy()
        reward, terminated, truncated = self._step_gymnasium(actions) if self._physics is None else self._step(actions)
        self._held = self._held | terminated | truncated
        return EnvStep(self._obs(), torch.from_numpy(reward), torch.from_numpy(terminated), torch.from_numpy(truncated))

    def _step(self, actions: npt.NDArray[np.int64]) -> _Outcome:
        assert self._physics is not None
        env, held = self._env, self._held
        live = ~held
        before = self._state
        self._state, terminated = self._physics(before, actions)
        if held.any():  # cheaper than to gather those that move
            np.copyto(self._state, before, where=held)
            terminated &= live
        env.state = self._state
        env.steps += 1
        truncated = live & (env.steps >= env.max_episode_steps)
        reward = live.astype(np.float32)
        if not self._pays_each_step:
            reward = np.where(live, -terminated.astype(np.float32), np.float32(0))
        return reward, terminated, truncated

    def _step_gymnasium(self, actions: npt.NDArray[np.int64]) -> _Outcome:
        env, before, held = self._env, self._state, self._held
        _, reward, terminated, truncated, _ = env.step(actions)
        env.prev_done[:] = False  # or the next step would reset the finished rows
        self._state = env.state
        if held.any():
            self._state[:, held] = before[:, held]
            reward[held] = 0.0
            terminated[held] = False
            truncated[held] = False
        return reward, terminated, truncated

    def snapshot(self, rows: Sequence[int]) -> list[Snapshot]:
        """The states of these rows; see ``GroupEnv.snapshot``.

        Raises:
            EnvError: a row is held.
        """
        if held := [row for row in rows if self._held[row]]:
            raise EnvError(f"rows {held} of {self.env_id} are held; fix: take snapshots of rows that are running")
        return [CartPoleState(self._state[:, row].copy(), int(self._env.steps[row])) for row in rows]

    def restore(self, mask: Mask, snapshots: Sequence[Snapshot | None], noise_seed: Seeds) -> Nested:
        """Observations [N, 4] after putting the rows of ``mask`` into captured states; see ``GroupEnv.restore``."""
        if mask.any():
            chosen: list[Any] = [snapshots[row] for row in np.flatnonzero(mask).tolist()]
            self._begin(mask, np.stack([snapshot.state for snapshot in chosen], axis=1))
            self._env.steps[mask] = [snapshot.steps for snapshot in chosen]
        return self._obs()

    def close(self) -> None:
        """Free the environment."""
        self._env.close()

    def _begin(self, mask: Mask, state: npt.NDArray[np.float64]) -> None:
        self._state[:, mask] = state
        self._env.steps[mask] = 0
        self._held[mask] = False

    def _obs(self) -> Tensor:
        return torch.from_numpy(self._state.T.astype(np.float32)).to(self.device)
