"""Gymnasium's vectorised CartPole with rows that start where they are told."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from torch import Tensor

from groupwise.data.rollout import Nested
from groupwise.data.spaces import obs_spec
from groupwise.envs.base import EnvStep, GroupEnv, Mask, Seeds, Snapshot
from groupwise.errors import EnvError


@lru_cache(maxsize=1024)
def _start_state(seed: int) -> npt.NDArray[np.float64]:
    """The state [4] in which the single CartPole begins after ``reset(seed=seed)``. Siblings ask for the same one."""
    return np.random.default_rng(seed).uniform(-0.05, 0.05, size=4)


class CartPoleState(NamedTuple):
    """One row's state."""

    state: npt.NDArray[np.float64]
    steps: int
    """Taken since the start of the episode."""


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
        self.reset(seed=0)

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
        env, before = self._env, self._state
        obs, reward, terminated, truncated, _ = env.step(action.cpu().numpy())
        env.prev_done[:] = False  # or the next step would reset the finished rows
        self._state = env.state
        if self._held.any():
            held = self._held
            self._state[:, held] = before[:, held]
            obs[held] = before.T[held]
            reward[held] = 0.0
            terminated[held] = False
            truncated[held] = False
        self._held = self._held | terminated | truncated
        return EnvStep(
            torch.from_numpy(obs).to(self.device),
            torch.from_numpy(reward),
            torch.from_numpy(terminated),
            torch.from_numpy(truncated),
        )

    def snapshot(self, rows: Sequence[int]) -> list[Snapshot]:
        """The states of these rows; see ``GroupEnv.snapshot``.

        Raises:
            EnvError: a row is held.
        """
        if held := [row for row in rows if self._held[row]]:
            raise EnvError(f"rows {held} of {self.env_id} are held; mend: take snapshots of rows that are running")
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
