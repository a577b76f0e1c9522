import gymnasium
import numpy as np
import pytest

from groupwise.envs.local_rows import Captured, EnvRow, StartCache, StartMethod
from groupwise.errors import EnvError

METHODS = [StartMethod("seed"), StartMethod("snapshot", "fields"), StartMethod("fresh")]


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


def episodes(method, make=Walk, count=2, num_random_noops=0):
    starts = StartCache()
    return [EnvRow(make, method, num_random_noops=num_random_noops, starts=starts) for _ in range(count)]


def walk(episode, obs, actions=(0.5, -0.25, 0.125)):
    """What is observed from ``obs`` on."""
    return [obs.tolist(), *(episode.step(np.array([action]))[0].tolist() for action in actions)]


@pytest.mark.parametrize("method", METHODS)
def test_equal_starts_and_noise_of_ones_own(method):
    one, other = episodes(method)
    assert walk(one, one.start(7, 1)) == walk(other, other.start(7, 1))
    mine, theirs = walk(one, one.start(8, 1)), walk(other, other.start(8, 2))
    assert mine[0] == theirs[0]
    assert all(a != b for a, b in zip(mine[1:], theirs[1:], strict=True))
    assert mine[0] == Walk().reset(seed=8)[0].tolist() != Walk().reset(seed=7)[0].tolist()


@pytest.mark.parametrize("method", METHODS)
def test_noise_is_the_stream_of_its_seed(method):
    (episode,) = episodes(method, count=1)
    path = walk(episode, episode.start(7, 5), actions=(0.0, 0.0))
    first, second = 0.1 * np.random.default_rng(5).normal(size=2)
    assert path[1][0] - path[0][0] == pytest.approx(first)
    assert path[2][0] - path[1][0] == pytest.approx(second)


def test_a_captured_start_is_reset_once():
    one, other = episodes(StartMethod("snapshot", "fields"))
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
    one, other = episodes(StartMethod("fresh"), Remembers)
    walk(one, one.start(1, 1))
    walk(one, one.start(2, 1))
    assert one.start(5, 1).tolist() == other.start(5, 1).tolist()
    seeded, another = episodes(StartMethod("seed"), Remembers)
    seeded.start(1, 1)
    assert seeded.start(5, 1).tolist() != another.start(5, 1).tolist()


def test_replay_makes_one_environment_an_episode():
    Walk.made = 0
    (episode,) = episodes(StartMethod("fresh"), count=1)
    for seed in range(4):
        episode.start(seed, 0)
    assert Walk.made == 4


@pytest.mark.parametrize("method", METHODS)
def test_a_prefix_follows_from_the_start_seed(method):
    one, other = episodes(method, num_random_noops=6)
    lengths = set()
    for seed in range(30):
        before = one.extra_steps + other.extra_steps
        assert one.start(seed, 1).tolist() == other.start(seed, 2).tolist()
        steps = one.extra_steps + other.extra_steps - before
        lengths.add(steps if method.mode == "snapshot" else steps / 2)
    assert lengths == set(range(7))  # every length, 0 and the longest included


def test_a_prefix_stops_before_the_episode_ends():
    (episode,) = episodes(StartMethod("seed"), Frail, count=1, num_random_noops=8)
    for seed in range(20):
        episode.start(seed, 1)
        taken = episode.extra_steps
        *_, terminated, _, _ = episode.step(np.array([-1.0]))
        assert not terminated
        first, again = episode.start(seed, 1), episode.start(seed, 1)
        assert first.tolist() == again.tolist()
        assert episode.extra_steps > taken or taken == 0
        episode.extra_steps = 0


def test_an_adapter_that_does_not_exist_is_named():
    with pytest.raises(EnvError, match=r"no adapter captures the states of Walk; fix: .*clone_state"):
        episodes(StartMethod("snapshot", "adapter"))


@pytest.mark.parametrize("method", METHODS)
def test_what_was_observed_at_a_start_is_kept_from_an_environment_that_writes_into_it(method):
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

    one, other = episodes(method, Reuser)
    first = one.start(3, 1).copy()
    one.step(np.array([0.5]))
    assert other.start(3, 1).tolist() == first.tolist()
