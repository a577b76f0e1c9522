import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from noisy_envs import GlobalStart
from scripted_envs import FakePolicy, ScriptedGroupEnv, WalkEnv, buffer_for, check, collect_groups

from groupwise.collectors.groups import GroupCollector
from groupwise.collectors.vector import Episode
from groupwise.config.algorithm import CollectionCfg, GRPOCfg, PPOCfg
from groupwise.config.run import EnvCfg
from groupwise.data.rollout import RolloutBuffer
from groupwise.envs.make import make_env
from groupwise.errors import EnvError, GroupStartError

T, F = True, False


@pytest.mark.parametrize("slots", [1, 2, 5, 64])
def test_two_rows_and_a_group_of_three_by_hand(slots):
    # episodes last 2, 4 and 3 steps. Row 0 takes episode 0 then 2; row 1 takes episode 1 and is idle for one slot.
    # Budget 2 rows * 3 steps = 6; when row 1 is free 8 steps are taken, so no second group opens.
    collector, rollout = collect_groups(ScriptedGroupEnv(2, [2, 4, 3]), 3, slots=slots, group_size=3)
    check(
        rollout,
        obs=[[0, 1, 20, 21, 22, 23], [10, 11, 12, 13, 14, 14]],
        reward=[[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]],
        terminated=[[F, T, F, F, T, F], [F, F, F, T, F, F]],
        truncated=[[F] * 6, [F] * 6],
        valid=[[T, T, T, T, T, F], [T, T, T, T, F, F]],
        loss_mask=[[T, T, T, T, T, F], [T, T, T, T, F, F]],
        episode_id=[[0, 0, 2, 2, 2, -1], [1, 1, 1, 1, -1, -1]],
        group_id=[[0, 0, 0, 0, 0, -1], [0, 0, 0, 0, -1, -1]],
        step=[[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 0]],
        value=[[0, 1, 20, 21, 22, 23], [10, 11, 12, 13, 14, 14]],
        next_value=[[1, 0, 21, 22, 0, 0], [11, 12, 13, 0, 14, 0]],
    )
    assert collector.finished == [Episode(2.0, 2, True), Episode(4.0, 4, True), Episode(3.0, 3, True)]
    assert collector.last_steps == 9
    assert collector.metrics() == {
        "rollout/env_steps": 9.0,
        "rollout/episodes": 3.0,
        "rollout/return_mean": 3.0,
        "rollout/length_mean": 3.0,
        "rollout/groups": 1.0,
        "rollout/idle_fraction": pytest.approx(0.1),  # 1 of 2 * 5 slots
        "rollout/wasted_steps": 0.0,
    }


@pytest.mark.parametrize(
    ("end", "terminated", "next_value"),
    [
        ("truncated", False, [[1, 2, 21, 22, 23, 0], [11, 12, 13, 14, 14, 0]]),
        ("both", True, [[1, 0, 21, 22, 0, 0], [11, 12, 13, 0, 14, 0]]),
    ],
)
def test_an_episode_is_worth_its_final_observation_where_it_is_truncated_only(end, terminated, next_value):
    collector, rollout = collect_groups(ScriptedGroupEnv(2, [2, 4, 3], end=end), 3, group_size=3)
    check(rollout, next_value=next_value)
    assert [episode.terminated for episode in collector.finished] == [terminated] * 3


def test_the_next_group_opens_while_the_budget_lasts():
    # budget 2 * 2 = 4. Episodes last 1, 3, 2, 2. At slot 1 row 0 is free with 2 steps taken: group 1 opens.
    # At slot 3 both rows are free and one episode is left.
    collector, rollout = collect_groups(ScriptedGroupEnv(2, [1, 3, 2, 2]), 2, group_size=2)
    check(
        rollout,
        episode_id=[[0, 2, 2, 3, 3, -1], [1, 1, 1, -1, -1, -1]],
        group_id=[[0, 1, 1, 1, 1, -1], [0, 0, 0, -1, -1, -1]],
        step=[[0, 0, 1, 0, 1, 0], [0, 1, 2, 0, 0, 0]],
    )
    assert collector.last_steps == 8
    assert collector.metrics()["rollout/groups"] == 2.0


def test_a_window_cuts_episodes_and_holds_rows_without_another():
    env = ScriptedGroupEnv(2, [5, 1])
    collector, rollout = collect_groups(env, 1, group_size=2, horizon=2)
    check(
        rollout,
        truncated=[[F, T, F], [F, F, F]],
        terminated=[[F, F, F], [T, F, F]],
        valid=[[T, T, F], [T, F, F]],
        next_value=[[1, 2, 0], [0, 11, 0]],
    )
    assert env.paused[-1] == [0, 1]
    assert collector.finished == [Episode(1.0, 1, True), Episode(2.0, 2, False)]


def test_an_end_at_the_window_is_no_cut():
    _, rollout = collect_groups(ScriptedGroupEnv(2, [2]), 1, group_size=2, horizon=2)
    check(rollout, truncated=[[F, F, F], [F, F, F]], terminated=[[F, T, F], [F, T, F]])


def test_starts_due_together_are_made_in_one_call_and_members_share_the_start_only():
    env = ScriptedGroupEnv(4, [2])
    collect_groups(env, 3, group_size=2)
    assert [rows for rows, _, _ in env.start_calls] == [[0, 1, 2, 3], [0, 1, 2, 3]]
    starts = [seed for _, seeds, _ in env.start_calls for seed in seeds]
    noises = [seed for _, _, seeds in env.start_calls for seed in seeds]
    assert starts[::2] == starts[1::2]
    assert len(set(starts)) == 4
    assert len(set(noises)) == 8
    other = ScriptedGroupEnv(4, [2])
    collect_groups(other, 3, group_size=2, iteration=1)
    assert not {seed for _, seeds, _ in other.start_calls for seed in seeds} & set(starts)


def test_an_episode_that_might_never_end_is_refused():
    with pytest.raises(EnvError, match=r"Scripted has no known step limit.*fix: env.max_episode_steps.*horizon"):
        GroupCollector(ScriptedGroupEnv(2, [2], limit=None), FakePolicy(), group_size=2)


@given(
    num_envs=st.integers(1, 5),
    group_size=st.integers(1, 6),
    num_steps=st.integers(1, 6),
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=9),
)
def test_whole_groups_without_gaps_within_the_budget(num_envs, group_size, num_steps, lengths):
    env = ScriptedGroupEnv(num_envs, lengths)
    collector, rollout = collect_groups(env, num_steps, slots=2, actor_only=True, group_size=group_size)
    episode, group, valid = (rollout[key][:, :-1] for key in ("episode_id", "group_id", "valid"))
    count = torch.bincount(episode[valid])
    assert count.tolist() == [lengths[k % len(lengths)] for k in range(len(count))]
    assert len(count) % group_size == 0
    assert torch.equal(group[valid], episode[valid] // group_size)
    assert (valid[:, 1:] <= valid[:, :-1]).all(), "a row that is idle once stays idle"
    assert collector.last_steps == valid.sum() == count.sum()
    # the last group opened while steps were left, and none were left when rows ran out of episodes
    begins = (rollout["step"][:, :-1] == 0) & valid
    opened_at = (begins & (episode == len(count) - group_size)).any(dim=0).nonzero().item()
    assert valid[:, :opened_at].sum() < num_envs * num_steps <= collector.last_steps


@pytest.mark.parametrize("num_envs", [1, 2, 5])
def test_members_share_the_start_bit_for_bit_and_not_the_noise(num_envs):
    env = make_env(EnvCfg(num_envs=num_envs), grouped=True, env=WalkEnv)
    _, rollout = collect_groups(env, 20, slots=64, group_size=3, horizon=12)
    first = (rollout["step"] == 0) & rollout["valid"]
    obs, group = rollout["obs"][first], rollout["group_id"][first]
    second = rollout["obs"].roll(-1, dims=1)[first]
    # what the walk moved by apart from the action's 0.1
    drift = second[:, 1] - obs[:, 1] - 0.1 * rollout["action"][first]
    for g in range(int(group.max()) + 1):
        starts = obs[group == g]
        assert starts.shape == (3, 2)
        assert torch.equal(starts, starts[:1].expand(3, 2))
        assert drift[group == g].sort().values.diff().min() > 1e-4
    assert len(obs[:, 0].unique()) == int(group.max()) + 1


def test_held_rows_take_no_inner_step():
    inner = []

    def make():
        inner.append(WalkEnv())
        return inner[-1]

    env = make_env(EnvCfg(num_envs=4), grouped=True, env=make)
    before = sum(env.steps_taken for env in inner)
    collector, rollout = collect_groups(env, 5, slots=64, group_size=3, horizon=7)
    assert collector.metrics()["rollout/idle_fraction"] > 0
    assert sum(env.steps_taken for env in inner) - before == collector.last_steps == rollout["valid"].sum()


def test_both_ways_to_start_cartpole_give_the_same_rollout():
    by_state, by_seed = (
        collect_groups(make_env(EnvCfg(num_envs=3, vectorization=v), grouped=True), 60, slots=64, group_size=4)[1]
        for v in ("entry_point", "sync")
    )
    valid = by_state["valid"]
    assert torch.equal(valid, by_seed["valid"])
    for key in ("obs", "reward", "next_value", "action", "terminated"):
        assert torch.equal(by_state[key][valid], by_seed[key][valid]), key


@pytest.mark.parametrize("make_from", ["walk", "cartpole"])
def test_a_fresh_collector_goes_on_bit_for_bit(make_from):
    def last_rollout(first, iterations):
        source = {"env": WalkEnv} if make_from == "walk" else {}
        env = make_env(EnvCfg(num_envs=3), grouped=True, **source)
        policy = FakePolicy()
        collector = GroupCollector(env, policy, group_size=2, collection=CollectionCfg(horizon=9), seed=5)
        collector.iteration = first
        buffer = buffer_for(env, policy, 64)
        for _ in range(iterations):
            rollout = collector.collect(10, buffer.start_rollout())
        assert collector.iteration == first + iterations
        return rollout

    assert (last_rollout(0, 3) == last_rollout(2, 1)).all()
    assert (last_rollout(0, 1) == last_rollout(0, 1)).all()
    for key in ("obs", "action"):
        assert not torch.equal(last_rollout(0, 1)[key][:, 0], last_rollout(1, 1)[key][:, 0]), key


def test_parts_of_the_reward_are_kept():
    class Env(ScriptedGroupEnv):
        def step(self, action):
            step = super().step(action)
            return step._replace(info={"reward_parts": torch.stack([step.reward, -2 * step.reward], dim=1)})

    env, policy = Env(2, [2, 4, 3]), FakePolicy(True)
    collector = GroupCollector(env, policy, group_size=3)
    buffer = RolloutBuffer(2, 2, obs_spec=env.obs_spec, action_spec=policy.action_spec, reward_parts=2)
    rollout = collector.collect(3, buffer.start_rollout())
    buffer.add(rollout)
    assert rollout["reward_parts"][1].tolist() == [[1, -2], [1, -2], [1, -2], [1, -2], [0, 0], [0, 0]]


def test_a_cheating_environment_is_refused_before_anything_is_learned():
    env = make_env(EnvCfg(num_envs=2), grouped=True, env=GlobalStart, verify=False)
    with pytest.raises(GroupStartError, match=r"GlobalStart.*at the start.*self\.np_random"):
        GroupCollector(env, FakePolicy(), group_size=2, collection=CollectionCfg(horizon=5))


def test_every_algorithm_says_how_its_episodes_are_collected():
    greedy = {"baseline": "greedy", "scale": "none"}
    grouped = GRPOCfg(group_size=3, credit=greedy, collection={"horizon": 5})
    assert grouped.groups == (3, 1, CollectionCfg(horizon=5))
    assert PPOCfg().groups == (1, 0, CollectionCfg())
    assert "collection" not in PPOCfg().model_dump()
