"""Vectorised environments in tensors, as collectors see them.

Nothing here imports a simulator. ``VectorEnv`` is enough for PPO; ``GroupEnv`` adds what comparing siblings needs:
rows that start where they are told, alone, and are held once they have finished.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from groupwise.data.rollout import Nested, Spec

Mask = npt.NDArray[np.bool_]
Seeds = npt.NDArray[np.int64]


class EnvStep(NamedTuple):
    """What one step of N environments returned. Tensors are fresh or may be overwritten by the next step."""

    obs: Nested
    reward: Tensor
    """[N] float32."""
    terminated: Tensor
    """[N] bool."""
    truncated: Tensor
    """[N] bool."""
    final_obs: Nested | None = None
    """[N, ...] only under ``same_step`` and only where an episode ended: the observation before the reset, other rows are padding. None when no episode ended."""


class VectorEnv(ABC):
    """N environments stepped together."""

    env_id: str
    """How to name it in errors, logs and checkpoints."""
    num_envs: int
    observation_space: Any
    """The single environment's Gymnasium space."""
    action_space: Any
    """The single environment's Gymnasium space."""
    obs_spec: Spec
    max_episode_steps: int | None
    autoreset: Literal["next_step", "same_step", "disabled"]
    """As Gymnasium's AutoresetMode: who resets a finished row, and when. ``disabled``: the caller does."""

    @abstractmethod
    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...].

        Args:
            seed: makes the whole reset repeatable (row i draws from its own stream); None goes on with the streams.
            mask: rows to reset, the others go on and keep their observation. Only under ``disabled``.
        """

    @abstractmethod
    def step(self, action: Tensor) -> EnvStep:
        """One step of every row with environment actions [N, ...]."""

    @abstractmethod
    def close(self) -> None:
        """Free simulators and processes."""


class GroupEnv(VectorEnv):
    """N environments whose rows start independently, where they are told.

    A finished row that was not started again is held: ``step`` takes no environment step there, and returns its
    last observation with reward 0 and not done. Rows must be started (or all reset) before the first ``step``.
    """

    autoreset = "disabled"
    start_tier: ClassVar[str]
    """How siblings share a start: "state" (the start state is set) or "seed" (per-row seeded reset)."""

    @abstractmethod
    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, ...] after starting the rows of ``mask``; other rows keep theirs.

        Args:
            start_seed: [N] rows with equal numbers begin in the same state, bit for bit.
            noise_seed: [N] stream of everything random after the start; siblings get different ones.
        """

    @abstractmethod
    def hold(self, mask: Mask) -> None:
        """Hold the rows of ``mask`` until they are started again: their attempts were cut from outside."""
