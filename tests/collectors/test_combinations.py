"""Settings of groups in any combination."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.collectors.groups import GroupCollector
from groupwise.config.algorithm import CollectionCfg

COLLECTIONS = st.builds(
    CollectionCfg,
    on_env_error=st.sampled_from(["retry", "drop"]),
    dynamic_sampling=st.sampled_from([None, 0.0, 1.0]),
)


@pytest.mark.slow
@settings(max_examples=15)
@given(
    num_envs=st.integers(1, 4),
    group_size=st.integers(2, 3),
    num_steps=st.integers(1, 8),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    fails=st.dictionaries(st.integers(0, 30), st.integers(1, 4), max_size=3),
    rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=5),
    collection=COLLECTIONS,
    greedy_members=st.integers(0, 1),
)
def test_settings_can_be_combined(
    buffer_for, fake_policy, scripted_group, num_envs, group_size, num_steps, lengths, fails, rewards, **choices
):
    def run():
        env, policy = scripted_group(num_envs, lengths, fails=fails, rewards=rewards), fake_policy(True)
        collector = GroupCollector(env, policy, verify_start=False, group_size=group_size, **choices)
        buffer, total, rollouts = buffer_for(env, policy, 4), 0, []
        for _ in range(3):
            rollout = collector.collect(num_steps, buffer.start_rollout())
            buffer.add(rollout)
            rollouts.append(rollout.clone())
            total += collector.last_steps
            assert total == env.taken
            check(rollout)
        return rollouts

    def check(rollout):
        valid = rollout["valid"]
        assert (rollout["loss_mask"] <= valid).all()
        pairs = torch.stack([rollout["group_id"][valid], rollout["episode_id"][valid]]).unique(dim=1)
        assert pairs[1].sort().values.tolist() == list(range(pairs.shape[1])), "episodes belong to one group each"
        members = torch.bincount(pairs[0])
        assert (members == group_size + choices["greedy_members"]).all()
        steps = rollout["step"][valid]
        for episode in range(pairs.shape[1]):
            mine = rollout["episode_id"][valid] == episode
            assert steps[mine].tolist() == list(range(int(mine.sum())))

    for first, again in zip(run(), run(), strict=True):
        assert (first == again).all()
