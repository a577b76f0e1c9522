"""Errors of rows whose environments break their own word."""

import re

import gymnasium
import numpy as np
import pytest
import torch

from groupwise.check import check_env
from groupwise.config.run import EnvCfg
from groupwise.envs.make import make_env
from groupwise.errors import DataError

FINE = np.zeros(3, np.float32)


class Told(gymnasium.Env):
    """Says that it shows three numbers; shows and returns, or raises, what it is told."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, at_reset=FINE, at_step=FINE, outcome=(0.0, False, False, {})):
        self.at_reset, self.at_step, self.outcome = at_reset, at_step, outcome

    def reset(self, *, seed=None, options=None):
        return self.at_reset, {}

    def step(self, action):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.at_step, *self.outcome


class Named(Told):
    observation_space = gymnasium.spaces.Dict({"at": Told.observation_space, "left": gymnasium.spaces.Discrete(6)})


class Pair(Told):
    """Gives an array where its space has a tuple, as Gymnasium's own vector environments accept."""

    observation_space = gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(3), gymnasium.spaces.Discrete(3)))


def play(make, grouped=True):
    env = make_env(EnvCfg(num_envs=2), grouped=grouped, env=make, verify=False)
    obs = env.reset(seed=0)
    env.step(torch.zeros(2, dtype=torch.int64))
    return obs


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    ("env", "wrong", "message"),
    [
        (Told, np.zeros(4, np.float32), r"has shape \[4\], expected \[3\]"),
        (Told, np.array(["a", "b", "c"]), "has dtype <U1, expected numbers"),
        (Told, np.ma.masked_array(np.zeros(3), [True, False, False]), r"is a masked array, .*; fix: obs.filled"),
        (Named, FINE, "at"),
        (Named, {"at": FINE}, "left"),
        (Named, {"at": "here", "left": 3}, "at"),
    ],
)
def test_a_wrong_observation_names_the_environment_and_the_method(env, wrong, message, where):
    fine = {"at": FINE, "left": 3} if env is Named else FINE
    with pytest.raises(DataError, match=rf"^{where}\(\) of {env.__name__} returned what .*{message}"):
        play(lambda: env(wrong if where == "reset" else fine, wrong))


def test_an_array_serves_as_a_tuple():
    obs = play(lambda: Pair(np.array([1, 2]), np.array([1, 2])))
    assert (obs["0"].tolist(), obs["1"].tolist()) == ([1, 1], [2, 2])


@pytest.mark.parametrize("method", ["reset", "step"])
@pytest.mark.parametrize("wrapper", [gymnasium.Wrapper, gymnasium.wrappers.NormalizeObservation])
def test_a_wrapper_that_cannot_take_apart_what_is_returned_does_not_hide_it(method, wrapper):
    """A registered environment has wrappers, too. Errors of the environment itself stay."""
    old = type("Old", (Told,), {"reset": lambda self, **_: FINE} if method == "reset" else {})
    with pytest.raises(
        DataError, match=rf"{method}\(\) of Old.* values to unpack|of Old returned array.* expected \(obs"
    ):
        play(lambda: wrapper(old(outcome=(1.0, False, {}))))
    with pytest.raises(ValueError, match=r"^of the simulator"):
        play(lambda: wrapper(Told(outcome=ValueError("of the simulator"))))


class WithoutSeed(Told):
    def reset(self):
        return FINE, {}


def test_a_reset_as_before_gymnasium_is_named():
    takes = r"reset\(\) of WithoutSeed does not take a seed .*"
    with pytest.raises(DataError, match=rf"{takes}fix: def reset\(self, \*, seed=None, options=None\)"):
        play(WithoutSeed)
    finding = check_env(WithoutSeed).success
    assert re.search(takes, finding.reason)
    assert finding.fix == "def reset(self, *, seed=None, options=None)"


class Pixels(Told):
    observation_space = gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)


class Place(Told):
    observation_space = gymnasium.spaces.Discrete(5)


class Switches(Told):
    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.bool_)


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    ("env", "fine", "wrong", "message"),
    [
        (Pixels, np.full((8, 8, 3), 255), np.full((8, 8, 3), 0.5), r"dtype float64, expected uint8 for Box\(0, 255"),
        (Pixels, np.full((8, 8, 3), 0), np.full((8, 8, 3), 300), "holds 300, expected 0 to 255"),
        (Pixels, np.full((8, 8, 3), 7, np.uint8), np.full((8, 8, 3), -1), "holds -1, expected 0 to 255"),
        (Place, np.uint8(4), 2.7, "dtype float64, expected int64"),
        (Place, 4, 5, "holds 5, expected 0 to 4"),
        (Switches, np.array([True, False]), np.array([0.4, 0.0]), "dtype float64, expected bool"),
        (Told, np.array([1, 0, 1]), FINE + 1j, "has dtype complex"),
    ],
)
def test_numbers_are_not_changed_to_fit_the_space(env, fine, wrong, message, grouped, where):
    np.testing.assert_array_equal(play(lambda: env(fine, fine), grouped)[0].numpy(), fine)
    with pytest.raises(DataError, match=rf"^{where}\(\) of {env.__name__} returned what .*{message}"):
        play(lambda: env(wrong if where == "reset" else fine, wrong), grouped)
