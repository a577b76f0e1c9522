"""Environments in which what was seen earlier decides."""

import gymnasium
import numpy as np


class Recall(gymnasium.Env):
    """A cue of -1 or 1, then 4 to 6 blank observations, then a signal: the action must name the cue. Any other policy is right
    half the time."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        """The signal, white or black."""
        return np.full((32, 32, 3), 255 * (self.left == 0), np.uint8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.left = int(self.np_random.integers(2)), int(self.np_random.integers(5, 8))
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action):
        self.left -= 1
        right = self.left < 0 and int(action) == self.cue
        signal = np.array([0, self.left == 0], np.float32)
        return signal, float(right), self.left < 0, False, {"is_success": right}


gymnasium.register("Recall-v0", Recall, max_episode_steps=20)
