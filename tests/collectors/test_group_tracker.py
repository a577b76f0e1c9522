"""The fate of steps: shared noise, episodes that fail, filtered groups, wasted steps."""

import pytest
import torch
from credit_rollouts import same_rewards_in_other_order
from hypothesis import given
from hypothesis import strategies as st
from scripted_envs import ScriptedGroupEnv, collect_groups

from groupwise.collectors.vector import Episode
from groupwise.config.algorithm import CollectionCfg
from groupwise.errors import EnvError

T, F = True, False


def numbers(rollout, key):
    return rollout[key][:, :-1].tolist()


def noise_seeds(env):
    return [seed for _, _, seeds in env.start_calls for seed in seeds]


def start_seeds(env):
    return [seed for _, seeds, _ in env.start_calls for seed in seeds]


def test_an_episode_that_failed_is_retried_at_the_same_start():
    # episodes 0 and 1 are group 0. Episode 1 fails at its second step; episode 2 takes its place in the same row.
    # Budget 2 * 2 = 4 is taken when row 0 is done, so that no second group opens: 3 + 2 + 3 steps.
    env = ScriptedGroupEnv(2, [3], fails={1: 2})
    collector, rollout = collect_groups(env, 2, group_size=2, collection=CollectionCfg(on_env_error="retry"))
    assert numbers(rollout, "valid") == [[T, T, T, F, F], [F, F, T, T, T]]
    assert numbers(rollout, "loss_mask") == numbers(rollout, "valid")
    assert numbers(rollout, "episode_id") == [[0, 0, 0, -1, -1], [-1, -1, 1, 1, 1]]
    assert numbers(rollout, "group_id") == [[0, 0, 0, -1, -1], [-1, -1, 0, 0, 0]]
    assert numbers(rollout, "step") == [[0, 1, 2, 0, 0], [0, 0, 0, 1, 2]]
    assert collector.finished == [Episode(3.0, 3, True)] * 2
    assert collector.last_steps == env.taken == 8
    metrics = collector.metrics()
    assert metrics["rollout/wasted_steps"] == 2 / 8
    assert metrics["rollout/env_errors"] == 1.0
    assert len(set(start_seeds(env))) == 1
    assert len(set(noise_seeds(env))) == 3


def test_a_group_with_a_failed_episode_is_dropped():
    # Three rows, groups of two, budget 9. Episode 1 fails at its second step, and episode 0 in row 0 is stopped. 6 steps
    # are taken: the rows take episode 3 (group 1) and 4 (group 2); at slot 3, with 9 steps, row 2 takes episode 5.
    env = ScriptedGroupEnv(3, [3], fails={1: 2})
    collector, rollout = collect_groups(env, 3, group_size=2, collection=CollectionCfg(on_env_error="drop"))
    assert numbers(rollout, "valid") == [[F, F, T, T, T, F], [F, F, T, T, T, F], [T] * 6]
    assert numbers(rollout, "episode_id") == [[-1, -1, 1, 1, 1, -1], [-1, -1, 2, 2, 2, -1], [0, 0, 0, 3, 3, 3]]
    assert numbers(rollout, "group_id") == [[-1, -1, 0, 0, 0, -1], [-1, -1, 1, 1, 1, -1], [0, 0, 0, 1, 1, 1]]
    assert numbers(rollout, "step") == [[0, 0, 0, 1, 2, 0], [0, 0, 0, 1, 2, 0], [0, 1, 2, 0, 1, 2]]
    assert collector.last_steps == env.taken == 16
    assert collector.metrics()["rollout/wasted_steps"] == 4 / 16
    assert collector.metrics()["rollout/groups"] == 2.0
    assert len(collector.finished) == 4


def test_members_of_a_dropped_group_that_wait_never_begin_and_its_rows_are_paused():
    # group of three in two rows, budget 2: episode 1 fails at once, episode 0 is stopped, episode 2 never begins
    env = ScriptedGroupEnv(2, [3], fails={1: 1})
    collector, rollout = collect_groups(env, 1, group_size=3, collection=CollectionCfg(on_env_error="drop"))
    assert numbers(rollout, "valid") == [[F], [F]]
    assert env.paused[-1] == [0, 1]
    assert (collector.last_steps, env.taken, env.started) == (2, 2, 2)
    assert collector.metrics()["rollout/wasted_steps"] == 1.0
    assert collector.metrics()["rollout/episodes"] == 0.0


def test_a_failure_in_the_last_step_of_a_window_is_no_cut():
    # windows of two steps. Episode 1 fails at its second, where it would have been cut
    env = ScriptedGroupEnv(2, [9], fails={1: 2})
    cfg = CollectionCfg(on_env_error="retry")
    collector, rollout = collect_groups(env, 1, group_size=2, horizon=2, collection=cfg)
    assert numbers(rollout, "valid") == [[T] * 4, [F] * 4]
    assert collector.finished == [Episode(2.0, 2, False)] * 2
    assert collector.metrics()["rollout/env_errors"] == 1.0


def test_noise_of_a_group_may_be_shared_but_not_that_of_a_retry():
    env = ScriptedGroupEnv(2, [3], fails={1: 2})
    collect_groups(env, 4, group_size=2, collection=CollectionCfg(on_env_error="retry", noise="shared"))
    first, second, *others = noise_seeds(env)
    assert first == second
    assert len(others) == 3
    assert len({first, *others}) == 3  # a retry, and the next group
    assert not {first, *others} & set(start_seeds(env))


@pytest.mark.parametrize(
    ("fails", "horizon", "on_env_error", "message"),
    [
        ({1: 2}, None, "raise", r"environment 1 of Scripted failed; fix: .*on_env_error='retry' or 'drop'"),
        ({1: 2}, 2, "raise", "environment 1 of Scripted failed"),
        (dict.fromkeys(range(1, 99), 1), None, "retry", r"failed 6 times in a row in Scripted; fix: .*'drop'"),
    ],
)
def test_an_environment_that_fails_is_an_error(fails, horizon, on_env_error, message):
    cfg = CollectionCfg(on_env_error=on_env_error)
    with pytest.raises(EnvError, match=message):
        collect_groups(ScriptedGroupEnv(2, [3], fails=fails), 2, group_size=2, horizon=horizon, collection=cfg)


@pytest.mark.parametrize("dynamic_sampling", [None, 0.0])
def test_groups_of_equal_returns_are_masked_and_stay_valid(dynamic_sampling):
    # Groups of two in two rows, budget 4. Rewards 1 a step: group 0 lasts 2 and 2 steps, so that no other opens.
    env = ScriptedGroupEnv(2, [2])
    collector, rollout = collect_groups(
        env, 2, group_size=2, collection=CollectionCfg(dynamic_sampling=dynamic_sampling)
    )
    counts = dynamic_sampling is None
    assert numbers(rollout, "valid") == [[T, T], [T, T]]
    assert numbers(rollout, "loss_mask") == [[counts] * 2] * 2
    assert numbers(rollout, "group_id") == [[0, 0], [0, 0]]
    assert collector.metrics()["rollout/wasted_steps"] == 0.0
    assert collector.metrics().get("rollout/filtered_groups") == (None if counts else 1.0)
    assert collector.metrics().get("rollout/filtered_steps") == (None if counts else 1.0)
    assert len(collector.finished) == 2


def test_equal_returns_count_not_equal_lengths():
    # returns 4 * 1 and 2 * 2 in group 0, 2 * 1 and 2 * 3 in group 1
    env = ScriptedGroupEnv(4, [4, 2, 2, 2], rewards=[1.0, 2.0, 1.0, 3.0])
    _, rollout = collect_groups(env, 2, group_size=2, collection=CollectionCfg(dynamic_sampling=0.0))
    assert numbers(rollout, "loss_mask") == [[F] * 4, [F] * 4, [T, T, F, F], [T, T, F, F]]


def test_rewards_in_another_order_are_equal_returns():
    rewards = same_rewards_in_other_order()
    env = ScriptedGroupEnv(4, [200])
    step = env.step
    env.step = lambda action: step(action)._replace(reward=rewards[torch.arange(4), env.count - 1])
    collector, rollout = collect_groups(env, 200, group_size=4, collection=CollectionCfg(dynamic_sampling=0.0))
    assert collector.metrics()["rollout/filtered_groups"] == 1
    assert not rollout["loss_mask"].any()


@pytest.mark.parametrize(("budget", "groups", "skipped"), [(0.0, 2, 1), (0.3, 2, 1), (0.5, 3, 2), (2.0, 4, 2)])
def test_resampling_goes_on_until_informative_groups_fill_the_budget(budget, groups, skipped):
    # Two rows, groups of two, budget 2 * 3 = 6, all episodes last 2 steps: 4 steps a group. Groups 0 and 2 earn the same,
    # groups 1, 3, 4, ... do not. Without more steps: group 0 (4 steps, skipped), group 1 (8 >= 6). With half as many
    # again (9): after group 1 8 < 9 steps are taken, only 4 of them informative: group 2 opens. With 18: after group 2
    # 12 are taken, still 4 informative: group 3 opens, and 8 >= 6 are informative.
    env = ScriptedGroupEnv(2, [2], rewards=[1, 1, 1, 2, 1, 1, 1, 2, 1, 2, 1, 2])
    cfg = CollectionCfg(dynamic_sampling=budget)
    collector, _ = collect_groups(env, 3, slots=16, group_size=2, collection=cfg)
    assert (collector.metrics()["rollout/groups"], collector.metrics()["rollout/filtered_groups"]) == (groups, skipped)
    assert collector.last_steps == env.taken == 4 * groups
    assert collector.metrics()["rollout/filtered_steps"] == skipped / groups


def test_a_group_takes_a_block_when_all_its_rows_are_free():
    # two blocks of two rows; episodes last 1, 3, 2, 2: rows 2 and 3 are free first, row 0 waits for row 1
    env = ScriptedGroupEnv(4, [1, 3, 2, 2, 1, 1, 1, 1, 1, 1], block_size=2)
    _, rollout = collect_groups(env, 3, group_size=2)
    assert numbers(rollout, "group_id") == [[0, -1, -1, 3], [0, 0, 0, 3], [1, 1, 2, 4], [1, 1, 2, 4]]
    assert [rows for rows, _, _ in env.start_calls] == [[0, 1, 2, 3], [2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"group_size": 3}, r"but a group has 3 episodes; fix: group_size=2"),
        ({"greedy_members": 1}, r"but a group has 3 episodes; fix: group_size=1"),
        ({"collection": CollectionCfg(on_env_error="retry")}, r"cannot be retried alone.*fix: on_env_error='drop'"),
    ],
)
def test_blocks_refuse_what_they_cannot_do(settings, message):
    with pytest.raises(EnvError, match=f"Scripted starts blocks of 2 rows together, .*{message}"):
        collect_groups(ScriptedGroupEnv(4, [2], block_size=2), 3, **{"group_size": 2} | settings)


@given(
    num_envs=st.integers(1, 5),
    group_size=st.integers(2, 5),
    num_steps=st.integers(1, 6),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    fails=st.dictionaries(st.integers(0, 20), st.integers(1, 4), max_size=6),
    rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=5),
    cfg=st.builds(
        CollectionCfg,
        on_env_error=st.sampled_from(["retry", "drop"]),
        dynamic_sampling=st.sampled_from([None, 0.0, 1.0]),
    ),
    greedy_members=st.integers(0, 1),
)
def test_every_step_is_trained_on_filtered_greedy_or_wasted(
    num_envs, group_size, num_steps, lengths, fails, rewards, cfg, greedy_members
):
    how = {
        "slots": 2,
        "actor_only": True,
        "group_size": group_size,
        "collection": cfg,
        "greedy_members": greedy_members,
    }
    env, again = (ScriptedGroupEnv(num_envs, lengths, fails=fails, rewards=rewards) for _ in range(2))
    collector, rollout = collect_groups(env, num_steps, **how)
    metrics, steps = collector.metrics(), collector.last_steps
    assert steps == env.taken
    wasted, filtered = (round(metrics.get(f"rollout/{name}_steps", 0.0) * steps) for name in ("wasted", "filtered"))
    greedy = rollout["greedy"].sum() if greedy_members else 0
    trained = rollout["loss_mask"].sum()
    assert trained + filtered + wasted <= steps <= trained + filtered + wasted + greedy
    assert rollout["valid"].sum() == steps - wasted
    assert_whole_groups(rollout, group_size + greedy_members)
    assert (collect_groups(again, num_steps, **how)[1] == rollout).all()


def assert_whole_groups(rollout, group_size):
    """Every valid slot belongs to an episode without gaps, in one row, of a group with all its members."""
    valid = rollout["valid"][:, :-1]
    for key in ("episode_id", "group_id"):
        assert ((rollout[key][:, :-1] >= 0) == valid).all()
    count = int(rollout["episode_id"].max()) + 1
    groups = []
    for episode in range(count):
        row, column = (rollout["episode_id"][:, :-1] == episode).nonzero(as_tuple=True)
        assert len(set(row.tolist())) == 1
        assert column.tolist() == list(range(column[0], column[0] + len(column)))
        assert rollout["step"][row, column].tolist() == list(range(len(column)))
        done = (rollout["terminated"] | rollout["truncated"])[row, column]
        assert done.tolist() == [False] * (len(column) - 1) + [True]
        (group,) = set(rollout["group_id"][row, column].tolist())
        groups.append(group)
    assert torch.bincount(torch.tensor(groups, dtype=torch.int64)).tolist() == [group_size] * (count // group_size)
