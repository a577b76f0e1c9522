"""Environments whose starts and steps are honest, and their kin that cheat."""

import gymnasium
import numpy as np


class Noisy(gymnasium.Env):
    """A random start and random steps, all from ``np_random``. ``hidden`` does not show in what it observes."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float64)
    length, episodes = 10_000, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episodes += 1
        self.count, self.hidden, self.state = 0, 0.0, self.draw_start()
        return self.look(), {}

    def step(self, action):
        self.count += 1
        self.hidden += float(np.sum(action))
        self.state += self.draw_noise() + self.hidden
        return self.look(), self.pay(), False, self.count >= self.length, {}

    def draw_start(self):
        return self.np_random.normal()

    def draw_noise(self):
        return self.np_random.normal()

    def pay(self):
        return 1.0

    def look(self):
        return np.array([self.state])


class Calm(Noisy):
    def draw_noise(self):
        return 0.0


class AlwaysThere(Calm):
    def draw_start(self):
        return 0.5


class GlobalStart(Noisy):
    def draw_start(self):
        return np.random.normal()


class GlobalNoise(Noisy):
    def draw_noise(self):
        return np.random.normal()


class GlobalReward(Calm):
    def pay(self):
        return np.random.normal()


class Remembers(Noisy):
    """Starts elsewhere in every episode, whatever the seed."""

    def draw_start(self):
        return float(self.episodes)
