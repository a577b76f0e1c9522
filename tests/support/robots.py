"""A robot that needs no simulator: a bright square, moved by the policy to the side that an instruction names."""

import gymnasium as gym
import numpy as np

PIXELS, VIEWS, BYTES = 16, 2, 24
TASKS = ("go left", "go to the right")


def encoded(text, size=BYTES):
    """UTF-8, padded with zeros."""
    return np.frombuffer(text.encode().ljust(size, b"\0"), np.uint8).copy()


class Robot(gym.Env):
    """The square starts anywhere; it succeeds at the side that the instruction names, within ``limit`` steps."""

    def __init__(self, limit=12, task=None):
        self.limit, self.task = limit, task
        self.observation_space = gym.spaces.Dict(
            image=gym.spaces.Box(0, 255, (VIEWS, PIXELS, PIXELS, 3), np.uint8),
            proprio=gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
            instruction=gym.spaces.Box(0, 255, (BYTES,), np.uint8),
        )
        self.action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.side = int(self.np_random.integers(2)) if self.task is None else TASKS.index(self.task)
        self.place = self.np_random.uniform(-0.4, 0.4, 2)
        self.count = 0
        return self.observe(), {}

    def step(self, action):
        self.count += 1
        self.place = np.clip(self.place + 0.25 * np.asarray(action), -1, 1)
        done = bool(self.place[0] * (2 * self.side - 1) > 0.7)
        return self.observe(), float(done), done, self.count >= self.limit, {"is_success": done}

    def observe(self):
        image = np.zeros((VIEWS, PIXELS, PIXELS, 3), np.uint8)
        column, row = (int((x + 1) / 2 * (PIXELS - 3)) for x in self.place)
        image[0, row : row + 3, column : column + 3] = 255
        image[1, column : column + 3, row : row + 3] = (255, 0, 0)
        return {
            "image": image,
            "proprio": self.place.astype(np.float32),
            "instruction": encoded(TASKS[self.side]),
        }
