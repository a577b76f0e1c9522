"""Starts of single environments by each method."""

import gymnasium
import numpy as np
import pytest
import torch
from noisy_envs import Noisy, Remembers

from groupwise.config.run import EnvCfg
from groupwise.envs.gymnasium import GymnasiumVectorEnv, RandomNoops
from groupwise.envs.make import make_env
from groupwise.envs.rows import LocalRows, RowCfg, layout_of

methods = pytest.mark.parametrize("method", ["seed", "snapshot", "fresh"])


class Row:
    """One of several rows."""

    def __init__(self, rows, arrays, number):
        self.rows, self.arrays, self.number = rows, arrays, number

    @property
    def env(self):
        return self.rows.envs[self.number]

    def start(self, seed, noise):
        self.rows.start(*(np.array([number]) for number in (self.number, seed, noise)))
        return self.arrays["obs"][self.number].tolist()

    def walk(self, seed, noise, actions=(0.5, -0.25, 0.125)):
        """The observations of an episode."""
        return [self.start(seed, noise), *(self.env.step(np.array([action]))[0].tolist() for action in actions)]


def rows_of(method, make=Noisy, count=2):
    space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    cfg = RowCfg(make, "Noisy", space, Noisy.action_space, None, start_mode=method)
    arrays = {name: np.zeros((count, *shape), dtype) for name, (shape, dtype) in layout_of(cfg).items()}
    rows = LocalRows(cfg, arrays)
    return [Row(rows, arrays, number) for number in range(count)]


@methods
def test_equal_starts_and_noise_of_ones_own(method):
    one, other = rows_of(method)
    assert one.walk(7, 1) == other.walk(7, 1)
    mine, theirs = one.walk(8, 1), other.walk(8, 2)
    assert mine[0] == theirs[0]
    assert all(a != b for a, b in zip(mine[1:], theirs[1:], strict=True))
    assert mine[0] == Noisy().reset(seed=8)[0].astype(np.float32).tolist() != one.start(7, 1)
    path = np.array(one.walk(7, 5, actions=(0.0, 0.0))).flatten()
    np.testing.assert_allclose(np.diff(path), np.random.default_rng(5).normal(size=2), atol=1e-6)


def test_a_captured_start_is_reset_once_and_the_oldest_is_forgotten():
    one, other = rows_of("snapshot")
    other.start(1, 1)  # its own first reset
    for row in (one, other, one, other):
        row.start(5, row.number)
    assert (one.env.episodes, other.env.episodes) == (1, 1)
    for seed in [*range(100, 164), *range(101, 164)]:
        one.start(seed, 0)
    assert one.env.episodes == 65
    one.start(5, 0)
    assert one.env.episodes == 66


def test_fresh_environments_do_not_remember_and_are_made_for_each_episode():
    class Counted(Remembers):
        made = 0

        def __init__(self):
            type(self).made += 1

    one, other = rows_of("fresh", Counted)
    assert one.start(1, 1) == one.start(5, 1) == other.start(5, 1)
    assert Counted.made == 3
    seeded, another = rows_of("seed", Remembers)
    seeded.start(1, 1)
    assert seeded.start(5, 1) != another.start(5, 1)


@methods
def test_members_share_their_random_noops(method):
    class Counted(Noisy):
        taken = 0

        def step(self, action):
            type(self).taken += 1
            return super().step(action)

    one, other = rows_of(method, lambda: RandomNoops(Counted(), 6))
    lengths = set()
    for seed in range(40):
        Counted.taken = 0
        first = one.start(seed, 1)
        lengths.add(Counted.taken)
        assert other.start(seed, 2) == first
    assert lengths == set(range(7))  # every length, 0 and the longest included


def test_an_episode_that_ends_in_its_noops_is_reset():
    class Frail(Noisy):
        """Ends at the first step up."""

        def reset(self, *, seed=None, options=None):
            self.is_over = False
            return super().reset(seed=seed)

        def step(self, action):
            obs, reward, *_ = super().step(action)
            self.is_over = bool(action[0] > 0)
            return obs, reward, self.is_over, False, {}

    (row,) = rows_of("seed", lambda: RandomNoops(Frail(), 8), count=1)
    for seed in range(20):
        first = row.start(seed, 1)
        assert not row.env.unwrapped.is_over
        assert row.start(seed, 1) == first


@methods
def test_what_was_observed_at_a_start_is_kept_from_an_environment_that_writes_into_it(method):
    class Reuser(Noisy):
        shown = np.zeros(1)

        def look(self):
            self.shown[:] = self.state
            return self.shown

    one, other = rows_of(method, Reuser)
    first, *_ = one.walk(3, 1)
    assert other.start(3, 1) == first


class Strict(gymnasium.Env):
    """Refuses actions that its space does not contain."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = 3
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), (action, action.dtype)
        self.left -= 1
        return np.zeros(1, np.float32), 1.0, not self.left, False, {}


@pytest.mark.parametrize(
    "space",
    [
        gymnasium.spaces.Discrete(3, dtype=np.int32),
        gymnasium.spaces.MultiDiscrete([3, 2], dtype=np.int32),
        gymnasium.spaces.Box(-1, 1, (2,), np.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("given", ["single", "vector"])
def test_actions_have_the_dtype_of_their_space(space, given):
    if given == "single":
        env = make_env(EnvCfg(num_envs=2), env=lambda: Strict(space), verify=False, grouped=True)
    else:
        several = gymnasium.vector.SyncVectorEnv([lambda: Strict(space)] * 2)
        env = GymnasiumVectorEnv(several, env_id="Strict", max_episode_steps=None)
    env.reset(seed=0)
    shape = (2, *space.shape)
    step = env.step(
        torch.ones(shape) if isinstance(space, gymnasium.spaces.Box) else torch.ones(shape, dtype=torch.long)
    )
    assert step.reward.tolist() == [1, 1]
    env.close()
