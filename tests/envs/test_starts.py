import logging
import re
from contextlib import closing

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, TimeLimit
from gymnasium.wrappers.vector import NormalizeObservation as VectorNormalize
from noisy_envs import AlwaysThere, Calm, GlobalNoise, GlobalReward, GlobalStart, Noisy, Remembers

from groupwise.config.policy import PolicyCfg
from groupwise.config.run import EnvCfg, RunCfg
from groupwise.envs.gymnasium import RandomNoops
from groupwise.envs.make import make_env
from groupwise.envs.rows import RowCfg, RowsGroupEnv
from groupwise.envs.starts import choose_start, verify_group_start
from groupwise.errors import EnvError, GroupStartError, GroupStartWarning, UnsupportedSpaceError
from groupwise.policies.actor_critic import ActorCritic
from groupwise.training.build import EnvEvaluator, UserObjects


class Locked(Noisy):
    """Cannot be copied: it holds a generator."""

    def __init__(self):
        super().__init__()
        self.draws = (number for number in range(9))


class Own(Noisy):
    """Captures itself."""

    def clone_state(self):
        return {"state": self.state, "hidden": self.hidden}

    def restore_state(self, state):
        self.state, self.hidden = state["state"], state["hidden"]


class Forgetful(Own):
    """Forgets what does not show in its observation."""

    def restore_state(self, state):
        self.state = state["state"]


class Raising(Own):
    def clone_state(self):
        raise KeyError("no such slot")


class SharedMemory(Own):
    """Hands out what it goes on writing into, and takes it back."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.memory = {"state": self.state, "hidden": 0.0}
        return obs, info

    def clone_state(self):
        return self.memory

    def restore_state(self, state):
        self.memory = state
        self.state, self.hidden = state["state"], state["hidden"]


def choose(env, wanted="auto", **settings):
    made = env()
    space = made.observation_space
    cfg = RowCfg(env, "Env", space, made.action_space, None, **settings)
    return choose_start(cfg, wanted)


@pytest.mark.parametrize(
    ("env", "expected"), [(Noisy, "seed"), (Own, "snapshot"), (Locked, "seed"), (SharedMemory, "snapshot")]
)
def test_the_best_way_that_works_is_taken_without_a_word(env, expected):
    assert choose(env).start_mode == expected


@pytest.mark.parametrize(
    ("env", "tier", "reason"),
    [
        (Forgetful, "seed", r"snapshot: two starts .* differ at step 1 .*fix: .*np_random"),
        (Raising, "seed", r"snapshot: KeyError: 'no such slot'"),
        (Remembers, "fresh", r"seed: .*at the start, in 'obs' of row 0.*fix: .*np_random"),
    ],
)
def test_falling_to_the_next_way_warns_and_says_why(env, tier, reason):
    with pytest.warns(GroupStartWarning, match=rf"members of Env share their start by {tier}.*{reason}"):
        report = choose(env)
    assert report.start_mode == tier
    assert report.rejected


def test_a_cheating_environment_is_refused_with_each_reason_once():
    apart = "two starts with the same seed differ at"
    reasons = {
        GlobalNoise: f"seed, snapshot, fresh: {apart} step 1 of equal actions with equal noise, in 'obs' of row 1",
        GlobalStart: f"seed, fresh: {apart} the start, in 'obs' of row 1; "
        "snapshot: the start of a seed is another state when it is captured again",
    }
    for env, expected in reasons.items():
        with pytest.raises(GroupStartError) as caught:
            choose(env)
        message, _, fix = str(caught.value).partition("; fix: ")
        assert message == f"members of Env cannot share a start: {expected}"
        assert "start_mode" not in fix  # no way would do


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("env", "wanted"), [(Remembers, "seed"), (GlobalNoise, "fresh"), (GlobalStart, "snapshot")])
def test_a_named_way_that_fails_is_an_error(env, wanted):
    with pytest.raises(GroupStartError, match=f"by start_mode='{wanted}'"):
        choose(env, wanted)


def test_a_named_way_is_taken_alone():
    for wanted in ("snapshot", "seed", "fresh"):
        report = choose(Own, wanted)
        assert (report.start_mode, report.rejected) == (wanted, ())
    with pytest.raises(
        EnvError, match=r"^Locked.draws \(generator\) cannot be copied: .*; fix: .*clone_state\(\).*by seed"
    ):
        choose(Locked, "snapshot")


def test_an_error_of_the_environment_is_the_users_to_see():
    class Broken(Noisy):
        def step(self, action):
            raise ZeroDivisionError("in the user's own step")

    with pytest.raises(ZeroDivisionError, match="user's own step"):
        choose(Broken)


def test_rows_that_may_fail_are_examined_up_to_there():
    class Flaky(Noisy):
        def step(self, action):
            if self.np_random.random() < 0.1:
                raise RuntimeError("flaky")
            return super().step(action)

    assert choose(Flaky, on_error="report").start_mode == "seed"


@pytest.mark.parametrize(("num_noops", "warns"), [(0, True), (5, False)])
def test_starts_that_do_not_vary_are_logged(caplog, num_noops, warns):
    with caplog.at_level(logging.WARNING):
        report = choose(lambda: RandomNoops(AlwaysThere(), num_noops))
    assert report.start_varies is not warns
    assert ("fix: env.num_random_noops" in caplog.text) == warns


def test_running_statistics_are_found_out_and_the_mend_is_named():
    with pytest.warns(GroupStartWarning, match=r"by fresh.*seed: .* differ at the start.*fix: .*normalize_obs"):
        assert choose(lambda: NormalizeObservation(TimeLimit(Noisy(), 20))).start_mode == "fresh"


class Harder(Calm):
    """Each episode starts further away than the one before."""

    def draw_start(self):
        return 1.0 + self.episodes


class PaysMoreAndMore(Calm):
    def pay(self):
        return float(self.episodes)


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: NormalizeObservation(Noisy()), "running statistics of NormalizeObservation"),
        (lambda: TimeLimit(NormalizeReward(Noisy()), 20), "running statistics of NormalizeReward"),
        (Harder, "at the start, in 'obs'"),
        (PaysMoreAndMore, "at step 1 .* in 'reward'"),
        (lambda: SyncVectorEnv([lambda: NormalizeReward(Noisy())]), "running statistics of NormalizeReward"),
        (lambda: VectorNormalize(SyncVectorEnv([Noisy])), "running statistics of NormalizeObservation"),
    ],
)
def test_what_episodes_carry_over_is_found_out_without_groups(make, where, caplog):
    made = make()
    env = made if isinstance(made, gymnasium.vector.VectorEnv) else make
    make_env(EnvCfg(num_envs=1), env=env, verify=False)
    assert not caplog.text, "environments for evaluation are not looked at"
    make_env(EnvCfg(num_envs=1), env=env)
    assert re.search(f"depends on those before it .*{where}.*fix: policy.normalize_obs", caplog.text)


@pytest.mark.parametrize("make", [Noisy, Calm, AlwaysThere, GlobalStart, GlobalNoise, GlobalReward])
def test_nothing_is_carried_over(make, caplog):
    assert make_env(EnvCfg(num_envs=1), env=make).carries_over == ""
    assert not caplog.text


def test_environments_for_evaluation_are_not_tried_out():
    class Counted(Noisy):
        made = 0

        def __init__(self):
            super().__init__()
            type(self).made += 1

    env = make_env(EnvCfg(num_envs=2), env=Counted, grouped=True, verify=False)
    assert (Counted.made, env.start_report, env.start_mode) == (3, None, "seed")
    assert all(inner.episodes == 0 for inner in env._rows.envs)
    env = make_env(EnvCfg(num_envs=2, max_episode_steps=9), env=Noisy, grouped=True)
    assert (env.start_report, env.start_mode) == (("Noisy", "seed", True, True, ()), "seed")


def test_evaluation_does_not_depend_on_earlier_ones_where_used_environments_start_elsewhere():
    class Rewarding(Remembers):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, self.state, *rest

    cfg = RunCfg(env=EnvCfg(id="<given in Python>", max_episode_steps=9), evaluation={"episodes": 2})
    policy = ActorCritic(Noisy.observation_space, Noisy.action_space, PolicyCfg(), actor_only=True)
    with closing(EnvEvaluator(cfg, UserObjects(env=Rewarding), policy, seed=0, fresh=True)) as evaluator:
        assert evaluator() == evaluator()


def test_actions_that_no_policy_has_are_refused_by_name():
    class Speaking(Noisy):
        action_space = gymnasium.spaces.Dict({"left": gymnasium.spaces.Discrete(2), "word": gymnasium.spaces.Text(5)})

    with pytest.raises(UnsupportedSpaceError, match=r"action space Dict\(.* of Env is not supported; .*fix"):
        choose(Speaking)


# --- the check


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


def rows_of(env=Noisy, num_envs=3, tier="seed", kind=RowsGroupEnv):
    cfg = RowCfg(env, env.__name__, env.observation_space, env.action_space, env.length, tier)
    return kind(cfg, num_envs)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(
    ("env", "start_varies", "noise_varies"), [(Noisy, True, True), (Calm, True, False), (AlwaysThere, False, False)]
)
def test_an_honest_environment_passes_and_is_described(env, num_envs, start_varies, noise_varies):
    report = verify_group_start(rows_of(env, num_envs))
    assert report == (env.__name__, "seed", start_varies, noise_varies, ())


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
        verify_group_start(rows_of(env, num_envs))


def test_what_shows_at_some_starts_only_is_caught():
    for seed in range(8):
        with pytest.raises(GroupStartError, match="two starts with the same seed differ"):
            verify_group_start(rows_of(LeavesSomething), seed=seed)
        assert verify_group_start(rows_of(RarelyThere, 8), seed=seed).start_varies
    with pytest.raises(GroupStartError, match=r"at step 1 of equal actions"):
        verify_group_start(rows_of(CheatsInTheEnd, 2))  # short episodes are tried until some tens of steps agree


def test_rows_that_depend_on_each_other_are_caught():
    class Mixed(RowsGroupEnv):
        def step(self, action):
            step = super().step(action)
            return step._replace(reward=step.reward - step.obs.mean())  # equal where all rows are

    assert verify_group_start(rows_of(Noisy))
    with pytest.raises(GroupStartError, match=r"a row depends on the noise of others: .*at step 1 .*'reward' of row 0"):
        verify_group_start(rows_of(Noisy, kind=Mixed))


def test_a_start_that_depends_on_the_noise_seed_is_caught():
    class Mixed(RowsGroupEnv):
        def start(self, mask, start_seed, noise_seed):
            return super().start(mask, start_seed ^ noise_seed, noise_seed)

    with pytest.raises(GroupStartError, match="at the start"):
        verify_group_start(rows_of(kind=Mixed))


def test_verification_leaves_the_action_space_alone():
    env = rows_of()
    env.action_space.seed(0)
    before = str(env.action_space.np_random.bit_generator.state)
    verify_group_start(env)
    assert str(env.action_space.np_random.bit_generator.state) == before
