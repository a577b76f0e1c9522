"""A policy, an environment, a collector and an algorithm that are just large enough to train."""

from dataclasses import dataclass

import gymnasium
import numpy as np
import pytest
import torch

import groupwise as gw
from groupwise.algorithms.base import BaseAlgorithm
from groupwise.collectors.vector import Collector, Episode
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.data.rollout import RolloutBuffer, TensorSpec
from groupwise.envs.base import EnvStep, GroupEnv
from groupwise.training.trainer import Trainer


class CountdownEnv(GroupEnv):
    """Row with start seed s lasts ``s % 7 + 1`` steps; action 1 earns the noise stream's next number, action 0 nothing."""

    env_id = "Countdown"
    observation_space = "Countdown observations"
    action_space = "Countdown actions"
    obs_spec = TensorSpec((1,), torch.float32)
    max_episode_steps = None
    start_mode = "seed"

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.left = np.zeros(num_envs, dtype=np.int64)
        self.noise = [np.random.default_rng(0)] * num_envs

    def start(self, mask, start_seed, noise_seed):
        self.left = np.where(mask, start_seed % 7 + 1, self.left)
        self.noise = [
            np.random.default_rng(s) if m else n for m, s, n in zip(mask, noise_seed, self.noise, strict=True)
        ]
        return self._obs()

    def pause(self, mask):
        self.left = np.where(mask, 0, self.left)

    def reset(self, *, seed=None, mask=None):
        raise AssertionError("evaluation starts rows, it does not reset")

    def step(self, action):
        live = self.left > 0
        reward = [n.random() * a if on else 0.0 for on, n, a in zip(live, self.noise, action.tolist(), strict=True)]
        self.left = np.maximum(self.left - 1, 0)
        ended = torch.from_numpy(live & (self.left == 0))
        return EnvStep(self._obs(), torch.tensor(reward, dtype=torch.float32), ended, torch.zeros_like(ended))

    def close(self):
        pass

    def _obs(self):
        return torch.from_numpy(self.left[:, None].astype(np.float32))


class OneEpisodeCollector(Collector):
    """Each rollout is one episode a row; its return is the number of the rollout."""

    def collect(self, num_steps, rollout):
        self.last_steps = rollout.shape[0] * num_steps
        rollout["obs"].copy_(torch.rand(rollout["obs"].shape))
        rollout["valid"][:, :num_steps] = True
        rollout["loss_mask"][:, :num_steps] = True
        self.iteration += 1
        self.finished = [Episode(float(self.iteration), num_steps, True)]
        self.recent.extend(self.finished)
        return rollout

    def close(self):
        pass


class LikelihoodCfg(AlgorithmCfg):
    name: str = "likelihood"


class Likelihood(BaseAlgorithm):
    """Makes what was done more likely: enough to move the parameters and the optimiser's state."""

    actor_only = True
    metric_names = ("loss",)

    def update(self, rollout):
        loss = -self.policy.evaluate({"obs": rollout["obs"], "action": rollout["action"]}).log_prob.mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.policy.get_buffer("count").add_(1)
        self.iteration += 1
        return {"train/loss": loss.detach()}


@dataclass
class Parts:
    """Parts that tests build trainers of."""

    def policy(self):
        torch.manual_seed(0)
        space, actions = gymnasium.spaces.Box(-1, 1, (1,), np.float32), gymnasium.spaces.Discrete(2)
        policy = gw.ActorCritic(space, actions, gw.PolicyCfg(hidden_sizes=(4,)), actor_only=True)
        policy.register_buffer("count", torch.zeros(()))  # of updates
        return policy

    def env(self, num_envs):
        return CountdownEnv(num_envs)

    def trainer(self, *callbacks, total_steps=40, algorithm=Likelihood):
        """10 environment steps an iteration (2 rows of 5)."""
        policy = self.policy()
        buffer = RolloutBuffer(2, 5, obs_spec=TensorSpec((1,), torch.float32), action_spec=policy.action_spec)
        return Trainer(
            algorithm(LikelihoodCfg(), policy),
            OneEpisodeCollector(),
            buffer,
            num_steps=5,
            total_steps=total_steps,
            callbacks=callbacks,
        )

    @property
    def likelihood(self):
        return Likelihood


@pytest.fixture(scope="session")
def parts():
    return Parts()
