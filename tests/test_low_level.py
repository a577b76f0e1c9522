"""The parts that researchers compose, put together by hand."""

import copy
import math

import pytest
import torch

import groupwise as gw


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_updates_from_parts(name: str):
    torch.manual_seed(0)
    num_steps, fields, critic = 24, {"num_epochs": 2, "minibatch_size": 32}, name == "ppo"
    env = gw.make_env(gw.EnvCfg(id="CartPole-v1", num_envs=4), grouped=not critic)
    policy = gw.ActorCritic(env.observation_space, env.action_space, actor_only=not critic)
    algorithm: gw.PPO | gw.GRPO
    collector: gw.VectorCollector | gw.GroupCollector
    if critic:
        algorithm, collector = gw.PPO(gw.PPOCfg(**fields), policy), gw.VectorCollector(env, policy)
    else:
        algorithm = gw.GRPO(gw.GRPOCfg(group_size=4, **fields), policy)
        collector = gw.GroupCollector(env, policy, group_size=4)
    specs = {"obs_spec": env.obs_spec, "action_spec": policy.action_spec}
    buffer = gw.RolloutBuffer(env.num_envs, num_steps, value=critic, **specs)
    before = copy.deepcopy(policy.state_dict())

    rollout = collector.collect(num_steps, rollout=buffer.start_rollout())
    buffer.add(rollout)
    metrics = algorithm.update(buffer.get())

    env.close()
    after = policy.state_dict()
    assert all(not torch.equal(value, after[name]) for name, value in before.items())
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["train/grad_norm"] > 0
