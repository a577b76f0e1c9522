"""Groups that are carried over from one iteration to the next."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.collectors.carry import pack
from groupwise.collectors.groups import GroupCollector
from groupwise.collectors.schedule import Attempt, Group
from groupwise.config.algorithm import CollectionCfg
from groupwise.config.env import EnvCfg
from groupwise.envs.make import make_env
from groupwise.errors import EnvError
from groupwise.policies.base import Action

T, F = True, False
CARRY = CollectionCfg(unfinished="carry")


@pytest.fixture(scope="session")
def collecting(buffer_for, fake_policy):
    """A collector, and a function that collects once more."""

    def make(env, *, policy=None, slots=4, **kwargs):
        policy = policy or fake_policy(True)
        collector = GroupCollector(env, policy, verify_start=False, **kwargs)
        buffer = buffer_for(env, policy, slots)

        def again(num_steps):
            rollout = collector.collect(num_steps, buffer.start_rollout())
            buffer.add(rollout)
            return rollout

        return collector, again

    return make


def numbers(rollout, *keys):
    return [rollout[key][:, :-1].squeeze(-1).tolist() for key in keys]


def test_two_rows_and_a_group_of_three_by_hand(collecting, scripted_group):
    # Attempts last 2, 7 and 3 steps. Row 0 takes attempt 0, then 2; row 1 takes attempt 1. 3 slots an iteration.
    env = scripted_group(2, [2, 7, 3, 9, 9, 9])
    cfg = CollectionCfg(unfinished="carry", max_staleness=2)
    collector, again = collecting(env, group_size=3, collection=cfg)

    first = again(3)
    assert first.shape == (2, 4)
    assert numbers(first, "valid", "loss_mask") == [[[F] * 3] * 2] * 2
    assert numbers(first, "group_id", "episode_id", "policy_version") == [[[-1] * 3] * 2] * 3
    assert [len(collector.finished), collector.last_steps] == [1, 6]
    assert collector.metrics()["rollout/wasted_steps"] == 0.0
    assert collector.metrics()["rollout/groups"] == 0.0

    # head of 3 columns: row 0 holds attempt 0 (2 steps) and the first step of attempt 2, row 1 three steps of attempt 1
    second = again(3)
    assert second.shape == (2, 7)
    assert numbers(second, "obs") == [[[0, 1, 20, 21, 22, 30], [10, 11, 12, 13, 14, 15]]]
    assert not second["valid"].any()

    # attempts 0 and 2 ended, and attempt 1 has 6 steps in row 1: the longest of the others goes first into row 0. Attempt
    # 3, of a new group, was started but has taken 1 step in row 0: 3 + 2 + 1 = 6 columns.
    third = again(3)
    assert third.shape == (2, 10)
    assert numbers(third, "obs") == [[[20, 21, 22, 0, 1, 30, 31, 32, 33], [10, 11, 12, 13, 14, 15, 16, 40, 41]]]
    assert numbers(third, "valid") == [[[T, T, T, T, T, F, F, F, F], [T, T, T, T, T, T, T, F, F]]]
    assert numbers(third, "episode_id") == [[[2, 2, 2, 0, 0, -1, -1, -1, -1], [1, 1, 1, 1, 1, 1, 1, -1, -1]]]
    assert numbers(third, "group_id") == [[[0, 0, 0, 0, 0, -1, -1, -1, -1], [0, 0, 0, 0, 0, 0, 0, -1, -1]]]
    assert numbers(third, "step") == [[[0, 1, 2, 0, 1, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 0, 0]]]
    assert numbers(third, "policy_version") == [[[0, 1, 1, 0, 0, -1, -1, -1, -1], [0, 0, 0, 1, 1, 1, 2, -1, -1]]]
    assert numbers(third, "terminated") == [[[F, F, T, F, T, F, F, F, F], [F, F, F, F, F, F, T, F, F]]]
    assert collector.metrics()["rollout/staleness_mean"] == pytest.approx((2 + 1 + 1 + 2 + 2 + 6 + 3 + 0) / 12)
    assert collector.metrics()["rollout/idle_fraction"] == 0.0
    assert [(e.episode_return, e.length) for e in collector.finished] == [(7.0, 7)]
    assert env.taken == 18


def test_a_head_may_be_wider_than_the_rollout_it_came_from(collecting, scripted_group):
    # Six columns hold 3 + 3 steps in one row and 2 + 2 + 2 in the other. Longest first they become 3 + 2 + 2 and 3 + 2.
    env = scripted_group(2, [3, 2, 2, 3, 2, 1, 9])
    _, again = collecting(env, group_size=6, collection=CARRY)
    assert again(6).shape == (2, 7)
    second = again(1)
    assert second.shape == (2, 9)
    assert numbers(second, "valid") == [[[T] * 8, [T] * 5 + [F] * 3]]
    assert numbers(second, "obs")[0][0] == [0, 1, 2, 10, 11, 40, 41, 50]
    assert numbers(second, "obs")[0][1][:5] == [30, 31, 32, 20, 21]


def test_a_group_is_finished_when_it_would_get_too_old(collecting, scripted_group):
    # One row, group of two, 2 slots an iteration. Iteration 1 has to finish the group of iteration 0: 3 + 3 steps.
    env = scripted_group(1, [3])
    collector, again = collecting(env, group_size=2, collection=CARRY)
    assert not again(2)["valid"].any()
    second = again(2)
    assert collector.last_steps == 4
    assert numbers(second, "step", "policy_version") == [[[0, 1, 2, 0, 1, 2]], [[0, 0, 1, 1, 1, 1]]]
    assert second["valid"][:, :-1].all()


def test_the_ratio_is_against_the_policy_that_sampled(collecting, scripted_group, fake_policy):
    class Improving(fake_policy):
        log_prob = -1.0

        def act(self, obs, deterministic=False, generator=None):
            return Action(torch.zeros(len(obs), dtype=torch.int64), torch.full((len(obs),), self.log_prob))

    policy = Improving(True)
    _, again = collecting(scripted_group(1, [3]), policy=policy, group_size=2, collection=CARRY)
    again(2)
    policy.log_prob = -2.0
    assert numbers(again(2), "sample_log_prob") == [[[-1, -1, -2, -2, -2, -2]]]


def test_what_restart_drops_is_wasted_in_the_next_iteration(collecting, scripted_group):
    env = scripted_group(2, [3])
    collector, again = collecting(env, group_size=2, collection=CARRY)
    again(2)
    collector.restart()
    assert env.held == [[0, 1]]
    assert collector.dropped_steps == 4
    again(3)
    assert collector.metrics()["rollout/wasted_steps"] == 4 / 6
    again(3)
    assert collector.metrics()["rollout/wasted_steps"] == 0.0


def test_what_an_error_loses_is_wasted_in_the_next_iteration(collecting, scripted_group, monkeypatch):
    env = scripted_group(2, [9])
    collector, again = collecting(env, group_size=2, collection=CARRY)
    again(2)
    step, calls = env.step, []

    def step_twice(action):
        calls.append(action)
        if len(calls) == 3:
            raise ZeroDivisionError
        return step(action)

    with monkeypatch.context() as patched:
        patched.setattr(env, "step", step_twice)
        with pytest.raises(ZeroDivisionError):
            again(3)
    # 2 rows of 2 steps were carried over; the 2 + 2 of the iteration that failed count nowhere
    assert collector.dropped_steps == 4
    collector.restart()
    collector.restart()
    assert collector.dropped_steps == 4
    again(2)
    assert collector.metrics()["rollout/wasted_steps"] == 4 / 4
    collector.restart()
    assert collector.dropped_steps == 4
    again(2)
    assert collector.metrics()["rollout/wasted_steps"] == 4 / 4
    assert collector.dropped_steps == 0


def test_after_a_restart_nothing_of_the_past_matters(buffer_for, fake_policy, walk_env):
    def last_rollout(first):
        env, policy = make_env(EnvCfg(num_envs=3), grouped=True, env=walk_env), fake_policy(True)
        collector = GroupCollector(env, policy, group_size=2, seed=5, collection=CARRY, attempt_steps=9)
        buffer = buffer_for(env, policy, 64)
        collector.iteration = first
        for iteration in range(first, 5):
            if iteration == 3:
                collector.restart()
            rollout = collector.collect(8, buffer.start_rollout())
        env.close()
        return rollout

    uninterrupted, resumed = last_rollout(0), last_rollout(3)
    assert uninterrupted["valid"].any()
    assert (uninterrupted["policy_version"][uninterrupted["valid"]] == 3).any()
    assert (uninterrupted == resumed).all()


def test_settling_finishes_everything_once(collecting, scripted_group):
    env = scripted_group(2, [5])
    collector, again = collecting(env, group_size=2, collection=CARRY)
    assert collector.settle() == "after next"
    assert again(2)["valid"].sum() == collector.last_steps == 10
    collector.restart()
    assert collector.dropped_steps == 0
    assert not again(2)["valid"].any()


def test_a_group_that_loses_a_member_later_is_dropped_with_all_its_steps(collecting, scripted_group):
    # one row, group of two: 2 + 1 steps in iteration 0; attempt 1 fails at its second step in iteration 1
    env = scripted_group(1, [2, 9, 4], fails={1: 2})
    cfg = CollectionCfg(unfinished="carry", lost_member="drop")
    collector, again = collecting(env, group_size=2, collection=cfg)
    again(3)
    assert collector.metrics()["rollout/wasted_steps"] == 0.0
    again(3)
    assert collector.metrics()["rollout/wasted_steps"] == 4 / 3
    assert collector.metrics()["rollout/lost_members"] == 1.0


def test_a_window_counts_the_steps_before(collecting, scripted_group):
    env = scripted_group(1, [9])
    _, again = collecting(env, group_size=2, collection=CARRY, attempt_steps=3)
    again(2)
    assert numbers(again(2), "truncated") == [[[F, F, T, F, F, T]]]


def test_a_critic_is_refused(collecting, scripted_group, fake_policy):
    with pytest.raises(EnvError, match=r"keeps no values.*fix: an actor_only policy, or 'finish'"):
        collecting(scripted_group(1, [2]), policy=fake_policy(), group_size=2, collection=CARRY)


def test_what_ended_is_packed_from_the_first_column_on():
    group = Group(0, 0, 1, 1)
    attempts = [Attempt(group, 0, row=1, began=2, end=2 + length, state="ended") for length in (1, 3)]
    places, head = pack(attempts, 2)
    assert [(place.row, place.began) for place in places] == [(1, 0), (0, 0)]
    assert head == 3


def test_of_rows_with_as_much_room_the_first_is_filled():
    # 3 columns of row 1 are taken; then the rows hold (0 3 0), (5 3 0), (5 3 3), (5 5 3), (5 5 4), (5 5 5), (6 5 5)
    group = Group(0, 0, 1, 1)
    running = Attempt(group, 0, row=1, began=0, end=3, state="running")
    ended = [Attempt(group, 0, row=0, began=0, end=length, state="ended") for length in (1, 1, 2, 1, 5, 3)]
    places, head = pack([running, *ended], 3)
    assert [(place.row, place.began) for place in places] == [(1, 3), (2, 3), (2, 4), (1, 0), (0, 5), (0, 0), (2, 0)]
    assert head == 6


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12),
    num_rows=st.integers(1, 4),
)
def test_packed_attempts_do_not_overlap_and_running_ones_end_together(lengths, num_rows):
    group, attempts, free = Group(0, 0, 1, 1), [], list(range(num_rows))
    for length, running in lengths:
        row = free.pop() if running and free else None
        state = "ended" if row is None else "running"
        attempts.append(Attempt(group, 0, row=0 if row is None else row, began=3, end=3 + length, state=state))
    places, head = pack(attempts, num_rows)
    taken = np.zeros((num_rows, head), dtype=np.int64)
    for attempt, row, began in places:
        assert 0 <= began <= head - attempt.length
        taken[row, began : began + attempt.length] += 1
        if attempt.state == "running":
            assert (row, began + attempt.length) == (attempt.row, head)
    assert taken.max() == 1
    assert taken.sum() == sum(length for length, _ in lengths)
    assert head <= max(-(-int(taken.sum()) // num_rows) + 9, 9)


@given(
    num_envs=st.integers(1, 4),
    group_size=st.integers(2, 4),
    num_steps=st.integers(1, 5),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    fails=st.dictionaries(st.integers(0, 30), st.integers(1, 4), max_size=5),
    lost_member=st.sampled_from(["complete", "drop"]),
    max_staleness=st.integers(1, 3),
)
def test_no_step_is_lost_or_trained_on_twice(
    collecting, scripted_group, num_envs, group_size, num_steps, lengths, fails, lost_member, max_staleness
):
    env = scripted_group(num_envs, lengths, fails=fails)
    cfg = CollectionCfg(unfinished="carry", lost_member=lost_member, max_staleness=max_staleness)
    collector, again = collecting(env, group_size=group_size, collection=cfg)
    trained, wasted, total, seen = 0, 0.0, 0, set()
    for iteration in range(5):
        rollout = again(num_steps)
        valid = rollout["valid"][:, :-1]
        obs = rollout["obs"][:, :-1, 0][valid].tolist()
        assert not seen & set(obs), "attempt and step in one number: each comes once"
        seen |= set(obs)
        age = iteration - rollout["policy_version"][:, :-1][valid]
        assert ((age >= 0) & (age <= max_staleness)).all()
        trained += int(valid.sum())
        total += collector.last_steps
        wasted += collector.metrics()["rollout/wasted_steps"] * collector.last_steps
        assert total == env.taken
        assert collector.last_steps >= num_envs * num_steps
        groups = rollout["group_id"][:, :-1][valid]
        episodes = rollout["episode_id"][:, :-1][valid]
        pairs = {(int(g), int(e)) for g, e in zip(groups, episodes, strict=True)}
        assert len(pairs) == (int(groups.max()) + 1 if len(groups) else 0) * group_size
    collector.restart()
    assert trained + wasted + collector.dropped_steps == pytest.approx(total)


@pytest.mark.parametrize("unfinished", ["finish", "carry"])
def test_cartpole_wastes_nothing_from_the_first_iteration_on(collecting, unfinished):
    env = make_env(EnvCfg(num_envs=4), grouped=True)
    collector, again = collecting(env, slots=64, group_size=4, collection=CollectionCfg(unfinished=unfinished))
    for _ in range(6):
        rollout = again(40)
        assert collector.metrics()["rollout/wasted_steps"] < 0.05
    assert rollout["valid"].any()
    if unfinished == "carry":
        follows_physics = rollout["obs"][:, 1:, 0] - (rollout["obs"][:, :-1, 0] + 0.02 * rollout["obs"][:, :-1, 1])
        inside = rollout["valid"][:, 1:] & (rollout["episode_id"][:, 1:] == rollout["episode_id"][:, :-1])
        assert follows_physics[inside].abs().max() < 1e-6, "head and rest join without a gap"
