"""Acrobot and MountainCar in torch: thousands of rows a step, on the CPU or a GPU."""

import math
from collections.abc import Callable

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.envs.torch_env import TorchGroupEnv
from groupwise.functional.row_random import RowRandom

Pair = Float[Tensor, "2 row"]
"""A number of each link; links come first, so that every operation runs over neighbours in memory."""


class TwoLinks:
    """Equations of motion of two rigid links in a plane, the second one at the end of the first.

    They are the same for both links in absolute angles: with ``p_i`` the angle of link ``i`` from a direction that is
    fixed, ``j`` the other link, ``I`` inertia and ``k`` the coupling,
    ``I_i p_i'' + k cos(p_i - p_j) p_j'' + k sin(p_i - p_j) p_j'^2 = force_i``.

    Args:
        inertia: of each link, in kg m^2. The first one's about its fixed end, with the second's mass at its other end;
            the second one's about the joint between them.
        coupling: mass of the second link times length of the first times distance from the joint to the second's
            centre of mass, in kg m^2.

    Source: Spong, Hutchinson, Vidyasagar, "Robot Modeling and Control", 2006, chapter 7: the planar elbow manipulator
    with remotely driven link, whose angles are absolute.
    """

    def __init__(self, inertia: tuple[float, float], coupling: float, device: torch.device | str = "cpu") -> None:
        first, second = inertia
        self._coupling = coupling
        self._other = torch.tensor([[second], [first]], dtype=torch.float32, device=device)
        self._product = torch.tensor([[first * second]], dtype=torch.float32, device=device)

    def acceleration(self, angle: Pair, rate: Pair, force: Pair) -> Pair:
        """Second derivatives [2, N] of the absolute angles, in rad/s^2.

        Args:
            force: generalised ones on the absolute angles, in N m: the torque of the joint between the links counts
                negatively for the first link.
        """
        lean = angle - angle.flip(0)
        cos = lean.cos()
        force = torch.addcmul(force, lean.sin(), rate.flip(0).square(), value=-self._coupling)
        solved = torch.addcmul(self._other * force, cos, force.flip(0), value=-self._coupling)
        return solved / torch.addcmul(self._product, cos, cos, value=-(self._coupling**2))


def absolute(joint: Pair) -> Pair:
    """Angles (or rates) of the links from those of the joints: the second joint counts from the first link."""
    return joint.cumsum(0)


def relative(link: Pair) -> Pair:
    """Angles (or rates) of the joints from those of the links."""
    first, second = link.unbind(0)
    return torch.stack([first, second - first])


def runge_kutta(
    acceleration: Callable[[Tensor, Tensor], Tensor], angle: Tensor, rate: Tensor, seconds: float
) -> tuple[Tensor, Tensor]:
    """Angles and rates after one step of the classical method of fourth order, for accelerations of (angle, rate).

    It is the usual method for the state (angle, rate). An angle's slope is a rate, which is known; so the stages of the
    angle are written out, and only those of the rate are computed.

    Source: Hairer, Nørsett, Wanner, "Solving Ordinary Differential Equations I", 1993, section II.1, and II.14 for
    equations of second order.
    """
    half = seconds / 2
    middle = torch.add(angle, rate, alpha=half)
    first = acceleration(angle, rate)
    second = acceleration(middle, torch.add(rate, first, alpha=half))
    third = acceleration(torch.add(middle, first, alpha=half * half), torch.add(rate, second, alpha=half))
    end = torch.add(angle, rate, alpha=seconds)
    fourth = acceleration(torch.add(end, second, alpha=half * seconds), torch.add(rate, third, alpha=seconds))
    inner = second + third
    angle = torch.add(end, first + inner, alpha=seconds * seconds / 6)
    rate = torch.add(rate, torch.add(first + fourth, inner, alpha=2), alpha=seconds / 6)
    return angle, rate


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
        second = self.CENTRE**2 + self.INERTIA
        self._links = TwoLinks((second + self.LENGTH**2, second), self.LENGTH * self.CENTRE, device)
        weight = [[self.GRAVITY * (self.CENTRE + self.LENGTH)], [self.GRAVITY * self.CENTRE]]
        self._weight = torch.tensor(weight, dtype=torch.float32, device=device)
        # what the elbow gives to the second link, the first one bears
        self._elbow = torch.tensor([[-1.0], [1.0]], dtype=torch.float32, device=device)
        self._max_rates = torch.tensor(self.MAX_RATES, dtype=torch.float32, device=device)[:, None]

    def initial(self, random: RowRandom) -> Float[Tensor, "row 4"]:
        """Angles of both joints from hanging straight down, and their rates [N, 4], each within 0.1."""
        return random.uniform(4, low=-0.1, high=0.1)

    def transition(
        self, state: Float[Tensor, "row 4"], action: Int[Tensor, " row"], random: RowRandom
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step of 0.2 s with a torque of -1, 0 or 1 N m at the elbow; costs 1 until the tip is high enough."""
        angle, rate = state.T.chunk(2)
        push = (action - 1) * self._elbow

        def acceleration(angle: Tensor, rate: Tensor) -> Tensor:
            return self._links.acceleration(angle, rate, torch.addcmul(push, self._weight, angle.sin(), value=-1))

        angle, rate = runge_kutta(acceleration, absolute(angle), absolute(rate), self.SECONDS)
        high = angle.cos().sum(0) < -self.HEIGHT
        angle, rate = relative(angle), relative(rate).clamp(-self._max_rates, self._max_rates)
        angle = torch.sub(angle, torch.round(angle / (2 * math.pi)), alpha=2 * math.pi)
        return torch.cat([angle, rate]).T, high.to(torch.float32) - 1.0, high

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
