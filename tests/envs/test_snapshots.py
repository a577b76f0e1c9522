import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import ale_py
import gymnasium
import minigrid
import numpy as np
import pytest
from gymnasium.wrappers import (
    ClipAction,
    FrameStackObservation,
    NormalizeObservation,
    NormalizeReward,
    RecordEpisodeStatistics,
    TimeLimit,
)

from groupwise.envs.atari import reseed_ale
from groupwise.envs.snapshots import capture, capture_start, is_copied_exactly, reseed_noise, restore
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


def pendulum() -> gymnasium.Env:
    env = RecordEpisodeStatistics(gymnasium.make("Pendulum-v1", max_episode_steps=25))
    return NormalizeReward(NormalizeObservation(ClipAction(env)))


def made(id: str) -> Callable[[], gymnasium.Env]:
    return lambda: gymnasium.make(id, max_episode_steps=25)


Make = Callable[[], gymnasium.Env]
Trace = list[tuple[Any, ...]]


def play(env: gymnasium.Env, actions: list[Any]) -> Trace:
    """Everything that the environment says up to the end of the episode."""
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
    ("make", "exact", "plain"),
    [
        *((made(id), True, True) for id in ("InvertedPendulum-v5", "Hopper-v5", "Humanoid-v5")),
        (Walk, True, True),
        (lambda: FrameStackObservation(TimeLimit(Walk(), 25), 3), True, True),
        *((made(id), False, True) for id in ("CartPole-v1", "Acrobot-v1", "Blackjack-v1")),
        *((made(id), False, False) for id in ("FrozenLake-v1", "MiniGrid-DoorKey-5x5-v0")),
        (pendulum, False, False),
    ],
)
def test_what_follows_a_restore_is_what_followed_the_capture(make: Make, exact: bool, plain: bool) -> None:
    env, other = under_way(make, seed=3, steps=7), under_way(make, seed=4, steps=11)
    actions = random_actions(env, 30, seed=5)
    start, data = capture_start(env), capture(env)
    assert (is_copied_exactly(env), data is not None) == (exact, plain)
    expected = play(env, actions)
    for target, state in [(env, start), (other, start), (other, start), (env, data), (other, data)]:
        if state is not None:
            restore(target, state)
            assert play(target, actions) == expected
    assert expected[-1][2] or expected[-1][3] or len(expected) == 30


@pytest.mark.parametrize("make", [made("CliffWalkingSlippery-v1"), made("ALE/Breakout-v5"), Walk])
def test_noise_follows_from_its_seed_alone(make: Make) -> None:
    env, other = under_way(make, seed=3, steps=7), under_way(make, seed=4, steps=11)
    actions = random_actions(env, 25, seed=5)

    def episode(target: gymnasium.Env, noise_seed: int) -> Trace:
        target.reset(seed=6)
        reseed_noise(target, noise_seed)
        return play(target, actions)

    here = [episode(env, noise_seed) for noise_seed in (1, 2, 3, 2**31 - 1)]
    there = [episode(other, noise_seed) for noise_seed in (1, 2, 3, 2**31 - 1)]
    assert here == there
    assert len(set(map(tuple, here))) == 4


@pytest.mark.parametrize(
    "generator",
    [
        np.random.default_rng,
        np.random.RandomState,
        random.Random,
        lambda seed: np.random.Generator(np.random.MT19937(seed)),
    ],
)
def test_generators_of_the_environments_own_are_noise_too(generator) -> None:
    class Private(gymnasium.Env):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.rng = generator(seed)
            self.same = self.rng
            return 0, {}

    env, twin = Private(), Private()
    env.reset(seed=7)
    twin.reset(seed=7)
    assert env.rng.random() == twin.rng.random()
    reseed_noise(env, 1)
    reseed_noise(twin, 2)
    assert env.same is env.rng
    assert env.rng.random() != twin.rng.random()
    reseed_noise(env, 1)
    reseed_noise(twin, 1)
    assert [env.rng.random() for _ in range(3)] == [twin.rng.random() for _ in range(3)]


def test_sticky_actions_are_those_of_a_game_loaded_with_the_seed() -> None:
    reseeded, loaded = (gymnasium.make("ALE/Breakout-v5", repeat_action_probability=0.25).unwrapped for _ in range(2))
    for env in (reseeded, loaded):
        env.reset(seed=0)
    reseed_noise(reseeded, 12345)
    loaded.ale.setInt("random_seed", 12345)
    loaded.load_game()
    generators = [env.ale.cloneState(include_rng=True).serialize()[-6000:] for env in (reseeded, loaded)]
    assert generators[0] == generators[1]
    with pytest.raises(EnvError, match=r"state of 100 bytes is not laid out as in ale-py 0\.12; fix"):
        reseed_ale(
            Mock(**{"getFloat.return_value": 0.25, "cloneState.return_value.serialize.return_value": bytes(100)}), 1
        )


class Uncopied(Walk):
    def clone_state(self):
        return {"draws": (number for number in range(3))}


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: gymnasium.make("LunarLander-v3"), r"LunarLander.world \(b2World\)"),
        (lambda: gymnasium.make("ALE/Breakout-v5"), r"AtariEnv.ale \(ALEInterface\)"),
        (Uncopied, r"the state of Uncopied\.clone_state\(\)"),
    ],
)
def test_what_cannot_be_copied_is_named(make: Make, named: str) -> None:
    pytest.importorskip("Box2D")  # which also lets its warnings pass
    env = under_way(make, seed=0, steps=3)
    assert is_copied_exactly(env) == (make is Uncopied)
    assert capture(env) is None
    with pytest.raises(EnvError, match=rf"{named} cannot be copied: .*; fix: .*clone_state"):
        capture_start(env)


class Notes(gymnasium.Wrapper):
    """Keeps what it sees in attributes that come and go, and knows the environment under all layers."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.base = env.unwrapped
        self.known = {"envs": [env.unwrapped, self]}
        self.seen: list[Any] = []


@pytest.mark.parametrize("captured", [capture, capture_start])
def test_attributes_come_back_as_they_were_and_refer_to_their_own_environment(captured) -> None:
    env, other = Notes(gymnasium.make("CartPole-v1")), Notes(gymnasium.make("CartPole-v1"))
    for target in (env, other):
        target.reset(seed=0)
    env.seen.append("start")
    state = captured(env)
    env.seen.append("later")
    other.later = 3
    restore(other, state)
    assert other.seen == ["start"]
    assert "later" not in vars(other)
    assert other.base is other.known["envs"][0] is other.unwrapped
    assert other.known["envs"][1] is other
    other.seen.append("elsewhere")
    restore(env, state)
    assert env.seen == ["start"]


def test_a_viewer_stays_where_it_is() -> None:
    drawn, plain = (gymnasium.make("CartPole-v1", render_mode="rgb_array") for _ in range(2))
    for env in (drawn, plain):
        env.reset(seed=0)
    before = capture_start(plain)
    drawn.render()
    screen = drawn.unwrapped.screen
    restore(plain, capture_start(drawn))
    assert plain.unwrapped.screen is None
    restore(drawn, before)
    assert drawn.unwrapped.screen is screen


def test_simulators_are_imported_only_for_their_own_environments() -> None:
    code = (
        "import sys, gymnasium, groupwise.envs.snapshots as snapshots; env = gymnasium.make('CartPole-v1');"
        "env.reset(); assert not snapshots.is_copied_exactly(env); snapshots.reseed_noise(env, 1);"
        "assert not {'mujoco', 'ale_py', 'pygame'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
