import math
import pickle
import random
import subprocess
import sys
import types
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

from groupwise.envs.snapshots import SnapshotAdapter, adapter_for, reseed_noise, shared_objects
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
    ("make", "name"),
    [
        *[pytest.param(*case.values, "_Mujoco", id=case.id) for case in MUJOCO],
        *[pytest.param(*case.values, "_Ale", id=case.id) for case in ALE],
        *[pytest.param(*case.values, "_Own", id=case.id) for case in OWN],
        *[pytest.param(*case.values, "SnapshotAdapter", id=case.id) for case in BY_FIELDS],
    ],
)
def test_what_follows_a_restore_is_what_followed_the_capture(make: Make, name: str) -> None:
    env, other = under_way(make, seed=3, steps=7), under_way(make, seed=4, steps=11)
    adapter = adapter_for(env) or SnapshotAdapter()
    assert type(adapter).__name__ == name
    actions = random_actions(env, 30, seed=5)
    snapshot = adapter.capture(env)
    expected = play(env, actions)
    sent = pickle.loads(pickle.dumps(snapshot))
    for target, state in [(env, snapshot), (other, snapshot), (env, sent), (other, sent), (other, snapshot)]:
        adapter.restore(target, state)
        assert play(target, actions) == expected
    assert expected[-1][2] or expected[-1][3] or len(expected) == 30


def breakout(stickiness: float) -> gymnasium.Env:
    env = gymnasium.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=stickiness)
    env.reset(seed=0)
    return env


@pytest.mark.parametrize("make", [ALE[0], ALE[2], made("CliffWalkingSlippery-v1"), OWN[0]])
def test_noise_follows_from_its_seed_alone(make: Make) -> None:
    env, other = under_way(make, seed=3, steps=7), under_way(make, seed=4, steps=11)
    adapter = adapter_for(env) or SnapshotAdapter()
    snapshot, actions = adapter.capture(env), random_actions(env, 25, seed=5)

    def episode(target: gymnasium.Env, noise_seed: int) -> Trace:
        adapter.restore(target, snapshot)
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


def test_noise_of_another_object_and_of_a_space_follows_from_the_seed() -> None:
    class Sampling(gymnasium.Env):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.wind = types.SimpleNamespace(rng=np.random.default_rng(seed))
            self.gusts = gymnasium.spaces.Discrete(1_000)
            self.gusts.seed(seed)
            self.unused = gymnasium.spaces.Discrete(2)
            return 0, {}

        def draws(self):
            return self.wind.rng.random(), self.gusts.sample()

    env, twin = Sampling(), Sampling()
    for one in (env, twin):
        one.reset(seed=7)
    first = env.draws()
    assert twin.draws() == first
    reseed_noise(env, 1)
    reseed_noise(twin, 2)
    assert all(here != there for here, there in zip(env.draws(), twin.draws(), strict=True))
    reseed_noise(env, 1)
    reseed_noise(twin, 1)
    assert env.draws() == twin.draws()
    assert env.unused._np_random is None  # one that was never used costs nothing


def test_a_part_that_refers_to_np_random_has_its_noise_too() -> None:
    class Windy(gymnasium.Env):
        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.gusts = iter(self.np_random.random, None)
            return 0, {}

    env, twin = Windy(), Windy()
    for one in (env, twin):
        one.reset(seed=7)
    assert next(env.gusts) == next(twin.gusts)
    reseed_noise(env, 1)
    reseed_noise(twin, 2)
    assert next(env.gusts) != next(twin.gusts)
    reseed_noise(env, 1)
    assert next(env.gusts) == np.random.default_rng(1).random()


def test_sticky_actions_are_those_of_a_game_loaded_with_the_seed() -> None:
    reseeded, loaded = breakout(0.25).unwrapped, breakout(0.25).unwrapped
    reseed_noise(reseeded, 12345)
    loaded.ale.setInt("random_seed", 12345)
    loaded.load_game()
    generators = [env.ale.cloneState(include_rng=True).serialize()[-6000:] for env in (reseeded, loaded)]
    assert generators[0] == generators[1]


@pytest.mark.parametrize("id", ["LunarLander-v3", "BipedalWalker-v3"])
def test_box2d_is_refused_with_the_attribute_that_cannot_be_copied(id: str) -> None:
    pytest.importorskip("Box2D")  # which also lets its warnings pass
    env = under_way(lambda: gymnasium.make(id), seed=0, steps=3)
    assert adapter_for(env) is None
    with pytest.raises(EnvError, match=r"world \(b2World\) cannot be copied: .*; fix: .*clone_state"):
        SnapshotAdapter().capture(env)


class Holds(Walk):
    """Not the owner of all its state: another environment has some."""

    clone_state = restore_state = None

    def __init__(self, inner: object) -> None:
        self.inner = inner


@pytest.mark.parametrize("inner", [Walk(), [gymnasium.make("CartPole-v1")]], ids=["environment", "nested"])
def test_an_environment_inside_an_attribute_is_refused(inner: object) -> None:
    """It would pickle as its constructor's arguments, so its state would be lost in silence."""
    with pytest.raises(EnvError, match=r"Holds\.inner .* pickles without its state; fix"):
        SnapshotAdapter().capture(Holds(inner))


class Unpicklable(Walk):
    def clone_state(self):
        return {"draw": lambda: self.state}


def test_a_state_that_cannot_be_pickled_is_refused() -> None:
    env = under_way(Unpicklable, seed=0, steps=2)
    adapter = adapter_for(env)
    assert adapter is not None
    with pytest.raises(
        EnvError, match=r"Unpicklable\.clone_state\(\) returned cannot be pickled: .*; fix: return plain"
    ):
        adapter.capture(env)


class Notes(gymnasium.Wrapper):
    """Keeps what it sees in attributes that come and go, and knows the environment under all layers."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self.base = env.unwrapped
        self.known = {"envs": [env.unwrapped, self]}
        self.seen: list[Any] = []
        self.also_seen = self.seen


def test_attributes_come_back_as_they_were_and_refer_to_their_own_environment() -> None:
    env, other = Notes(gymnasium.make("CartPole-v1")), Notes(gymnasium.make("CartPole-v1"))
    for target in (env, other):
        target.reset(seed=0)
    env.seen.append("start")
    snapshot = SnapshotAdapter().capture(env)
    env.seen.append("later")
    other.later = 3
    SnapshotAdapter().restore(other, snapshot)
    assert other.seen == ["start"]
    assert other.also_seen is other.seen
    assert "later" not in vars(other)
    assert other.base is other.unwrapped
    assert other.known["envs"][0] is other.unwrapped
    assert other.known["envs"][1] is other
    other.seen.append("elsewhere")
    SnapshotAdapter().restore(env, snapshot)
    assert env.seen == ["start"]


class Phases(gymnasium.Wrapper):
    """Changes its rule and its kind in an episode."""

    def first(self, reward: float) -> float:
        return reward

    def second(self, reward: float) -> float:
        return -reward

    def reset(self, **options: Any) -> Any:
        self.rule, self.kind, self.local, self.scale = self.first, int, lambda: self, math.floor
        return self.env.reset(**options)


def test_a_method_that_changes_in_an_episode_is_state_and_one_of_the_restored_environment() -> None:
    env, other = Phases(gymnasium.make("CartPole-v1")), Phases(gymnasium.make("CartPole-v1"))
    for target in (env, other):
        target.reset(seed=0)
    snapshot = SnapshotAdapter().capture(env)
    for target in (env, other):
        target.rule, target.kind = target.second, float
        SnapshotAdapter().restore(target, snapshot)
        assert target.rule == target.first
        assert target.kind is int
        assert target.local() is target  # a function without a name of its own stays
        assert target.scale is math.floor


def test_what_environments_share_is_the_state_of_none() -> None:
    course, constant, generator = {"level": 0}, np.zeros(3), np.random.default_rng(0)
    given = {"course": course, "parts": [constant], "rng": generator, "name": "same", "size": 1_000}
    envs = [gymnasium.make("CartPole-v1") for _ in range(2)]
    for env in envs:
        vars(env.unwrapped).update(given | {"parts": [constant], "own": []})
        env.reset(seed=0)
    adapter = SnapshotAdapter()
    adapter.shared = shared_objects(envs)
    assert {id(course), id(constant)} <= set(adapter.shared)
    assert not {id(generator), id(given["name"])} & set(adapter.shared)
    snapshot = adapter.capture(envs[0])
    course["level"] = 3
    adapter.restore(envs[1], snapshot)
    assert envs[1].unwrapped.course is course
    assert envs[1].unwrapped.parts[0] is constant
    assert envs[1].unwrapped.parts is not envs[0].unwrapped.parts


def test_a_viewer_stays_where_it_is() -> None:
    drawn, plain = (gymnasium.make("CartPole-v1", render_mode="rgb_array") for _ in range(2))
    for env in (drawn, plain):
        env.reset(seed=0)
    before = SnapshotAdapter().capture(plain)
    drawn.render()
    screen = drawn.unwrapped.screen
    SnapshotAdapter().restore(plain, SnapshotAdapter().capture(drawn))
    assert plain.unwrapped.screen is None
    SnapshotAdapter().restore(drawn, before)
    assert drawn.unwrapped.screen is screen


def test_simulators_are_imported_only_for_their_own_environments() -> None:
    code = (
        "import sys, gymnasium, groupwise.envs.snapshots as snapshots; env = gymnasium.make('CartPole-v1');"
        "env.reset(); assert snapshots.adapter_for(env) is None; snapshots.reseed_noise(env, 1);"
        "assert not {'mujoco', 'ale_py', 'pygame'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
