"""Small policies that see, read and act, for the robot of ``robots`` with chunks of actions."""

from functools import partial

import robots
import torch
from robots import Robot

import groupwise as gw
from groupwise.algorithms.grpo import GRPO
from groupwise.algorithms.ppo import PPO
from groupwise.envs.gymnasium import ActionChunk

C, A, BINS = 3, 2, 5
ENV = ActionChunk(Robot(), C)
TINY = {"hidden_size": 32, "num_layers": 1, "patch_size": 4, "bins": BINS}
observations = partial(robots.observations, ENV)


def make_policy(actor_only=True, seed=0, **cfg):
    """A new policy whose answers differ: new heads give 0, or nearly so."""
    torch.manual_seed(seed)
    cfg = gw.config.VLACfg(**TINY | cfg)
    return stirred(gw.VLAPolicy(ENV.observation_space, ENV.action_space, cfg, actor_only=actor_only))


def stirred(policy):
    """The policy with noise on its weights."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return policy


def scores(policy, obs, action):
    return policy.evaluate({"obs": obs, "action": action})


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def updated(policy, **cfg):
    """The weights after an update, and its metrics."""
    shared = {"num_epochs": 2, "minibatch_size": 6, "learning_rate": 1e-3, "optimizer": {"eps": 1e-3}} | cfg
    if policy.actor_only:
        algorithm = GRPO(gw.GRPOCfg(kl_coef=0.1, **shared), policy)
    else:
        algorithm = PPO(gw.PPOCfg(**shared), policy)
    metrics = algorithm.update(robots.make_rollout(ENV, policy))
    return torch.cat([p.detach().flatten() for p in policy.parameters()]), metrics
