"""A task in torch with a continuous action."""

import math

import numpy as np
import torch
from gymnasium import spaces

import groupwise as gw


class TorchPendulum(gw.TorchGroupEnv):
    """Gymnasium's Pendulum-v1."""

    def __init__(self, num_envs, *, max_episode_steps=200, device="cpu"):
        high = np.array([1.0, 1.0, 8.0], dtype=np.float32)
        super().__init__(
            num_envs,
            observation_space=spaces.Box(-high, high, dtype=np.float32),
            action_space=spaces.Box(-2.0, 2.0, (1,), np.float32),
            max_episode_steps=max_episode_steps,
            device=device,
        )

    def initial(self, random):
        return torch.cat([random.uniform(1, low=-math.pi, high=math.pi), random.uniform(1, low=-1.0, high=1.0)], dim=1)

    def transition(self, state, action, random):
        angle, speed = state.unbind(1)
        torque = action[:, 0].clamp(-2.0, 2.0)
        off = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = off.square() + 0.1 * speed.square() + 0.001 * torque.square()
        speed = (speed + (15.0 * angle.sin() + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
        angle = angle + speed * 0.05
        return torch.stack([angle, speed], dim=1), -cost, torch.zeros_like(cost, dtype=torch.bool)

    def observe(self, state):
        angle, speed = state.unbind(1)
        return torch.stack([angle.cos(), angle.sin(), speed], dim=1)
