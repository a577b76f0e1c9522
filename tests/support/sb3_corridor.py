"""A small environment, and ``GRPO`` in it through Stable-Baselines3, with callbacks that watch."""

import gymnasium
import numpy as np
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

from groupwise.contrib.sb3 import GRPO

SMALL = {"n_steps": 16, "batch_size": 32, "n_epochs": 2, "policy_kwargs": {"net_arch": [8]}, "seed": 0}


class Corridor(gymnasium.Env):
    """Starts anywhere; action 1 pays; ends by chance or after six steps."""

    def __init__(self, actions: spaces.Space | None = None) -> None:
        self.observation_space = spaces.Box(-10, 10, (2,), np.float32)
        self.action_space = spaces.Discrete(2) if actions is None else actions

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.steps = self.np_random.uniform(-1, 1), 0
        return self.look(), {}

    def look(self) -> np.ndarray:
        return np.array([self.start, self.steps], np.float32)

    def step(self, action):
        assert self.action_space.contains(action)
        self.steps += 1
        terminated = bool(self.np_random.uniform() < 0.1)
        return self.look(), float(np.mean(action)), terminated, self.steps == 6, {}


class ShortPendulum(gymnasium.wrappers.TimeLimit):
    def __init__(self) -> None:
        super().__init__(gymnasium.make("Pendulum-v1").unwrapped, 20)


def corridor(**kwargs) -> GRPO:
    return GRPO("MlpPolicy", kwargs.pop("env", None) or make_vec_env(Corridor, n_envs=2), **(SMALL | kwargs))


def parameters(model: GRPO) -> np.ndarray:
    return model.policy.parameters_to_vector()


class Watch(BaseCallback):
    """Counts calls, and stops the training at a number of steps."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.stop_at = stop_at
        self.events: list[str] = []
        self.rewards: list[np.ndarray] = []

    def _on_training_start(self) -> None:
        self.events.append("training_start")

    def _on_rollout_start(self) -> None:
        self.events.append("rollout_start")

    def _on_step(self) -> bool:
        self.rewards.append(self.locals["rewards"])
        assert {"obs_tensor", "actions", "clipped_actions", "new_obs", "dones", "infos"} <= self.locals.keys()
        return self.stop_at is None or self.num_timesteps < self.stop_at

    def _on_rollout_end(self) -> None:
        self.events.append("rollout_end")

    def _on_training_end(self) -> None:
        self.events.append("training_end")


class Starts(BaseCallback):
    """First observation of each episode, and its number."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, float] = {}

    def _on_training_start(self) -> None:
        self.look(self.model._last_obs)

    def _on_step(self) -> bool:
        self.look(self.locals["new_obs"])
        return True

    def look(self, obs: np.ndarray) -> None:
        for env, one in enumerate(obs):
            if one[-1] == 0:  # the corridor's count of steps
                self.seen[self.model.rollout_buffer.running(env)[0]] = float(one[-2])
