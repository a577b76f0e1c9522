"""Tasks of reaching a goal that is drawn with the start, in torch: thousands of rows a step, on the CPU or a GPU.

They have no counterpart in Gymnasium. Each class states its equations.
"""

import math

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Float
from torch import Tensor

from groupwise.envs.native import TorchGroupEnv
from groupwise.contrib.two_links import TwoLinks, absolute, on_links, relative, runge_kutta
from groupwise.functional.row_random import RowRandom


class TorchPointMass(TorchGroupEnv):
    """A mass on a plane with drag, to be pushed to a goal and held there. It never terminates.

    With position ``x`` (m), velocity ``v`` (m/s) and force ``u`` (N), each of two components, ``m v' = u - d v`` and
    ``x' = v``; a step takes the new velocity first: ``v <- v + h (u - d v) / m``, ``x <- x + h v``. The reward is
    ``-|x - goal| - 0.05 |u|^2`` after the step. ``m`` = 1 kg, ``d`` = 0.5 N s/m, ``h`` = 0.05 s, and no component of
    ``u`` exceeds 1 N, so that none of ``v`` exceeds 2 m/s.
    """

    MASS = 1.0
    DRAG = 0.5
    MAX_FORCE = 1.0
    SECONDS = 0.05
    FORCE_COST = 0.05

    def __init__(self, num_envs: int, *, max_episode_steps: int = 100, device: torch.device | str = "cpu") -> None:
        fastest = self.MAX_FORCE / self.DRAG
        high = np.array([np.inf, np.inf, fastest, fastest, np.inf, np.inf], dtype=np.float32)
        super().__init__(
            num_envs,
            env_id="TorchPointMass",
            observation_space=spaces.Box(-high, high, dtype=np.float32),
            action_space=spaces.Box(-self.MAX_FORCE, self.MAX_FORCE, (2,), np.float32),
            max_episode_steps=max_episode_steps,
            device=device,
        )

    def initial(self, random: RowRandom) -> Float[Tensor, "row 6"]:
        """Position, velocity and goal [N, 6]: at rest, mass and goal anywhere within 1 m of the middle, along each axis."""
        position, goal = random.uniform(4, low=-1.0, high=1.0).chunk(2, dim=1)
        return torch.cat([position, torch.zeros_like(position), goal], dim=1)

    def transition(
        self, state: Float[Tensor, "row 6"], action: Float[Tensor, "row 2"], random: RowRandom
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step of 0.05 s with a force; costs the distance from the goal, and force."""
        position, velocity, goal = state.T.chunk(3)
        force = action.T.clamp(-self.MAX_FORCE, self.MAX_FORCE)
        kept = 1 - self.SECONDS * self.DRAG / self.MASS
        velocity = torch.add(kept * velocity, force, alpha=self.SECONDS / self.MASS)
        position = torch.add(position, velocity, alpha=self.SECONDS)
        cost = torch.add(_length(position - goal), force.square().sum(0), alpha=self.FORCE_COST)
        return torch.cat([position, velocity, goal]).T, -cost, torch.zeros_like(cost, dtype=torch.bool)

    def observe(self, state: Float[Tensor, "row 6"]) -> Float[Tensor, "row 6"]:
        """Position, velocity, and position from the goal [N, 6]."""
        position, velocity, goal = state.chunk(3, dim=1)
        return torch.cat([position, velocity, position - goal], dim=1)


class TorchReacher(TorchGroupEnv):
    """An arm of two links in a horizontal plane, whose tip is to reach a goal and stay there. It never terminates.

    The links are uniform rods of 0.5 m and 0.5 kg. Torques ``u`` (N m) act on both joints, less 0.1 N m s of damping;
    how they move the rods, inertia and centrifugal forces included, is in ``TwoLinks``. A step of 0.05 s is one of
    Runge and Kutta's. The reward is ``-|tip - goal| - 0.1 |u|^2`` after the step, as in MuJoCo's Reacher, from which
    lengths, masses and damping differ. Nothing stops the elbow: the links may pass each other.
    """

    LENGTH = 0.5
    MASS = 0.5
    DAMPING = 0.1
    MAX_TORQUE = 1.0
    SECONDS = 0.05
    MAX_GOAL = 0.9
    TORQUE_COST = 0.1

    def __init__(self, num_envs: int, *, max_episode_steps: int = 50, device: torch.device | str = "cpu") -> None:
        reach = self.MAX_GOAL + 2 * self.LENGTH
        high = np.array([1.0] * 4 + [self.MAX_GOAL] * 2 + [np.inf] * 2 + [reach] * 2, dtype=np.float32)
        super().__init__(
            num_envs,
            env_id="TorchReacher",
            observation_space=spaces.Box(-high, high, dtype=np.float32),
            action_space=spaces.Box(-self.MAX_TORQUE, self.MAX_TORQUE, (2,), np.float32),
            max_episode_steps=max_episode_steps,
            device=device,
        )
        square = self.MASS * self.LENGTH**2
        self._links = TwoLinks((square / 3 + square, square / 3), square / 2, device)
        # DAMPING * on_links(relative(rate)) is this times rate, less DAMPING times the rate of the other link
        self._damping = torch.tensor([[2 * self.DAMPING], [self.DAMPING]], dtype=torch.float32, device=device)

    def initial(self, random: RowRandom) -> Float[Tensor, "row 6"]:
        """Angles of both joints, their rates, and the goal [N, 6]: stretched but for 0.1 rad, at rest, a goal within 0.9 m."""
        angle, goal = random.uniform(4).chunk(2, dim=1)
        radius, turn = goal.unbind(1)
        radius = self.MAX_GOAL * radius.sqrt()
        turn = 2 * math.pi * turn
        goal = torch.stack([radius * turn.cos(), radius * turn.sin()], dim=1)
        return torch.cat([0.2 * angle - 0.1, torch.zeros_like(angle), goal], dim=1)

    def transition(
        self, state: Float[Tensor, "row 6"], action: Float[Tensor, "row 2"], random: RowRandom
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step of 0.05 s with torques at shoulder and elbow; costs the tip's distance from the goal, and torque."""
        angle, rate, goal = state.T.chunk(3)
        torque = action.T.clamp(-self.MAX_TORQUE, self.MAX_TORQUE)
        push = on_links(torque)

        def acceleration(angle: Tensor, rate: Tensor) -> Tensor:
            force = torch.addcmul(push, self._damping, rate, value=-1)
            return self._links.acceleration(angle, rate, torch.add(force, rate.flip(0), alpha=self.DAMPING))

        angle, rate = runge_kutta(acceleration, absolute(angle), absolute(rate), self.SECONDS)
        cost = torch.add(_length(self._tip(angle) - goal), torque.square().sum(0), alpha=self.TORQUE_COST)
        state = torch.cat([relative(angle), relative(rate), goal]).T
        return state, -cost, torch.zeros_like(cost, dtype=torch.bool)

    def observe(self, state: Float[Tensor, "row 6"]) -> Float[Tensor, "row 10"]:
        """Cosines of the joints' angles, their sines, the goal, the rates, and the tip from the goal [N, 10]."""
        angle, rate, goal = state.T.chunk(3)
        return torch.cat([angle.cos(), angle.sin(), goal, rate, self._tip(absolute(angle)) - goal]).T.contiguous()

    def _tip(self, link: Float[Tensor, "2 row"]) -> Float[Tensor, "2 row"]:
        """Where the arm ends, from the absolute angles of its links."""
        return self.LENGTH * torch.stack([link.cos().sum(0), link.sin().sum(0)])


def _length(vector: Float[Tensor, "2 row"]) -> Float[Tensor, " row"]:
    return torch.hypot(*vector.unbind(0))
