import random

import gymnasium
import numpy as np
import pytest
import torch
from checked_envs import Calm

from groupwise.check import check_env
from groupwise.config.env import EnvCfg
from groupwise.envs import check
from groupwise.envs.findings import Finding, unknown
from groupwise.envs.noise import step_noise


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Times are not what is tested."""
    monkeypatch.setattr(check, "_BUDGET_S", 0.01)


class Pays(Calm):
    """Steady observations; only the reward is random. Subclasses say from where."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, float(self.pay()), *rest


class PaysByNumpy(Pays):
    def pay(self):
        return np.random.normal()


class PaysByPython(Pays):
    def pay(self):
        return random.random()


class PaysByTorch(Pays):
    def pay(self):
        return torch.rand(())


class PaysBySpace(Pays):
    def pay(self):
        return self.action_space.sample()


class Seeds(Pays):
    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.keep(np.random.default_rng(seed))
        return obs, info


class PaysFromDictionary(Seeds):
    def keep(self, generator):
        self.generators = {"noise": generator}

    def pay(self):
        return self.generators["noise"].normal()


class Wind:
    def __init__(self, generator):
        self.sources = [{"noise": generator}]


class PaysFromObject(Seeds):
    def keep(self, generator):
        self.wind = Wind(generator)

    def pay(self):
        return self.wind.sources[0]["noise"].normal()


class PaysFromClosure(Seeds):
    def keep(self, generator):
        self.pay = lambda: generator.normal()


class PaysBySystem(Pays):
    def pay(self):
        return random.SystemRandom().random()


class EndsByNumpy(Calm):
    def step(self, action):
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, bool(np.random.random() < 0.5), truncated, info


class DrawsInVain(Calm):
    def step(self, action):
        np.random.random()
        return super().step(action)


@pytest.mark.parametrize(
    ("env", "noise"),
    [
        (PaysByNumpy, Finding("stray")),
        (PaysByPython, Finding("stray")),
        (PaysByTorch, Finding("stray")),
        (PaysBySpace, Finding("stray")),
        (PaysFromDictionary, Finding("seen")),
        (PaysFromObject, Finding("stray")),
        (PaysFromClosure, Finding("stray")),
        (EndsByNumpy, Finding("stray")),
        (DrawsInVain, Finding("drawn")),
        (PaysBySystem, unknown("equal seeds and equal actions gave other observations, rewards or flags")),
    ],
)
def test_randomness_of_steps_is_found_wherever_it_comes_from(env, noise):
    assert check.attempt(lambda: step_noise(EnvCfg(), env)) == noise


def test_the_trial_of_noise_is_in_the_report_and_leaves_the_global_generators_alone():
    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    assert check_env(PaysByTorch).noise.value == "stray"
    assert check_env(PaysByNumpy).noise.value == "stray"
    assert states() == before
    assert check_env(PaysFromDictionary).noise.value == "seen"  # training gives siblings numbers of their own


SHARED = {"new": np.random.default_rng(1), "old": np.random.RandomState(2), "python": random.Random(3)}


class PaysFromShared(Calm):
    """Draws from generators, and from a space, that the program around it has, too; one of them has no state."""

    action_space = gymnasium.spaces.Discrete(2, seed=4)

    def __init__(self):
        super().__init__()
        self.wind = Wind([SHARED, random.SystemRandom()])

    def step(self, action):
        obs, _, *rest = super().step(action)
        pay = SHARED["new"].normal() + SHARED["old"].normal() + SHARED["python"].random()
        return obs, pay + self.action_space.sample(), *rest


def test_generators_that_the_program_shares_are_put_back():
    def states():
        old = SHARED["old"].get_state()
        space = PaysFromShared.action_space.np_random.bit_generator.state
        return SHARED["new"].bit_generator.state, old[1].tolist(), old[2:], SHARED["python"].getstate(), space

    before, generator = states(), PaysFromShared.action_space.np_random
    check_env(PaysFromShared)
    assert states() == before
    assert PaysFromShared.action_space.np_random is generator
