"""Acrobot for many rows at once, bit for bit as Gymnasium's environments one by one, in a quarter of their time."""

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.envs.classic_control.acrobot import AcrobotEnv
from gymnasium.utils.seeding import np_random
from torch import Tensor

from groupwise.data.rollout import Nested
from groupwise.data.spaces import obs_spec
from groupwise.envs.base import EnvStep, Mask, VectorEnv, stand_in_note
from groupwise.seeding import row_seeds

_Rows = npt.NDArray[np.float64]
_GRAVITY = 9.8
_RIGHT_ANGLE = np.pi / 2


class AcrobotPhysics:
    """The equations of ``AcrobotEnv``, the same operations in the same order on arrays.

    Args:
        env: whose constants are taken.

    Source: ``gymnasium.envs.classic_control.acrobot``, whose source is Sutton and Barto's book.
    """

    def __init__(self, env: AcrobotEnv) -> None:
        m1, m2, l1 = env.LINK_MASS_1, env.LINK_MASS_2, env.LINK_LENGTH_1
        lc1, lc2, moment = env.LINK_COM_POS_1, env.LINK_COM_POS_2, env.LINK_MOI
        self._torque = np.array(env.AVAIL_TORQUE, dtype=np.float64)
        self._max_spin = np.array(((env.MAX_VEL_1,), (env.MAX_VEL_2,)))
        self._dt = env.dt
        self._m2, self._moment = m2, moment
        self._first, self._square, self._double = m1 * lc1**2, l1**2 + lc2**2, 2 * l1 * lc2
        self._second, self._product = lc2**2, l1 * lc2
        self._weight2, self._weight1 = m2 * lc2 * _GRAVITY, (m1 * lc1 + m2 * l1) * _GRAVITY
        self._centrifugal, self._coriolis = m2 * l1 * lc2, 2 * m2 * l1 * lc2
        self._inertia = m2 * lc2**2 + moment

    @staticmethod
    def knows(env: gymnasium.Env) -> bool:
        """Whether ``env`` moves as it is written here: no subclass, the book's equations, no noise, nothing rendered."""
        inner = env.unwrapped
        return (
            type(inner) is AcrobotEnv
            and inner.book_or_nips == "book"
            and inner.torque_noise_max == 0
            and inner.render_mode is None
            and env.spec is not None
            and not env.spec.additional_wrappers
        )

    def __call__(self, state: _Rows, action: npt.NDArray[np.int64]) -> tuple[_Rows, Mask]:
        """The next state [4, N], angles and angular velocities, and which rows swung high enough, by Runge and Kutta's fourth order.

        Args:
            action: [N], an index of the torques.
        """
        torque, dt = self._torque[action], self._dt
        half = dt / 2.0
        k1 = self._change(state, torque)
        k2 = self._change(state + half * k1, torque)
        k3 = self._change(state + half * k2, torque)
        k4 = self._change(state + dt * k3, torque)
        new = state + dt / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
        new[:2] = _wrapped(new[:2])
        new[2:] = np.minimum(np.maximum(new[2:], -self._max_spin), self._max_spin)
        return new, -np.cos(new[0]) - np.cos(new[1] + new[0]) > 1.0

    def _change(self, state: _Rows, torque: npt.NDArray[np.float64]) -> _Rows:
        angle1, angle2, spin1, spin2 = state
        cos2, sin2 = np.cos(angle2), np.sin(angle2)
        d1 = self._first + self._m2 * (self._square + self._double * cos2) + self._moment + self._moment
        d2 = self._m2 * (self._second + self._product * cos2) + self._moment
        square1, square2, square_d2 = _squares(np.stack((spin1, spin2, d2)))
        phi2 = self._weight2 * np.cos(angle1 + angle2 - _RIGHT_ANGLE)
        phi1 = (
            -self._centrifugal * square2 * sin2
            - self._coriolis * spin2 * spin1 * sin2
            + self._weight1 * np.cos(angle1 - _RIGHT_ANGLE)
            + phi2
        )
        push = torque + d2 / d1 * phi1 - self._centrifugal * square1 * sin2 - phi2
        change = np.empty_like(state)
        change[:2] = state[2:]
        np.divide(push, self._inertia - square_d2 / d1, out=change[3])
        np.divide(-(d2 * change[3] + phi1), d1, out=change[2])
        return change


class AcrobotVectorEnv(VectorEnv):
    """Rows of Acrobot that the caller resets. Each draws its starts from its own stream, as single environments do.

    Args:
        probe: one of the environments.
    """

    autoreset = "disabled"

    def __init__(self, probe: gymnasium.Env, num_envs: int, *, device: torch.device | str = "cpu") -> None:
        assert probe.spec is not None
        assert isinstance(probe.unwrapped, AcrobotEnv)
        self.env_id = probe.spec.id
        self.note = stand_in_note(self.env_id)
        self.num_envs = num_envs
        self.observation_space = probe.observation_space
        self.action_space = probe.action_space
        self.obs_spec = obs_spec(self.observation_space)
        self.max_episode_steps = probe.spec.max_episode_steps
        self.device = torch.device(device)
        self._physics = AcrobotPhysics(probe.unwrapped)
        self._streams = [np_random(None)[0] for _ in range(num_envs)]
        self._state: _Rows = np.zeros((4, num_envs))
        self._obs = np.zeros((num_envs, 6), dtype=np.float32)
        self._steps = np.zeros(num_envs, dtype=np.int64)

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, 6]; see ``VectorEnv.reset``."""
        rows = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        if seed is not None:
            seeds = row_seeds(seed, self.num_envs)
            for row in rows.tolist():
                self._streams[row] = np_random(seeds[row])[0]
        # in float32, and so are the first observation's sines
        drawn = [self._streams[row].uniform(-0.1, 0.1, size=4).astype(np.float32) for row in rows.tolist()]
        first = np.stack(drawn, axis=1)
        self._state[:, rows] = first
        self._steps[rows] = 0
        self._obs = self._obs.copy()
        self._obs[rows] = _observed(first)
        return self._shown()

    def step(self, action: Tensor) -> EnvStep:
        """One step of every row with actions [N]."""
        self._state, terminated = self._physics(self._state, action.cpu().numpy())
        self._obs = _observed(self._state)
        self._steps += 1
        limit = self.max_episode_steps
        truncated = np.zeros_like(terminated) if limit is None else self._steps >= limit
        reward = np.where(terminated, np.float32(0), np.float32(-1))
        return EnvStep(
            self._shown(), torch.from_numpy(reward), torch.from_numpy(terminated), torch.from_numpy(truncated)
        )

    def close(self) -> None:
        """Nothing to free."""

    def _shown(self) -> Tensor:
        return torch.from_numpy(self._obs).to(self.device)


def _observed(state: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float32]:
    cos, sin = np.cos(state[:2]), np.sin(state[:2])
    return np.stack((cos[0], sin[0], cos[1], sin[1], state[2], state[3]), axis=1).astype(np.float32)


def _wrapped(angle: _Rows) -> _Rows:
    while (high := angle > np.pi).any():
        angle = np.where(high, angle - 2 * np.pi, angle)
    while (low := angle < -np.pi).any():
        angle = np.where(low, angle + 2 * np.pi, angle)
    return angle


def _squares(x: _Rows) -> _Rows:
    """By ``pow``, as of single numbers: one in a thousand of its squares rounds otherwise than a product."""
    return np.array([number**2 for number in x.ravel().tolist()]).reshape(x.shape)
