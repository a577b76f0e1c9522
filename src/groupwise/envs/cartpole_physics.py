"""The arithmetic of Gymnasium's vectorised CartPole, bit for bit, in a third of the time."""

from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from groupwise.envs.base import Mask

_PUSH = np.sign(np.arange(2) - 0.5)
"""Left, right."""


class CartPolePhysics:
    """Moves carts as ``CartPoleVectorEnv.step`` does: the same operations in the same order, so the same bits.

    Gymnasium's method also looks whether actions are in their space and draws a new start for rows that ended; and it
    makes an array at each operation.

    Args:
        env: whose constants are read at each step, since they are public.
    """

    def __init__(self, env: CartPoleVectorEnv) -> None:
        self._env: Any = env

    @staticmethod
    def knows(env: CartPoleVectorEnv) -> bool:
        """Whether ``env`` moves as it is written here: no subclass, which may have other physics, and Euler's method."""
        return type(env) is CartPoleVectorEnv and env.kinematics_integrator == "euler"

    def __call__(
        self, state: npt.NDArray[np.float64], action: npt.NDArray[np.integer[Any]]
    ) -> tuple[npt.NDArray[np.float64], Mask]:
        """The next state [4, N]: position, velocity, angle, angular velocity; and which rows fell or left the track.

        Args:
            action: [N], 0 or 1.
        """
        env = self._env
        multiply, divide, subtract = np.multiply, np.divide, np.subtract
        change = np.empty_like(state)
        angle, spin = state[2], state[3]
        cos, sin = np.cos(angle), np.sin(angle)
        push = np.square(spin)
        multiply(env.polemass_length, push, out=push)
        multiply(push, sin, out=push)
        np.add((_PUSH * env.force_mag)[action], push, out=push)
        divide(push, env.total_mass, out=push)
        inertia = np.square(cos)
        multiply(env.masspole, inertia, out=inertia)
        divide(inertia, env.total_mass, out=inertia)
        subtract(4.0 / 3.0, inertia, out=inertia)
        multiply(env.length, inertia, out=inertia)
        torque = multiply(cos, push)
        multiply(env.gravity, sin, out=sin)
        subtract(sin, torque, out=sin)
        spin_up = divide(sin, inertia, out=change[3])
        multiply(env.polemass_length, spin_up, out=torque)
        multiply(torque, cos, out=torque)
        divide(torque, env.total_mass, out=torque)
        subtract(push, torque, out=change[1])
        change[::2] = state[1::2]
        multiply(env.tau, change, out=change)
        np.add(state, change, out=change)
        limits = np.array(((env.x_threshold,), (env.theta_threshold_radians,)))
        outside = np.abs(change[::2]) > limits
        return change, np.logical_or(outside[0], outside[1])
