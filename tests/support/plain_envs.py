"""The environment that others differ from by a line."""

from typing import Any

import gymnasium
import numpy as np


class Plain(gymnasium.Env[Any, Any]):
    """Shows numbers that a start draws, for ``length`` steps (None: for ever). The reward is the action."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space: gymnasium.Space[Any] = gymnasium.spaces.Discrete(2)
    length: int | None = 10

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.start = 0, self.np_random.uniform(-1, 1, self.observation_space.shape).astype(np.float32)
        return self.start.copy(), {}

    def step(self, action):
        self.steps += 1
        return self.start.copy(), float(np.sum(action)), self.steps == self.length, False, {}
