"""Gymnasium's vectorised CartPole with rows that start independently."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from torch import Tensor

from groupwise.data.rollout import Nested
from groupwise.data.spaces import obs_spec
from groupwise.envs import states
from groupwise.envs.base import EnvStep, GroupEnv, Mask, Seeds


@lru_cache(maxsize=1024)
def _start_state(seed: int) -> npt.NDArray[np.float64]:
    """The state [4] in which the single CartPole begins after ``reset(seed=seed)``. Members ask for the same one."""
    return np.random.default_rng(seed).uniform(-0.05, 0.05, size=4)


class CartPoleGroupEnv(GroupEnv):
    """Gymnasium's ``CartPoleVectorEnv``, whose rows start one by one and are paused once they have finished.

    Gymnasium's class cannot disable autoreset, take a seed for each row or reset some rows, but its state is public
    and is set from outside. Every row behaves bit for bit like the single environment. Steps are not random, so the
    noise seed has no effect.
    """

    start_mode = "native"

    def __init__(self, env: CartPoleVectorEnv, *, env_id: str, device: torch.device | str = "cpu") -> None:
        self.env_id = env_id
        self.num_envs = env.num_envs
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.obs_spec = obs_spec(self.observation_space)
        self.max_episode_steps = env.max_episode_steps
        self.device = torch.device(device)
        self._env: Any = env  # Gymnasium declares its public state as None
        self._paused: Mask = np.zeros(env.num_envs, dtype=np.bool_)
        self.reset(seed=0)

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, 4]. All rows draw from one stream, as Gymnasium's class does."""
        if mask is None:
            self._env.reset(seed=seed)
            self._paused[:] = False
        else:
            drawn = self._env.np_random.uniform(self._env.low, self._env.high, size=(4, int(mask.sum())))
            self._begin(mask, drawn)
        return self._obs()

    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, 4] after starting the rows of ``mask``; see ``GroupEnv.start``."""
        if mask.any():
            self._begin(mask, np.stack([_start_state(seed) for seed in start_seed[mask].tolist()], axis=1))
        return self._obs()

    def pause(self, mask: Mask) -> None:
        """Pause the rows of ``mask`` until they are started again."""
        self._paused |= mask

    def step(self, action: Tensor) -> EnvStep:
        """One step of every row that is not paused with actions [N]."""
        env, before, paused = self._env, self._env.state, self._paused
        obs, reward, terminated, truncated, _ = env.step(action.cpu().numpy())
        env.prev_done[:] = False  # or the next step would reset the finished rows
        if paused.any():
            env.state[:, paused] = before[:, paused]
            obs[paused] = before.T[paused]
            reward[paused] = 0.0
            terminated[paused] = False
            truncated[paused] = False
        self._paused = paused | terminated | truncated
        shown = torch.from_numpy(obs).to(self.device)
        return EnvStep(shown, torch.from_numpy(reward), torch.from_numpy(terminated), torch.from_numpy(truncated))

    def state_dict(self) -> dict[str, Any] | None:
        """The state of all rows as plain data."""
        env = states.capture(self._env)
        return None if env is None else {"env": env, "paused": self._paused.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved ``state_dict``."""
        states.restore(self._env, state["env"])
        self._paused = state["paused"].copy()

    def close(self) -> None:
        """Free the environment."""
        self._env.close()

    def _begin(self, mask: Mask, state: npt.NDArray[np.float64]) -> None:
        self._env.state[:, mask] = state
        self._env.steps[mask] = 0
        self._paused[mask] = False

    def _obs(self) -> Tensor:
        return torch.from_numpy(self._env.state.T.astype(np.float32)).to(self.device)
