import numpy as np
import pytest
from noisy_envs import AlwaysThere, Calm, GlobalNoise, GlobalReward, GlobalStart, Noisy, Remembers

from groupwise.envs.base import GroupStartReport
from groupwise.envs.rows import RowCfg, RowsGroupEnv
from groupwise.envs.starts import verify_group_start
from groupwise.errors import GroupStartError


class CheatsInTheEnd(Calm):
    """Every episode is short, and only the fourth one shows it."""

    length = 5

    def draw_noise(self):
        return np.random.normal() if self.episodes > 3 else 0.0


class LeavesSomething(Calm):
    """Its last action shows at the start's right half only, as BipedalWalker's contacts do at some starts."""

    last = 0.0

    def draw_noise(self):
        before, self.last = self.last, self.last + self.hidden
        return before if self.right else 0.0

    def draw_start(self):
        start = self.np_random.normal()
        self.right = start > 0
        return start


class RarelyThere(Calm):
    """One start in four is elsewhere."""

    def draw_start(self):
        return float(self.np_random.random() < 0.25)


class RareNoise(Noisy):
    """One step in a hundred is random."""

    def draw_noise(self):
        return float(self.np_random.random() < 0.01)


def make(env=Noisy, num_envs=3, tier="seed", kind=RowsGroupEnv):
    cfg = RowCfg(env, env.__name__, env.observation_space, env.action_space, env.length, tier)
    return kind(cfg, num_envs)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(
    ("env", "start_varies", "noise_varies"),
    [(Noisy, True, True), (Calm, True, False), (AlwaysThere, False, False)],
)
def test_an_honest_environment_passes_and_is_described(env, num_envs, start_varies, noise_varies):
    report = verify_group_start(make(env, num_envs))
    assert report == GroupStartReport(env.__name__, "seed", start_varies, noise_varies)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(
    ("env", "where"),
    [
        (GlobalStart, "at the start, in 'obs' of row 0"),
        (GlobalNoise, "at step 1 of equal actions with equal noise, in 'obs' of row 0"),
        (GlobalReward, "at step 1 of equal actions with equal noise, in 'reward' of row 0"),
        (Remembers, "at the start, in 'obs' of row 0"),
    ],
)
def test_a_cheating_environment_is_caught_and_the_key_is_named(env, where, num_envs):
    row = "row 0" if num_envs == 1 or env is Remembers else "row 1"
    where = where.replace("row 0", row)
    with pytest.raises(GroupStartError, match=rf"members of {env.__name__} .*{where}.*fix: .*np_random"):
        verify_group_start(make(env, num_envs))


@pytest.mark.parametrize("seed", range(8))
def test_what_shows_at_some_starts_only_is_caught(seed):
    with pytest.raises(GroupStartError, match="rows that were started with the same seed differ"):
        verify_group_start(make(LeavesSomething), seed=seed)


def test_short_episodes_are_tried_until_some_tens_of_steps_agree():
    with pytest.raises(GroupStartError, match=r"at step 1 of equal actions"):
        verify_group_start(make(CheatsInTheEnd, 2))


@pytest.mark.parametrize("seed", range(12))
def test_starts_vary_if_some_of_several_seeds_start_elsewhere(seed):
    assert verify_group_start(make(RarelyThere, 8), seed=seed).start_varies


def test_a_start_that_depends_on_the_noise_seed_is_caught():
    class Mixed(RowsGroupEnv):
        def start(self, mask, start_seed, noise_seed):
            return super().start(mask, start_seed ^ noise_seed, noise_seed)

    with pytest.raises(GroupStartError, match="at the start"):
        verify_group_start(make(kind=Mixed))


def test_verification_leaves_the_action_space_alone():
    env = make()
    env.action_space.seed(0)
    before = str(env.action_space.np_random.bit_generator.state)
    verify_group_start(env)
    assert str(env.action_space.np_random.bit_generator.state) == before
