"""Vectorised environments in tensors, as collectors see them.

Nothing here imports a simulator. ``VectorEnv`` is enough for PPO; ``GroupEnv`` adds what comparing members needs:
rows that start where they are told, alone, and are paused once they have finished.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from groupwise.config.env import StartMode
from groupwise.data.rollout import Nested, Spec
from groupwise.errors import EnvError

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
    failed: Tensor | None = None
    """[N] bool: rows whose environment raised an error, and was replaced and paused. None when none did, or errors are raised."""
    reward_parts: Tensor | None = None
    """[N, R] float32: the parts that the reward is made of, where they were asked for."""


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

    def state_dict(self) -> dict[str, Any] | None:
        """The state of all rows as plain data, arrays and tensors; None where it cannot be captured."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved ``state_dict``.

        Raises:
            EnvError: the state is of another environment, or this one cannot restore any.
        """
        raise EnvError(f"the state of {self.env_id} cannot be restored; fix: start its episodes anew")

    @abstractmethod
    def close(self) -> None:
        """Free simulators and processes."""


class GroupStartReport(NamedTuple):
    """What was found out about members that share a start, by trying."""

    env_id: str
    start_mode: StartMode
    """How members share a start, see ``GroupEnv.start_mode``."""
    start_varies: bool
    """Whether another start seed gives another start."""
    noise_varies: bool
    """Whether members with their own noise seeds drifted apart under equal actions."""
    states: str | None = None
    """What captures states: the name of an adapter, or ``fields``; None where nothing does."""
    rejected: tuple[str, ...] = ()
    """Why better modes were not taken."""


def wants_own_noise(start_seed: Seeds, noise_seed: Seeds) -> bool:
    """Whether rows that share a start are told to draw noise of their own after it."""
    pairs = np.unique(np.stack([start_seed, noise_seed]), axis=1)
    return bool(pairs.shape[1] > len(np.unique(start_seed)))


class GroupEnv(VectorEnv):
    """N environments whose rows start independently, where they are told.

    A finished row that was not started again is paused: ``step`` takes no environment step there, and returns its
    last observation with reward 0 and not done. Rows must be started (or all reset) before the first ``step``.
    """

    autoreset = "disabled"
    start_mode: StartMode
    """How members share a start."""
    block_size: int = 1
    """Rows come in blocks of so many neighbours, which can only start together; 1: each row on its own."""
    extra_steps: int = 0
    """Environment steps taken outside ``step`` since the environment was made: random prefixes."""
    start_report: GroupStartReport | None = None
    """What the check of the shared start found; None if nobody checked."""

    @abstractmethod
    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, ...] after starting the rows of ``mask``; other rows keep theirs.

        Args:
            start_seed: [N] rows with equal numbers begin in the same state, bit for bit.
            noise_seed: [N] stream of everything random after the start; members get different ones.
        """

    @abstractmethod
    def pause(self, mask: Mask) -> None:
        """Pause the rows of ``mask`` until they are started again: their episodes were cut from outside."""
