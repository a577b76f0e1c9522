"""CartPole in torch: thousands of rows a step, on the CPU or a GPU."""

import math

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.envs.torch_env import TorchGroupEnv
from groupwise.functional.random import RowRandom


class TorchCartPole(TorchGroupEnv):
    """Gymnasium's CartPole-v1, in float32. Starts have the same distribution, from other random streams.

    Source: Barto, Sutton, Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems",
    1983; constants and Euler's method as in Gymnasium's ``CartPoleEnv``.
    """

    GRAVITY = 9.8
    MASS_POLE = 0.1
    MASS_TOTAL = 1.1
    HALF_LENGTH = 0.5
    FORCE = 10.0
    SECONDS = 0.02
    MAX_POSITION = 2.4
    MAX_ANGLE = 12 * 2 * math.pi / 360

    def __init__(self, num_envs: int, *, max_episode_steps: int = 500, device: torch.device | str = "cpu") -> None:
        high = np.array([2 * self.MAX_POSITION, np.inf, 2 * self.MAX_ANGLE, np.inf], dtype=np.float32)
        super().__init__(
            num_envs,
            observation_space=spaces.Box(-high, high, dtype=np.float32),
            action_space=spaces.Discrete(2),
            max_episode_steps=max_episode_steps,
            device=device,
        )

    def initial(self, random: RowRandom) -> Float[Tensor, "row 4"]:
        """Position, velocity, angle and angular velocity [N, 4], each within 0.05 of rest."""
        return random.uniform(4, low=-0.05, high=0.05)

    def transition(
        self, state: Float[Tensor, "row 4"], action: Int[Tensor, " row"], random: RowRandom
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step of 0.02 s with a push to the left (0) or right (1); 1 is earned, and the pole may fall."""
        x, x_dot, theta, theta_dot = state.unbind(1)
        force = (2 * action - 1) * self.FORCE
        cos, sin = theta.cos(), theta.sin()
        pole = self.MASS_POLE * self.HALF_LENGTH
        push = (force + pole * theta_dot.square() * sin) / self.MASS_TOTAL
        inertia = self.HALF_LENGTH * (4.0 / 3.0 - self.MASS_POLE * cos.square() / self.MASS_TOTAL)
        theta_acc = (self.GRAVITY * sin - cos * push) / inertia
        x_acc = push - pole * theta_acc * cos / self.MASS_TOTAL
        rates = torch.stack([x_dot, x_acc, theta_dot, theta_acc], dim=1)
        state = state + self.SECONDS * rates
        fell = (state[:, 0].abs() > self.MAX_POSITION) | (state[:, 2].abs() > self.MAX_ANGLE)
        return state, torch.ones_like(x), fell
