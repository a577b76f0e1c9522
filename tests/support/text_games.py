"""Small games as text environments."""

import numpy as np

import groupwise as gw


class Guess(gw.TextEnv):
    """A digit from 0 to 9, drawn from a generator of its own; the observation says whether a guess is too low or too high."""

    def __init__(self, turns=3, reward=1.0):
        self.turns, self.reward = turns, reward

    def draw(self, seed):
        return int(np.random.default_rng(seed).integers(10))

    def reset(self, *, seed=None, options=None):
        self.secret, self.left, self.seen = self.draw(seed), self.turns, []
        return "0", {}

    def step(self, text):
        self.left -= 1
        self.seen.append(text)
        guess = next((int(c) for c in text if c.isdigit()), 10)
        won = guess == self.secret
        info = {"success": won} if won or not self.left else {}
        return f" {int(guess < self.secret)} ", self.reward * won - 0.1, won, not won and not self.left, info

    def sample_action(self, rng):
        return str(rng.integers(10))


class Repeat(gw.TextEnv):
    """The second turn must be the digit that answered the first one."""

    def reset(self, *, seed=None, options=None):
        self.digit, self.turn = str(np.random.default_rng(seed).integers(4)), 0
        return "5", {}

    def step(self, text):
        self.turn += 1
        won = self.turn == 2 and text == self.digit
        return self.digit, float(won), self.turn == 2, False, {"success": won}


class First(gw.TextEnv):
    """The first turn decides the reward of the third."""

    def reset(self, *, seed=None, options=None):
        self.turns = []
        return "5", {}

    def step(self, text):
        self.turns.append(text)
        won = len(self.turns) == 3 and self.turns[0] == "3"
        return "6", float(won), len(self.turns) == 3, False, {"success": won}
