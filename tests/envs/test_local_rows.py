"""What rows say about environments that break their own word."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from groupwise.config.env import EnvCfg
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
