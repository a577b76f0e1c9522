import pickle
from collections.abc import Callable
from typing import Any

import ale_py
import gymnasium
import minigrid
import numpy as np
import pytest
from gymnasium.wrappers import (
    AtariPreprocessing,
    ClipAction,
    FrameStackObservation,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    TimeLimit,
)

from groupwise.envs.snapshots import adapter_for, field_copy, reseed_noise
from groupwise.errors import EnvError

gymnasium.register_envs(ale_py)
gymnasium.register_envs(minigrid)


class Walk(gymnasium.Env):
    """A random walk of 40 steps that captures itself, without its random numbers, and without copying."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = np.append(self.np_random.normal(), 0.0)
        return self.state.copy(), {}

    def step(self, action):
        self.state += [self.np_random.normal() + float(action[0]), 1.0]
        return self.state.copy(), float(self.state[0]), False, bool(self.state[1] >= 40), {}

    def clone_state(self):
        return self.state

    def restore_state(self, state):
        self.state = state


def preprocessed(id: str) -> gymnasium.Env:
    return FrameStackObservation(AtariPreprocessing(gymnasium.make(id, frameskip=1), noop_max=5), 4)


def pendulum() -> gymnasium.Env:
    env = RecordEpisodeStatistics(gymnasium.make("Pendulum-v1", max_episode_steps=25))
    return NormalizeReward(NormalizeObservation(ClipAction(env)))


def made(id: str, **kwargs: Any) -> Any:
    return pytest.param(lambda: gymnasium.make(id, max_episode_steps=25, **kwargs), id=id)


CLASSIC = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"]
TOY = ["FrozenLake-v1", "CliffWalkingSlippery-v1", "Blackjack-v1", "Taxi-v4"]
GRID = ["MiniGrid-Empty-Random-6x6-v0", "MiniGrid-DoorKey-5x5-v0", "MiniGrid-Dynamic-Obstacles-5x5-v0"]
BY_FIELDS = [*map(made, CLASSIC + TOY + GRID), pytest.param(pendulum, id="wrapped Pendulum-v1")]
MUJOCO = [made(id) for id in ("InvertedPendulum-v5", "Hopper-v5", "Ant-v5", "Humanoid-v5")]
ALE = [
    made("ALE/Breakout-v5"),
    made("ALE/Seaquest-v5", obs_type="ram", frameskip=(2, 5)),
    pytest.param(lambda: preprocessed("ALE/Pong-v5"), id="preprocessed ALE/Pong-v5"),
]
OWN = [
    pytest.param(Walk, id="Walk"),
    pytest.param(lambda: FrameStackObservation(TimeLimit(Walk(), 25), 3), id="wrapped Walk"),
]

Make = Callable[[], gymnasium.Env]
Trace = list[tuple[Any, ...]]


def play(env: gymnasium.Env, actions: list[Any]) -> Trace:
    """What the environment says, up to the end of the episode."""
    trace: Trace = []
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(action)
        trace.append((pickle.dumps(obs), reward, terminated, truncated))
        if terminated or truncated:
            break
    return trace


def random_actions(env: gymnasium.Env, count: int, seed: int) -> list[Any]:
    env.action_space.seed(seed)
    return [env.action_space.sample() for _ in range(count)]


def under_way(make: Make, seed: int, steps: int) -> gymnasium.Env:
    """An environment a few steps into an episode."""
    env = make()
    env.reset(seed=seed)
    if len(play(env, random_actions(env, steps, seed))) < steps:
        env.reset()
    return env


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *[pytest.param(*case.values, "mujoco", id=case.id) for case in MUJOCO],
        *[pytest.param(*case.values, "ale", id=case.id) for case in ALE],
        *[pytest.param(*case.values, "own", id=case.id) for case in OWN],
        *[pytest.param(*case.values, "fields", id=case.id) for case in BY_FIELDS],
    ],
)
def test_what_follows_a_restore_is_what_followed_the_capture(make: Make, name: str) -> None:
    env, other = under_way(make, seed=3, steps=7), under_way(make, seed=4, steps=11)
    adapter = adapter_for(env) or field_copy()
    assert adapter.name == name
    actions = random_actions(env, 30, seed=5)
    snapshot = adapter.capture(env)
    expected = play(env, actions)
    sent = pickle.loads(pickle.dumps(snapshot))
    for target, state in [(env, snapshot), (other, snapshot), (env, sent), (other, sent), (other, snapshot)]:
        adapter.restore(target, state)
        assert play(target, actions) == expected
    assert expected[-1][2] or expected[-1][3] or len(expected) == 30
