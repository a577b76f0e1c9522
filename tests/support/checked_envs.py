"""A sound environment for the trials of ``check_env``, and its kin that break something."""

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec
from noisy_envs import Noisy


class Sound(Noisy):
    """A random start, random steps, a known end; subclasses break something."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    length = 20

    def __init__(self):
        self.spec = EnvSpec(type(self).__name__, max_episode_steps=20)

    def look(self):
        return np.array([self.state], np.float32)


class Calm(Sound):
    def draw_noise(self):
        return 0.0


class Cheats(Sound):
    """Draws its start from the global generator, which no seed of a reset reaches."""

    def draw_start(self):
        return np.random.normal()


class BreaksInStep(Sound):
    def step(self, action):
        raise RuntimeError("the motor is off; fix: switch it on")


class BreaksInReset(Sound):
    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no room")


class CannotBeMade(Sound):
    def __init__(self):
        raise OSError("licence file not found")


class Speaks(Sound):
    observation_space = gymnasium.spaces.Text(5)

    def look(self):
        return "hello"


class Counts(Sound):
    action_space = gymnasium.spaces.Box(0, 5, (1,), np.int64)


class Alike(Calm):
    def draw_start(self):
        return 0.0
