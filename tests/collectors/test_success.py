"""Success of episodes, and the share of them that a rollout reports."""

from functools import partial

import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from scripted_envs import CHECKED, FakePolicy
from success_envs import TorchTouch, Touch, TouchEither

import groupwise as gw
from groupwise.collectors.groups import GroupCollector
from groupwise.collectors.torch import TorchGroupCollector, TorchVectorCollector
from groupwise.collectors.vector import Episode, VectorCollector, pool_metrics
from groupwise.config.algorithm import CollectionCfg
from groupwise.config.run import EnvCfg
from groupwise.data.rollout import RolloutBuffer
from groupwise.envs.gymnasium import GymnasiumVectorEnv
from groupwise.envs.make import make_env


def collected(collector, num_steps, windows=1):
    """The last of some rollouts."""
    env, policy = collector.env, collector.policy
    buffer = RolloutBuffer(
        env.num_envs, num_steps, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=not policy.actor_only
    )
    for _ in range(windows):
        rollout = collector.collect(num_steps, buffer.start_rollout())
    return rollout


def last_actions(rollout):
    """Whether the last action of each ended episode touched the goal, by (step, row)."""
    action = rollout["action"].reshape(rollout.shape)
    over = (rollout["terminated"] | rollout["truncated"])[:, :-1]
    return [bool(action[row, step]) for step, row in over.T.nonzero().tolist()]


def vector(key, mode, num_envs=4):
    env = SyncVectorEnv([partial(Touch, key)] * num_envs, autoreset_mode=AutoresetMode[mode.upper()])
    return GymnasiumVectorEnv(env, env_id="Touch", max_episode_steps=3)


def touches(key="is_success", **settings):
    cfg = EnvCfg(vectorization="sync", max_episode_steps=None)
    env = make_env(cfg, grouped=True, num_envs=4, env=partial(Touch, key, **settings), verify=False)
    env.start_report = CHECKED
    return env


def tell(collector, rollout):
    """Episodes know their success and task; the recent ones give the rate."""
    shown = rollout["obs"][..., 1]
    over = (rollout["terminated"] | rollout["truncated"])[:, :-1]
    names = [TouchEither.names[int(shown[row, step])] for step, row in over.T.nonzero().tolist()]
    assert [episode.task for episode in collector.finished] == names
    assert [episode.success for episode in collector.finished] == last_actions(rollout)
    assert {episode.task for episode in collector.recent} == {"left", "right"}
    assert {episode.success for episode in collector.recent} == {True, False}
    episodes = collector.recent_episodes()
    share = sum(episode.success for episode in episodes) / len(episodes)
    assert collector.metrics()["rollout/success_rate"] == pytest.approx(share)


@pytest.mark.parametrize("mode", ["disabled", "same_step", "next_step"])
def test_episodes_of_windows_know_success_and_task(mode):
    env = SyncVectorEnv([TouchEither] * 4, autoreset_mode=AutoresetMode[mode.upper()])
    collector = VectorCollector(GymnasiumVectorEnv(env, env_id="Touch", max_episode_steps=3), FakePolicy())
    tell(collector, collected(collector, 14, windows=2))


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_episodes_of_groups_know_success_and_task(vectorization):
    cfg = EnvCfg(vectorization=vectorization, max_episode_steps=None)
    env = make_env(cfg, grouped=True, num_envs=4, env=TouchEither, verify=False)
    env.max_episode_steps, env.start_report = 3, CHECKED
    collector = GroupCollector(env, FakePolicy(), group_size=2)
    tell(collector, collected(collector, 18))
    env.close()


def test_episodes_without_a_flag_count_as_failed_beside_those_with_one():
    collector = VectorCollector(vector(None, "disabled"), FakePolicy())
    collected(collector, 7)
    assert {episode.success for episode in collector.finished} == {None}
    assert "rollout/success_rate" not in collector.metrics()
    collector.recent.extend(Episode(0.0, 1, True, success) for success in (True, False))
    assert collector.metrics()["rollout/success_rate"] == 1 / len(collector.recent)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_episodes_that_the_horizon_cuts_know_success_and_task(vectorization):
    cfg, collection = EnvCfg(vectorization=vectorization, max_episode_steps=None), CollectionCfg(horizon=2)
    env = make_env(cfg, grouped=True, num_envs=4, env=TouchEither, verify=False)
    env.start_report = CHECKED
    collector = GroupCollector(env, FakePolicy(), group_size=2, collection=collection)
    rollout = collected(collector, 18)
    assert {episode.length for episode in collector.finished} == {2}
    tell(collector, rollout)
    env.close()


def test_a_cut_episode_without_a_flag_is_a_failure_of_its_task():
    class EasyOrNot(TouchEither):  # the left one ends with a flag, the right one goes on without
        def step(self, action):
            obs, reward, *_ = super().step(action)
            easy = self.index == 0
            return obs, reward, easy and self.count == 2, False, self.named() | ({"success": True} if easy else {})

    cfg = EnvCfg(vectorization="sync", max_episode_steps=None)
    env = make_env(cfg, grouped=True, num_envs=4, env=EasyOrNot, verify=False)
    env.start_report = CHECKED
    collector = GroupCollector(env, FakePolicy(), group_size=2, collection=CollectionCfg(horizon=2))
    collected(collector, 18)
    assert {(episode.task, bool(episode.success)) for episode in collector.finished} == {
        ("left", True),
        ("right", False),
    }
    pooled = pool_metrics([(collector.finished, {})])
    assert pooled == {"rollout/success_rate/left": 1.0, "rollout/success_rate/right": 0.0}


def test_names_of_tasks_alone_are_no_failures():
    assert pool_metrics([([Episode(0.0, 1, True, None, name) for name in ("left", "right")], {})]) == {}


def torch_collector(kind, lengths, **settings):
    torch.manual_seed(0)
    env = TorchTouch(len(lengths), lengths)
    env.start_report = CHECKED
    policy = gw.ActorCritic(
        env.observation_space, env.action_space, gw.PolicyCfg(hidden_sizes=(4,)), actor_only=bool(settings)
    )
    return kind(env, policy, seed=1, **settings)


def test_windows_in_torch_know_it_too():
    reference, ours = (torch_collector(kind, [2, 3, 4]) for kind in (gw.VectorCollector, TorchVectorCollector))
    rollout = collected(ours, 9, windows=2)
    collected(reference, 9, windows=2)
    assert ours.finished == reference.finished
    assert [episode.success for episode in ours.finished] == last_actions(rollout)
    assert ours.metrics()["rollout/success_rate"] == reference.metrics()["rollout/success_rate"]


def test_first_members_in_torch_know_it_too():
    # groups of rows 0, 1 and of 2, 3; first members last 2 and 3 steps, and wait for the second ones
    collector = torch_collector(TorchGroupCollector, [2, 4, 3, 3], group_size=2)
    rollout = collected(collector, 8)
    action = rollout["action"].reshape(rollout.shape)
    ends = [(0, 1), (2, 2), (0, 5), (2, 5)]
    assert [episode.length for episode in collector.finished] == [2, 3, 2, 3]
    assert [episode.success for episode in collector.finished] == [bool(action[row, step]) for row, step in ends]
