"""Recurrent policies, and rollouts of them."""

import math

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from groupwise.collectors.groups import GroupCollector
from groupwise.collectors.vector import VectorCollector
from groupwise.config.algorithm import CollectionCfg
from groupwise.config.policy import RecurrentCfg
from groupwise.config.run import EnvCfg
from groupwise.data.rollout import RolloutBuffer
from groupwise.envs.gymnasium import GymnasiumVectorEnv
from groupwise.envs.make import make_env
from groupwise.policies.recurrent import RecurrentActorCritic


def averaging():
    """A policy whose state and value are an average of tanh(obs) that halves at each step: GRU gates of 1/2, and a new content
    of tanh(obs)."""
    space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    cfg = RecurrentCfg(cell="gru", hidden_size=1, hidden_sizes=(), trunk="shared")
    policy = RecurrentActorCritic(space, gymnasium.spaces.Discrete(2), cfg)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
        policy.encoder.layer.weight_ih_l0[2] = 1.0
        policy.critic.weight.fill_(1.0)
    return policy


class Steady(gymnasium.Env):
    """Always observes atanh(0.8). Episodes of 3, 5, 3, 5, ... steps; the longer ones are truncated."""

    observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    episode = -1
    obs = np.full(1, math.atanh(0.8), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return self.obs, {}

    def step(self, action):
        self.count += 1
        short = self.episode % 2 == 0
        return self.obs, 1.0, short and self.count == 3, not short and self.count == 5, {}


class Noise(Steady):
    """Random observations and lengths, of the same generator as the start."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = int(self.np_random.integers(1, 7))
        return self.look(), {}

    def step(self, action):
        self.count += 1
        over = self.count >= self.length
        even = self.length % 2 == 0
        return self.look(), float(self.np_random.normal() + action), over and even, over and not even, {}

    def look(self):
        return self.np_random.uniform(-1, 1, 1).astype(np.float32)


def vector_env(kind, rows, autoreset):
    """Rows of an environment in one of Gymnasium's autoreset modes."""
    env = SyncVectorEnv([kind] * rows, copy=False, autoreset_mode=AutoresetMode[autoreset.upper()])
    return GymnasiumVectorEnv(env, env_id=kind.__name__, max_episode_steps=None)


def small(actor_only=False, **settings):
    torch.manual_seed(0)
    cfg = RecurrentCfg(hidden_sizes=(8,), hidden_size=6, **settings)
    return RecurrentActorCritic(Noise.observation_space, Noise.action_space, cfg, actor_only=actor_only)


def buffer_of(env, policy, steps):
    return RolloutBuffer(
        env.num_envs,
        steps,
        obs_spec=env.obs_spec,
        action_spec=policy.action_spec,
        state_size=policy.state_size,
        value=not policy.actor_only,
    )


def vector_rollouts(policy, autoreset="same_step", count=3, rows=4, steps=12, kind=Noise):
    """Rollouts one after another."""
    env = vector_env(kind, rows, autoreset)
    collector, buffer = VectorCollector(env, policy, seed=0), buffer_of(env, policy, steps)
    for _ in range(count):
        buffer.add(collector.collect(steps, buffer.start_rollout()))
        yield buffer.get()


def group_rollouts(policy, count=2, rows=4, steps=12, greedy_members=0, **collection):
    """Rollouts of groups of 2, one after another."""
    env = make_env(EnvCfg(num_envs=rows, max_episode_steps=9, start_mode="seed"), grouped=True, env=Noise)
    cfg = CollectionCfg(**collection)
    collector = GroupCollector(env, policy, group_size=2, greedy_members=greedy_members, collection=cfg)
    buffer = buffer_of(env, policy, steps)
    for _ in range(count):
        buffer.add(collector.collect(steps, buffer.start_rollout()))
        yield buffer.get()
