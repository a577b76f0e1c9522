import logging
from contextlib import closing

import gymnasium
import pytest
from gymnasium.wrappers import NormalizeObservation, TimeLimit
from noisy_envs import AlwaysThere, GlobalNoise, GlobalStart, Noisy, Remembers

from groupwise.config.policy import PolicyCfg
from groupwise.config.run import EnvCfg, RunCfg
from groupwise.envs.gymnasium import RandomNoops
from groupwise.envs.make import make_env
from groupwise.envs.rows import RowCfg
from groupwise.envs.starts import choose_start
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
    ("env", "expected"),
    [(Noisy, "seed"), (Own, "snapshot"), (Locked, "seed")],
)
def test_the_best_way_that_works_is_taken_without_a_word(env, expected):
    assert choose(env).start_mode == expected


@pytest.mark.parametrize(
    ("env", "tier", "reason"),
    [
        (Forgetful, "seed", r"snapshot: rows .* differ at step 1 .*fix: .*np_random"),
        (Raising, "seed", r"snapshot: KeyError: 'no such slot'"),
        (Remembers, "fresh", r"seed: .*at the start, in 'obs' of row 0.*start of a seed is another.*fix: .*np_random"),
    ],
)
def test_falling_to_the_next_way_warns_and_says_why(env, tier, reason):
    with pytest.warns(GroupStartWarning, match=rf"members of Env share their start by {tier}.*{reason}"):
        report = choose(env)
    assert report.start_mode == tier
    assert report.rejected


def test_a_state_that_is_written_into_later_does_no_harm():
    assert choose(SharedMemory).start_mode == "snapshot"


def test_a_cheating_environment_is_refused_with_each_reason_once():
    apart = "rows that were started with the same seed differ at"
    reasons = {
        GlobalNoise: f"seed, snapshot, fresh: {apart} step 1 of equal actions with equal noise, in 'obs' of row 1",
        GlobalStart: f"seed, fresh: {apart} the start, in 'obs' of row 1; snapshot: the start of a seed is another state when it "
        "is captured again",
    }
    for env, expected in reasons.items():
        with pytest.raises(GroupStartError) as caught:
            choose(env)
        told, _, fix = str(caught.value).partition("; fix: ")
        assert told == f"members of Env cannot share a start: {expected}"
        assert "start_mode" not in fix  # no way would do


@pytest.mark.parametrize("wanted", ["snapshot", "seed", "fresh"])
def test_a_named_way_is_taken_alone(wanted):
    report = choose(Own, wanted)
    assert report.start_mode == wanted
    assert report.rejected == ()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("env", "wanted"), [(Remembers, "seed"), (GlobalNoise, "fresh"), (GlobalStart, "snapshot")])
def test_a_named_way_that_fails_is_an_error(env, wanted):
    with pytest.raises(GroupStartError, match=f"by start_mode='{wanted}'"):
        choose(env, wanted)


def test_an_environment_that_cannot_be_captured_says_why_where_that_was_asked_for():
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


def test_environments_for_evaluation_are_not_tried_out():
    class Counted(Noisy):
        made = 0

        def __init__(self):
            super().__init__()
            type(self).made += 1

    env = make_env(EnvCfg(num_envs=2), env=Counted, grouped=True, verify=False)
    assert (Counted.made, env.start_report, env.start_mode) == (3, None, "seed")
    assert all(inner.episodes == 0 for inner in env._rows.envs)


def test_evaluation_does_not_depend_on_earlier_ones_where_used_environments_start_elsewhere():
    class Rewarding(Remembers):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return obs, self.state, *rest

    cfg = RunCfg(env=EnvCfg(id="<given in Python>", max_episode_steps=9), evaluation={"episodes": 2})
    policy = ActorCritic(Noisy.observation_space, Noisy.action_space, PolicyCfg(), actor_only=True)
    with closing(EnvEvaluator(cfg, UserObjects(env=Rewarding), policy, seed=0, fresh=True)) as evaluator:
        assert evaluator() == evaluator()


def test_what_was_found_comes_with_the_environment():
    env = make_env(EnvCfg(num_envs=2, max_episode_steps=9), env=Noisy, grouped=True)
    assert env.start_report == ("Noisy", "seed", True, True, ())
    assert (env.start_mode, env.max_episode_steps) == ("seed", 9)


def test_actions_that_no_policy_has_are_refused_by_name():
    class Speaking(Noisy):
        action_space = gymnasium.spaces.Dict({"left": gymnasium.spaces.Discrete(2), "word": gymnasium.spaces.Text(5)})

    with pytest.raises(UnsupportedSpaceError, match=r"action space Dict\(.* of Env is not supported; .*fix"):
        choose(Speaking)
