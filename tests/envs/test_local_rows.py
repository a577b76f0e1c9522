"""What rows say about environments that break their own word."""

from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from groupwise.config.run import EnvCfg
from groupwise.envs.base import GroupEnv
from groupwise.envs.make import make_env
from groupwise.errors import DataError


class Misshapen(gymnasium.Env[Any, Any]):
    """Says three numbers, and gives four from one of its methods."""

    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, where: str) -> None:
        self.where = where

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(4 if self.where == "reset" else 3, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(4 if self.where == "step" else 3, np.float32), 0.0, False, False, {}


def play(env: GroupEnv) -> None:
    env.start(np.ones(2, np.bool_), np.arange(2), np.arange(2))
    env.step(torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("where", ["reset", "step"])
def test_a_wrong_observation_names_the_environment_and_the_method(where: str):
    env = make_env(EnvCfg(num_envs=2), grouped=True, env=lambda: Misshapen(where), verify=False)
    with pytest.raises(DataError, match=rf"^{where}\(\) of Misshapen returned what .*has shape \[4\], expected \[3\]"):
        play(env)
    env.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (np.zeros(4, np.float32), r"has shape \[4\], expected \[3\]"),
        (np.array(["a", "b", "c"]), "has dtype <U1, expected numbers"),
    ],
)
@pytest.mark.parametrize("where", ["reset", "step"])
def test_so_does_one_that_gymnasium_cannot_store(where: str, wrong: Any, message: str):
    class Wrong(Misshapen):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return wrong if self.where == "reset" else np.zeros(3, np.float32), {}

        def step(self, action: Any) -> Any:
            return wrong, 0.0, False, False, {}

    env = make_env(EnvCfg(num_envs=2), env=lambda: Wrong(where))
    if where == "step":
        env.reset(seed=0)
    act = partial(env.reset, seed=0) if where == "reset" else partial(env.step, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(DataError, match=rf"^{where}\(\) of Wrong returned what .*{message}"):
        act()


class Pair(gymnasium.Env[Any, Any]):
    """Gives an array where its space has a tuple, as Gymnasium's own vector environments accept."""

    observation_space = gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(3), gymnasium.spaces.Discrete(3)))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.array([1, 2]), {}

    def step(self, action: Any) -> Any:
        return np.array([2, 1]), 0.0, False, False, {}


def test_an_array_serves_as_a_tuple():
    env = make_env(EnvCfg(num_envs=2), grouped=True, env=Pair, verify=False)
    obs = env.start(np.ones(2, np.bool_), np.arange(2), np.arange(2))
    assert obs["0"].tolist() == [1, 1]
    assert obs["1"].tolist() == [2, 2]
    env.close()


class Steps(Misshapen):
    """Its step returns, or raises, what it is given."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return np.zeros(3, np.float32), *self.result


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (
            (np.ones(1), False, False, {}),
            DataError,
            r"step\(\) of Steps returned .* a number as reward .*float\(reward\)",
        ),
        ((1.0, False, {}), DataError, r"step\(\) of Steps returned .*not enough values"),
        (ValueError("of the simulator"), ValueError, "^of the simulator"),
    ],
)
def test_a_step_that_returns_something_else_is_named_and_its_own_errors_stay(
    grouped: bool, result: Any, error: type[Exception], message: str
):
    env = make_env(EnvCfg(num_envs=2), grouped=grouped, env=lambda: Steps(result), verify=False)
    env.reset(seed=0)
    with pytest.raises(error, match=message):
        env.step(torch.zeros(2, dtype=torch.int64))
    env.close()
