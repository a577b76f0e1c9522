"""Environments whose every number is known beforehand, and policies to match."""

from collections.abc import Callable
from itertools import cycle

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from groupwise.data.rollout import RolloutBuffer, TensorSpec
from groupwise.envs.base import VectorEnv
from groupwise.envs.gymnasium import GymnasiumVectorEnv
from groupwise.policies.base import Action, Policy


class ScriptedEnv(gymnasium.Env):
    """Observes 100 * row + 10 * episode + steps taken; the reward is the steps taken; episodes end as scripted
    ("terminated", "truncated" or "both")."""

    observation_space = gymnasium.spaces.Box(0, 1000, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, row, script):
        self.row, self.script, self.episode, self.actions = row, cycle(script), -1, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        self.length, self.end = next(self.script)
        return self.obs(), {}

    def step(self, action):
        self.actions.append(int(action))
        self.count += 1
        over = self.count == self.length
        return self.obs(), float(self.count), over and self.end != "truncated", over and self.end != "terminated", {}

    def obs(self):
        return np.array([100 * self.row + 10 * self.episode + self.count], np.float32)


class WalkEnv(gymnasium.Env):
    """A random start, noise in every step, and an end that depends on both: everything from ``np_random``."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.steps_taken = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.position, self.start = 0, self.np_random.normal(), self.np_random.normal()
        return self.obs(), {}

    def step(self, action):
        self.steps_taken += 1
        self.count += 1
        self.position += self.np_random.normal() + 0.1 * action
        return self.obs(), 1.0, bool(self.count >= 2 and self.position > 1.0), self.count >= 12, {}

    def obs(self):
        return np.array([self.start, self.position], np.float32)


class FakePolicy(Policy):
    """Uniform actions; V(obs) is the first number of the observation, so values can be written out by hand."""

    action_spec = TensorSpec((), torch.int64)

    def __init__(self, actor_only=False, shift=0):
        super().__init__()
        self.actor_only, self.shift, self.value_calls = actor_only, shift, 0
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def act(self, obs, deterministic=False, generator=None):
        rows = obs.shape[0]
        action = torch.randint(0, 2, (rows,), generator=generator)
        return Action(action, torch.full((rows,), -0.75), None if self.actor_only else self.v(obs))

    def value(self, obs):
        self.value_calls += 1
        return self.v(obs)

    def v(self, obs):
        return (obs if isinstance(obs, torch.Tensor) else obs["position"])[:, 0].clone()

    def env_action(self, action):
        return action + self.shift

    def evaluate(self, batch):
        raise NotImplementedError

    def predict(self, obs, deterministic=True):
        raise NotImplementedError


def _scripted(autoreset: str, *scripts: list[tuple[int, str]]) -> VectorEnv:
    makers = [lambda row=row, script=script: ScriptedEnv(row, script) for row, script in enumerate(scripts)]
    env = SyncVectorEnv(makers, copy=False, autoreset_mode=AutoresetMode[autoreset.upper()])
    return GymnasiumVectorEnv(env, env_id="Scripted", max_episode_steps=None)


def _buffer_for(env: VectorEnv, policy: Policy, num_steps: int) -> RolloutBuffer:
    return RolloutBuffer(
        env.num_envs, num_steps, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=not policy.actor_only
    )


@pytest.fixture(scope="session")
def scripted() -> Callable[..., VectorEnv]:
    return _scripted


@pytest.fixture(scope="session")
def buffer_for() -> Callable[..., RolloutBuffer]:
    return _buffer_for


@pytest.fixture(scope="session")
def fake_policy() -> type[FakePolicy]:
    return FakePolicy


@pytest.fixture(scope="session")
def scripted_env() -> type[ScriptedEnv]:
    return ScriptedEnv


@pytest.fixture(scope="session")
def walk_env() -> type[WalkEnv]:
    return WalkEnv
