"""Acrobot and MountainCar in torch: thousands of rows a step, on the CPU or a GPU."""

import math

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.envs.torch_env import TorchGroupEnv
from groupwise.functional.random import RowRandom


class TorchAcrobot(TorchGroupEnv):
    """Gymnasium's Acrobot-v1, in float32. Starts have the same distribution, from other random streams.

    Source: Sutton, Barto, "Reinforcement Learning: An Introduction", 2018, whose equations are Gymnasium's default
    (``book_or_nips = "book"``); constants and the method of Runge and Kutta as in Gymnasium's ``AcrobotEnv``.
    """

    GRAVITY = 9.8
    SECONDS = 0.2
    LENGTH = 1.0
    CENTRE = 0.5
    INERTIA = 1.0
    """Of each link about its centre of mass; a link weighs 1 kg."""
    MAX_RATES = (4 * math.pi, 9 * math.pi)
    HEIGHT = 1.0

    def __init__(self, num_envs: int, *, max_episode_steps: int = 500, device: torch.device | str = "cpu") -> None:
        high = np.array([1.0, 1.0, 1.0, 1.0, *self.MAX_RATES], dtype=np.float32)
        super().__init__(
            num_envs,
            observation_space=spaces.Box(-high, high, dtype=np.float32),
            action_space=spaces.Discrete(3),
            max_episode_steps=max_episode_steps,
            device=device,
        )

    def initial(self, random: RowRandom) -> Float[Tensor, "row 4"]:
        """Angles of both joints from hanging straight down, and their rates [N, 4], each within 0.1."""
        return random.uniform(4, low=-0.1, high=0.1)

    def transition(
        self, state: Float[Tensor, "row 4"], action: Int[Tensor, " row"], random: RowRandom
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step of 0.2 s with a torque of -1, 0 or 1 N m at the elbow; costs 1 until the tip is high enough."""
        torque, half = action - 1, self.SECONDS / 2
        slope = self._slope(state, torque)  # the classical method of Runge and Kutta
        second = self._slope(state + half * slope, torque)
        third = self._slope(state + half * second, torque)
        fourth = self._slope(state + self.SECONDS * third, torque)
        angle, rate = (state + self.SECONDS / 6 * (slope + 2 * (second + third) + fourth)).chunk(2, dim=1)
        high = -angle[:, 0].cos() - angle.sum(dim=1).cos() > self.HEIGHT
        angle = angle - 2 * math.pi * torch.round(angle / (2 * math.pi))
        first, last = self.MAX_RATES
        rates = [rate[:, :1].clamp(-first, first), rate[:, 1:].clamp(-last, last)]
        return torch.cat([angle, *rates], dim=1), high.to(torch.float32) - 1.0, high

    def _slope(self, state: Float[Tensor, "row 4"], torque: Int[Tensor, " row"]) -> Float[Tensor, "row 4"]:
        """Rates and accelerations of both joints [N, 4]; names as in the book."""
        theta1, theta2, rate1, rate2 = state.unbind(1)
        sin2, cos2 = self.LENGTH * self.CENTRE * theta2.sin(), self.LENGTH * self.CENTRE * theta2.cos()
        own = self.CENTRE**2 + self.INERTIA
        d1 = 2 * own + self.LENGTH**2 + 2 * cos2
        d2 = own + cos2
        phi2 = self.CENTRE * self.GRAVITY * (theta1 + theta2).sin()
        phi1 = (self.CENTRE + self.LENGTH) * self.GRAVITY * theta1.sin() + phi2 - sin2 * rate2 * (rate2 + 2 * rate1)
        second = (torque + d2 / d1 * phi1 - sin2 * rate1.square() - phi2) / (own - d2.square() / d1)
        first = -(d2 * second + phi1) / d1
        return torch.stack([rate1, rate2, first, second], dim=1)

    def observe(self, state: Float[Tensor, "row 4"]) -> Float[Tensor, "row 6"]:
        """Cosine and sine of the first angle, then of the second one, and both rates [N, 6]."""
        first, second, first_rate, second_rate = state.unbind(1)
        return torch.stack([first.cos(), first.sin(), second.cos(), second.sin(), first_rate, second_rate], dim=1)


class _MountainCar(TorchGroupEnv):
    """A car in a valley, whose engine is too weak for the slope."""

    GRAVITY = 0.0025
    MIN_POSITION = -1.2
    MAX_POSITION = 0.6
    MAX_SPEED = 0.07

    ACTIONS: spaces.Space
    STEP_LIMIT: int

    def __init__(
        self, num_envs: int, *, max_episode_steps: int | None = None, device: torch.device | str = "cpu"
    ) -> None:
        low = np.array([self.MIN_POSITION, -self.MAX_SPEED], dtype=np.float32)
        high = np.array([self.MAX_POSITION, self.MAX_SPEED], dtype=np.float32)
        super().__init__(
            num_envs,
            observation_space=spaces.Box(low, high, dtype=np.float32),
            action_space=self.ACTIONS,
            max_episode_steps=max_episode_steps or self.STEP_LIMIT,
            device=device,
        )

    def initial(self, random: RowRandom) -> Float[Tensor, "row 2"]:
        """Position and velocity [N, 2]: at rest within 0.1 of -0.5, near the bottom."""
        position = random.uniform(1, low=-0.6, high=-0.4)
        return torch.cat([position, torch.zeros_like(position)], dim=1)

    def _roll(self, state: Float[Tensor, "row 2"], push: Float[Tensor, " row"]) -> tuple[Tensor, Tensor]:
        """Position and velocity [N] after one step with this push; the wall on the left stops the car."""
        position, velocity = state.unbind(1)
        velocity = (velocity + push - self.GRAVITY * (3 * position).cos()).clamp(-self.MAX_SPEED, self.MAX_SPEED)
        position = (position + velocity).clamp(self.MIN_POSITION, self.MAX_POSITION)
        return position, torch.where(position <= self.MIN_POSITION, velocity.clamp(min=0.0), velocity)


class TorchMountainCar(_MountainCar):
    """Gymnasium's MountainCar-v0, in float32. Starts have the same distribution, from other random streams.

    Source: Moore, "Efficient Memory-based Learning for Robot Control", 1990; constants as in Gymnasium's
    ``MountainCarEnv``.
    """

    FORCE = 0.001
    GOAL = 0.5
    ACTIONS = spaces.Discrete(3)
    STEP_LIMIT = 200

    def transition(
        self, state: Float[Tensor, "row 2"], action: Int[Tensor, " row"], random: RowRandom
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step with a push to the left (0), none (1) or to the right (2); costs 1, and the flag may be reached."""
        position, velocity = self._roll(state, (action - 1) * self.FORCE)
        reached = (position >= self.GOAL) & (velocity >= 0)
        return torch.stack([position, velocity], dim=1), -torch.ones_like(position), reached


class TorchMountainCarContinuous(_MountainCar):
    """Gymnasium's MountainCarContinuous-v0, in float32. Starts have the same distribution, from other random streams.

    Source: as ``TorchMountainCar``; constants as in Gymnasium's ``Continuous_MountainCarEnv``.
    """

    POWER = 0.0015
    GOAL = 0.45
    ACTIONS = spaces.Box(-1.0, 1.0, (1,), np.float32)
    STEP_LIMIT = 999

    def transition(
        self, state: Float[Tensor, "row 2"], action: Float[Tensor, "row 1"], random: RowRandom
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step with a push within 1; costs a tenth of the squared action, and the flag earns 100."""
        asked = action[:, 0]
        position, velocity = self._roll(state, self.POWER * asked.clamp(-1.0, 1.0))
        reached = (position >= self.GOAL) & (velocity >= 0)
        return torch.stack([position, velocity], dim=1), 100.0 * reached - 0.1 * asked.square(), reached
