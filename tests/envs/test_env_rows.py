import gymnasium
import numpy as np
import pytest

from groupwise.envs.gymnasium import RandomNoops
from groupwise.envs.rows import LocalRows, RowCfg, layout_of

METHODS = ["seed", "snapshot", "fresh"]


class Walk(gymnasium.Env):
    """A random start and random steps, all from ``np_random``; ends when it gets beyond 3."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float64)
    made = 0

    def __init__(self):
        type(self).made += 1
        self.resets = self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        self.position = self.np_random.normal()
        return np.array([self.position], np.float32), {}

    def step(self, action):
        self.steps += 1
        self.position += 0.1 * self.np_random.normal() + float(action[0])
        return np.array([self.position], np.float32), 1.0, abs(self.position) > 3, False, {}


class Remembers(Walk):
    """Starts further away after every episode."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position += self.resets
        return np.array([self.position], np.float32), {}


class Frail(Walk):
    """Ends at the first step up."""

    def reset(self, *, seed=None, options=None):
        self.is_over = False
        return super().reset(seed=seed)

    def step(self, action):
        obs, reward, *_ = super().step(action)
        self.is_over = bool(action[0] > 0)
        return obs, reward, self.is_over, False, {}


class Episode:
    """One of several rows."""

    def __init__(self, rows, arrays, number):
        self.rows, self.arrays, self.number = rows, arrays, number

    @property
    def env(self):
        return self.rows.envs[self.number]

    def start(self, seed, noise):
        self.rows.start(*(np.array([number]) for number in (self.number, seed, noise)))
        return self.arrays["obs"][self.number].copy()


def episodes(method, make=Walk, count=2):
    cfg = RowCfg(make, "Walk", Walk.observation_space, Walk.action_space, None, start_mode=method)
    arrays = {name: np.zeros((count, *shape), dtype) for name, (shape, dtype) in layout_of(cfg).items()}
    rows = LocalRows(cfg, arrays)
    return [Episode(rows, arrays, number) for number in range(count)]


def walk(episode, obs, actions=(0.5, -0.25, 0.125)):
    """The observations from ``obs`` on."""
    return [obs.tolist(), *(episode.env.step(np.array([action]))[0].tolist() for action in actions)]


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
    assert path[1][0] - path[0][0] == pytest.approx(first, abs=1e-6)
    assert path[2][0] - path[1][0] == pytest.approx(second, abs=1e-6)


def test_a_captured_start_is_reset_once():
    one, other = episodes("snapshot")
    other.start(1, 1)  # its own first reset
    before = one.env.resets + other.env.resets
    for noise in range(3):
        one.start(5, noise)
        other.start(5, noise)
    assert one.env.resets + other.env.resets == before + 1


def test_the_oldest_captured_start_is_forgotten():
    (row,) = episodes("snapshot", count=1)
    for seed in [*range(65), *range(1, 65)]:
        row.start(seed, 0)
    assert row.env.resets == 65
    row.start(0, 0)
    assert row.env.resets == 66


def test_fresh_environments_do_not_remember():
    one, other = episodes("fresh", Remembers)
    walk(one, one.start(1, 1))
    walk(one, one.start(2, 1))
    assert one.start(5, 1).tolist() == other.start(5, 1).tolist()
    seeded, another = episodes("seed", Remembers)
    seeded.start(1, 1)
    assert seeded.start(5, 1).tolist() != another.start(5, 1).tolist()


def test_replay_makes_one_environment_an_episode():
    Walk.made = 0
    (episode,) = episodes("fresh", count=1)
    for seed in range(4):
        episode.start(seed, 0)
    assert Walk.made == 4


@pytest.mark.parametrize("method", METHODS)
def test_members_share_their_random_noops(method):
    class Counted(Walk):
        taken = 0

        def step(self, action):
            type(self).taken += 1
            return super().step(action)

    one, other = episodes(method, lambda: RandomNoops(Counted(), 6))
    lengths = set()
    for seed in range(40):
        Counted.taken = 0
        first = one.start(seed, 1).tolist()
        lengths.add(Counted.taken)
        assert other.start(seed, 2).tolist() == first
    assert lengths == set(range(7))  # every length, 0 and the longest included


def test_an_episode_that_ends_in_its_noops_is_reset():
    (episode,) = episodes("seed", lambda: RandomNoops(Frail(), 8), count=1)
    for seed in range(20):
        first = episode.start(seed, 1)
        assert not episode.env.unwrapped.is_over
        assert episode.start(seed, 1).tolist() == first.tolist()


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
    one.env.step(np.array([0.5]))
    assert other.start(3, 1).tolist() == first.tolist()
