"""Environments that raise an error at an action that their mask forbids."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete


class Cards(gymnasium.Env):
    """A hand of 5 cards, numbered from 3; each may be played once. A card brings its share of the hand. Ends when 4 are played."""

    observation_space = Box(0, 1, (5,), np.float32)
    action_space = Discrete(5, start=3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.hand = np.ones(5, np.int8)
        self.worth = self.np_random.permutation(5) / 4
        return self.look(), {"action_mask": self.mask()}

    def step(self, action):
        card = int(action) - 3
        if not self.mask()[card]:
            raise ValueError(f"card {card} is not in {self.mask()}")
        reward = self.worth[card] * self.hand.sum()
        self.hand[card] = 0
        over = bool(self.hand.sum() == 1)
        return self.look(), float(reward), over, False, {"action_mask": 0 * self.hand if over else self.mask()}

    def look(self):
        return (self.worth * self.hand).astype(np.float32)

    def mask(self):
        return self.hand.copy()


class CardsInDict(Cards):
    """The mask is an entry of the observation, also of the last one, where nothing is allowed any more."""

    observation_space = Dict({"hand": Cards.observation_space, "action_mask": MultiBinary(5)})

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {}

    def step(self, action):
        return *super().step(action)[:4], {}

    def look(self):
        over = self.hand.sum() == 1
        return {"hand": super().look(), "action_mask": 0 * self.hand if over else self.hand.copy()}


class TwoHands(Cards):
    """Two choices of 3 and 2 options. The mask is a tuple, as ``MultiDiscrete.sample`` takes it."""

    observation_space = Box(0, 1, (2,), np.float32)
    action_space = MultiDiscrete([3, 2], start=[1, 0])

    def reset(self, *, seed=None, options=None):
        gymnasium.Env.reset(self, seed=seed)
        self.count = 0
        return self.draw(), {"action_mask": self.mask()}

    def step(self, action):
        first, second = int(action[0]) - 1, int(action[1])
        if first == self.banned or second != self.only:
            raise ValueError(f"{action} against banned {self.banned} and only {self.only}")
        self.count += 1
        return self.draw(), float(first), self.count == 4, False, {"action_mask": self.mask()}

    def draw(self):
        self.banned, self.only = int(self.np_random.integers(3)), int(self.np_random.integers(2))
        return np.array([self.banned / 2, self.only], np.float32)

    def mask(self):
        return (np.arange(3) != self.banned).astype(np.int8), (np.arange(2) == self.only).astype(np.int8)
