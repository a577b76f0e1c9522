import itertools

import gymnasium
import numpy as np
import pytest
from gymnasium.wrappers import FlattenObservation, FrameStackObservation, TimeLimit

from groupwise.envs.attempts import Attempt, Captured, StartCache, StartMethod
from groupwise.errors import EnvError

METHODS = [
    StartMethod("seed", "fields"),
    StartMethod("seed", "actions"),
    StartMethod("snapshot", "fields"),
    StartMethod("replay", "actions"),
]


class Walk(gymnasium.Env):
    """A random start and random steps, all from ``np_random``; ends when it gets beyond 3."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float64)
    made = 0

    def __init__(self):
        type(self).made += 1
        self.resets = self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        self.position = self.np_random.normal()
        return np.array([self.position]), {}

    def step(self, action):
        self.steps += 1
        self.position += 0.1 * self.np_random.normal() + float(action[0])
        return np.array([self.position]), 1.0, abs(self.position) > 3, False, {}


class Remembers(Walk):
    """Starts further away after every episode."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position += self.resets
        return np.array([self.position]), {}


class Frail(Walk):
    """Over as soon as it is told to go up."""

    def step(self, action):
        obs, reward, *_ = super().step(action)
        return obs, reward, bool(action[0] > 0), False, {}


def attempts(method, make=Walk, count=2, random_prefix=0):
    starts = StartCache()
    return [Attempt(make, method, random_prefix=random_prefix, starts=starts) for _ in range(count)]


def walk(attempt, obs, actions=(0.5, -0.25, 0.125)):
    """What is observed from ``obs`` on."""
    return [obs.tolist(), *(attempt.step(np.array([action]))[0].tolist() for action in actions)]


@pytest.mark.parametrize("method", METHODS)
def test_equal_starts_and_noise_of_ones_own(method):
    one, other = attempts(method)
    assert walk(one, one.start(7, 1)) == walk(other, other.start(7, 1))
    mine, theirs = walk(one, one.start(8, 1)), walk(other, other.start(8, 2))
    assert mine[0] == theirs[0]
    assert all(a != b for a, b in zip(mine[1:], theirs[1:], strict=True))
    assert mine[0] == Walk().reset(seed=8)[0].tolist() != Walk().reset(seed=7)[0].tolist()


@pytest.mark.parametrize("method", METHODS)
def test_noise_is_the_stream_of_its_seed(method):
    (attempt,) = attempts(method, count=1)
    path = walk(attempt, attempt.start(7, 5), actions=(0.0, 0.0))
    first, second = 0.1 * np.random.default_rng(5).normal(size=2)
    assert path[1][0] - path[0][0] == pytest.approx(first)
    assert path[2][0] - path[1][0] == pytest.approx(second)


@pytest.mark.parametrize("make", [Walk, lambda: TimeLimit(FrameStackObservation(Walk(), 3), 50)])
@pytest.mark.parametrize("method", METHODS)
def test_a_state_half_way_is_the_start_of_others_with_noise_of_their_own(method, make):
    one, other = attempts(method, make)
    obs = one.start(3, 1)
    for action in (0.25, -0.5, 0.125):
        obs, *_ = one.step(np.array([action]))
    snapshot = one.snapshot(obs)
    expected = walk(one, obs)  # goes on under the noise of seed 1, which nobody else has
    walk(other, other.start(9, 9))
    first, second = walk(other, other.restore(snapshot, 4)), walk(one, one.restore(snapshot, 4))
    assert first == second
    assert first[0] == expected[0]
    assert first[1] != expected[1]
    assert walk(other, other.restore(snapshot, 5))[:2] != first[:2]


@pytest.mark.parametrize("method", METHODS)
def test_branches_branch_again(method):
    one, other = attempts(method)
    one.start(3, 1)
    obs, *_ = one.step(np.array([0.5]))
    obs = one.restore(one.snapshot(obs), 2)
    obs, *_ = one.step(np.array([0.25]))
    snapshot = one.snapshot(obs)
    assert walk(other, other.restore(snapshot, 8)) == walk(one, one.restore(snapshot, 8))
    assert other.restore(snapshot, 8).tolist() == obs.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_the_step_limit_goes_on_counting(method):
    one, other = attempts(method, lambda: TimeLimit(Walk(), 4))
    obs = one.start(3, 1)
    for _ in range(3):
        obs, *_ = one.step(np.zeros(1))
    other.restore(one.snapshot(obs), 2)
    assert other.step(np.zeros(1))[3]


def test_a_captured_start_is_reset_once():
    one, other = attempts(StartMethod("snapshot", "fields"))
    other.start(1, 1)  # its own first reset
    before = one.env.resets + other.env.resets
    for noise in range(3):
        one.start(5, noise)
        other.start(5, noise)
    assert one.env.resets + other.env.resets == before + 1


def test_the_cache_forgets_the_oldest_start():
    starts = StartCache()
    for seed in range(65):
        starts.put(seed, Captured(seed, None))
    assert (0 in starts._starts, 1 in starts._starts, len(starts._starts)) == (False, True, 64)


def test_fresh_environments_do_not_remember():
    one, other = attempts(StartMethod("replay", "actions"), Remembers)
    walk(one, one.start(1, 1))
    walk(one, one.start(2, 1))
    assert one.start(5, 1).tolist() == other.start(5, 1).tolist()
    seeded, another = attempts(StartMethod("seed", "actions"), Remembers)
    seeded.start(1, 1)
    assert seeded.start(5, 1).tolist() != another.start(5, 1).tolist()


def test_replay_makes_one_environment_an_attempt():
    Walk.made = 0
    (attempt,) = attempts(StartMethod("replay", "actions"), count=1)
    for seed in range(4):
        attempt.start(seed, 0)
    assert Walk.made == 4


@pytest.mark.parametrize(("method", "extra"), [(METHODS[0], 0), (METHODS[1], 3), (METHODS[2], 0), (METHODS[3], 3)])
def test_replayed_steps_are_counted(method, extra):
    one, other = attempts(method)
    obs = one.start(3, 1)
    for _ in range(3):
        obs, *_ = one.step(np.zeros(1))
    other.restore(one.snapshot(obs), 2)
    other.step(np.zeros(1))
    assert (one.extra_steps, other.extra_steps) == (0, extra)


@pytest.mark.parametrize("method", METHODS)
def test_a_prefix_follows_from_the_start_seed(method):
    one, other = attempts(method, random_prefix=6)
    lengths = set()
    for seed in range(30):
        before = one.extra_steps + other.extra_steps
        assert one.start(seed, 1).tolist() == other.start(seed, 2).tolist()
        steps = one.extra_steps + other.extra_steps - before
        lengths.add(steps if method.tier == "snapshot" else steps / 2)
    assert lengths == set(range(7))  # every length, 0 and the longest included


@pytest.mark.parametrize("method", METHODS)
def test_a_state_after_a_prefix_can_be_captured(method):
    one, other = attempts(method, random_prefix=6)
    obs = one.start(3, 1)
    obs, *_ = one.step(np.array([0.25]))
    assert other.restore(one.snapshot(obs), 1).tolist() == obs.tolist()


def test_a_prefix_stops_before_the_episode_ends():
    (attempt,) = attempts(StartMethod("seed", "none"), Frail, count=1, random_prefix=8)
    for seed in range(20):
        attempt.start(seed, 1)
        taken = attempt.extra_steps
        *_, terminated, _, _ = attempt.step(np.array([-1.0]))
        assert not terminated
        first, again = attempt.start(seed, 1), attempt.start(seed, 1)
        assert first.tolist() == again.tolist()
        assert attempt.extra_steps > taken or taken == 0
        attempt.extra_steps = 0


def test_a_replay_that_ends_early_is_refused():
    class Fickle(Walk):
        made = 0
        number = itertools.count()

        def __init__(self):
            super().__init__()
            self.limit = 9 - 8 * min(1, next(self.number))

        def step(self, action):
            obs, reward, *_ = super().step(action)
            return obs, reward, self.steps >= self.limit, False, {}

    (attempt,) = attempts(StartMethod("replay", "actions"), Fickle, count=1)
    obs = attempt.start(0, 0)
    for _ in range(2):
        obs, *_ = attempt.step(np.zeros(1))
    with pytest.raises(EnvError, match=r"led Fickle to a captured state end the episode earlier.*fix"):
        attempt.restore(attempt.snapshot(obs), 1)


def test_an_adapter_that_does_not_exist_is_named():
    with pytest.raises(EnvError, match=r"no adapter captures the states of Walk; fix: .*clone_state"):
        attempts(StartMethod("snapshot", "adapter"))


def test_recorded_actions_are_copies():
    (attempt,) = attempts(StartMethod("seed", "actions"), lambda: FlattenObservation(Walk()), count=1)
    obs = attempt.start(0, 0)
    action = np.array([0.5])
    obs, *_ = attempt.step(action)
    action[:] = -0.5
    assert attempt.restore(attempt.snapshot(obs), 1).tolist() == obs.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_what_was_observed_at_a_captured_state_is_kept_from_an_environment_that_writes_into_it(method):
    class Reuser(Walk):
        def __init__(self):
            super().__init__()
            self.shown = np.zeros(1)

        def reset(self, *, seed=None, options=None):
            self.shown[:], info = super().reset(seed=seed)
            return self.shown, info

        def step(self, action):
            self.shown[:], *rest = super().step(action)
            return self.shown, *rest

    one, other = attempts(method, Reuser)
    first = one.start(3, 1).copy()
    obs, *_ = one.step(np.array([0.5]))
    seen, snapshot = obs.copy(), one.snapshot(obs)
    one.step(np.array([0.25]))
    assert other.restore(snapshot, 1).tolist() == seen.tolist()
    assert other.start(3, 1).tolist() == first.tolist()
