"""Classic control tasks in torch: thousands of rows a step, on the CPU or a GPU."""

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


class TorchPendulum(TorchGroupEnv):
    """Gymnasium's Pendulum-v1, in float32. Starts have the same distribution, from other random streams."""

    GRAVITY = 10.0
    SECONDS = 0.05
    MAX_SPEED = 8.0
    MAX_TORQUE = 2.0

    def __init__(self, num_envs: int, *, max_episode_steps: int = 200, device: torch.device | str = "cpu") -> None:
        high = np.array([1.0, 1.0, self.MAX_SPEED], dtype=np.float32)
        super().__init__(
            num_envs,
            observation_space=spaces.Box(-high, high, dtype=np.float32),
            action_space=spaces.Box(-self.MAX_TORQUE, self.MAX_TORQUE, (1,), np.float32),
            max_episode_steps=max_episode_steps,
            device=device,
        )

    def initial(self, random: RowRandom) -> Float[Tensor, "row 2"]:
        """Angle from the top and angular velocity [N, 2]: anywhere, at a speed of at most 1."""
        return torch.cat([random.uniform(1, low=-math.pi, high=math.pi), random.uniform(1, low=-1.0, high=1.0)], dim=1)

    def transition(
        self, state: Float[Tensor, "row 2"], action: Float[Tensor, "row 1"], random: RowRandom
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step of 0.05 s with a torque; costs distance from the top, speed and torque, and never terminates."""
        angle, speed = state.unbind(1)
        torque = action[:, 0].clamp(-self.MAX_TORQUE, self.MAX_TORQUE)
        off = torch.remainder(angle + math.pi, 2 * math.pi) - math.pi
        cost = off.square() + 0.1 * speed.square() + 0.001 * torque.square()
        speed = speed + (1.5 * self.GRAVITY * angle.sin() + 3.0 * torque) * self.SECONDS
        speed = speed.clamp(-self.MAX_SPEED, self.MAX_SPEED)
        angle = angle + speed * self.SECONDS
        return torch.stack([angle, speed], dim=1), -cost, torch.zeros_like(cost, dtype=torch.bool)

    def observe(self, state: Float[Tensor, "row 2"]) -> Float[Tensor, "row 3"]:
        """Cosine and sine of the angle, and the angular velocity [N, 3]."""
        angle, speed = state.unbind(1)
        return torch.stack([angle.cos(), angle.sin(), speed], dim=1)
