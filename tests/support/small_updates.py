"""PPO and GRPO on the same made-up rollout, once."""

import gymnasium as gym
import numpy as np
import torch

from groupwise.algorithms.grpo import GRPO
from groupwise.algorithms.ppo import PPO
from groupwise.config.algorithm import GRPOCfg, PPOCfg
from groupwise.config.policy import PolicyCfg
from groupwise.data.rollout import RolloutBuffer
from groupwise.data.spaces import obs_spec
from groupwise.policies.actor_critic import ActorCritic

SGD = "sgd"
OBS = gym.spaces.Box(-1, 1, (3,), np.float32)
ACT = gym.spaces.Discrete(3)


def make_policy(actor_only, **cfg):
    torch.manual_seed(0)
    return ActorCritic(OBS, ACT, PolicyCfg(hidden_sizes=(8,), **cfg), actor_only=actor_only)


def acted(policy, rows, steps, generator):
    """A buffer, and a rollout of actions on random observations without episodes."""
    specs = {"obs_spec": obs_spec(OBS), "action_spec": policy.action_spec}
    buffer = RolloutBuffer(rows, steps, **specs, value=not policy.actor_only)
    rollout = buffer.start_rollout()
    rollout["obs"].copy_(torch.rand(rows, steps + 1, 3, generator=generator) * 2 - 1)
    flat = policy.act(rollout["obs"].reshape(-1, 3), generator=generator)
    rollout["action"].copy_(flat.action.reshape(rollout["action"].shape))
    rollout["sample_log_prob"].copy_(flat.log_prob.reshape(rows, steps + 1))
    if not policy.actor_only:
        rollout["value"].copy_(flat.value.reshape(rows, steps + 1))
        rollout["next_value"][:, :-1] = rollout["value"][:, 1:]
    return buffer, rollout


def make_rollout(policy, seed=0, rows=8, steps=12):
    """Groups of 4 rows, episodes of 3 to 12 steps one after another, random rewards; ends are of both kinds."""
    g = torch.Generator().manual_seed(seed)
    buffer, rollout = acted(policy, rows, steps, g)
    episode = 0
    for row in range(rows):
        t = 0
        for turn in range(2):
            length = int(torch.randint(3, steps // 2 + 1, (1,), generator=g))
            span = slice(t, t + length)
            rollout["reward"][row, span] = torch.rand(length, generator=g)
            rollout["valid"][row, span] = rollout["loss_mask"][row, span] = True
            rollout["group_id"][row, span] = 2 * (row // 4) + turn
            rollout["episode_id"][row, span] = episode
            rollout["step"][row, span] = torch.arange(length)
            rollout["terminated" if episode % 3 else "truncated"][row, span.stop - 1] = True
            t, episode = span.stop, episode + 1
    buffer.add(rollout)
    return buffer.get()


def build(kind, seed=0, policy=None, fast=None, **cfg):
    """``fast``: arguments that replace parts of the algorithm."""
    cls, cfg_cls = {"ppo": (PPO, PPOCfg), "grpo": (GRPO, GRPOCfg)}[kind]
    policy = policy or make_policy(cls.actor_only)
    fixed = {"num_epochs": 1, "minibatch_size": 10_000, "optimizer": SGD, "learning_rate": 0.5, "max_grad_norm": None}
    return cls(cfg_cls(**fixed | cfg), policy, seed=seed, **fast or {})


def parameters(algorithm):
    return torch.cat([p.detach().flatten() for p in algorithm.policy.parameters()])


def updated(kind, rollout=None, **cfg):
    algorithm = build(kind, **cfg)
    metrics = algorithm.update(make_rollout(algorithm.policy) if rollout is None else rollout)
    return parameters(algorithm), metrics


GRPO_SHAPES = [
    {},
    {"aggregation": "seq_mean_token_mean"},
    {"aggregation": "seq_mean_token_sum"},
    {"aggregation": {"name": "constant", "max_length": 12}},
    {"ratio": "sequence", "aggregation": "seq_mean_token_mean"},
    {"ratio": "sequence_token"},
    {"ratio": "sequence_product", "trust_region": "dual_clip"},
    {"trust_region": "none"},
]
