"""The parts that researchers compose, put together by hand."""

import copy
from typing import Any

import torch

import groupwise as gw
from groupwise.policies.base import Policy

NUM_STEPS = 24
FIELDS: dict[str, Any] = {"num_epochs": 2, "minibatch_size": 32}


def assert_learned(before: dict[str, torch.Tensor], policy: Policy, metrics: dict[str, torch.Tensor]) -> None:
    after = policy.state_dict()
    assert all(not torch.equal(value, after[name]) for name, value in before.items())
    assert all(metric.dim() == 0 and metric.isfinite() for metric in metrics.values())
    assert metrics["train/grad_norm"] > 0


def test_ppo_from_parts():
    torch.manual_seed(0)
    num_steps, cfg = NUM_STEPS, gw.PPOCfg(**FIELDS)
    env = gw.make_env(gw.EnvCfg(id="CartPole-v1", num_envs=4))
    policy = gw.ActorCritic(env.observation_space, env.action_space)
    collector = gw.VectorCollector(env, policy)
    buffer = gw.RolloutBuffer(
        env.num_envs, num_steps, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=True
    )
    before = copy.deepcopy(policy.state_dict())

    algo = gw.PPO(cfg, policy)
    rollout = collector.collect(num_steps, rollout=buffer.start_rollout())
    buffer.add(rollout)
    metrics = algo.update(buffer.get())

    env.close()
    assert_learned(before, policy, metrics)


def test_grpo_from_parts():
    torch.manual_seed(0)
    num_steps, cfg = NUM_STEPS, gw.GRPOCfg(group_size=4, **FIELDS)
    env = gw.make_env(gw.EnvCfg(id="CartPole-v1", num_envs=4), grouped=True)
    policy = gw.ActorCritic(env.observation_space, env.action_space, actor_only=True)
    collector = gw.GroupCollector(env, policy, group_size=cfg.group_size)
    buffer = gw.RolloutBuffer(env.num_envs, num_steps, obs_spec=env.obs_spec, action_spec=policy.action_spec)
    before = copy.deepcopy(policy.state_dict())

    algo = gw.GRPO(cfg, policy)
    rollout = collector.collect(num_steps, rollout=buffer.start_rollout())
    buffer.add(rollout)
    metrics = algo.update(buffer.get())

    env.close()
    assert_learned(before, policy, metrics)
