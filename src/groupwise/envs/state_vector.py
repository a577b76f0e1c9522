"""Vector environments of the user's own whose rows can be captured and restored."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import gymnasium
import numpy as np
import torch
from torch import Tensor

from groupwise.data.rollout import Nested
from groupwise.envs.base import EnvStep, GroupEnv, Mask, Seeds, wants_own_noise
from groupwise.envs.gymnasium import GymnasiumVectorEnv
from groupwise.errors import EnvError, GroupStartError

log = logging.getLogger(__name__)

_STARTS_KEPT = 1024


@runtime_checkable
class HasStates(Protocol):
    """A vector environment whose rows can be captured and restored, each alone."""

    def clone_state(self, rows: Sequence[int]) -> Sequence[Any]:
        """One state a row: complete (random streams and step counters too), good for any row, picklable."""

    def restore_state(self, states: Sequence[Any], rows: Sequence[int]) -> None:
        """Put states that ``clone_state`` returned into these rows, and leave the states as they are."""


@runtime_checkable
class HasNoise(Protocol):
    """A vector environment in which each row's noise can be chosen."""

    def reseed_noise(self, seeds: Sequence[int], rows: Sequence[int]) -> None:
        """Let everything random in these rows follow from these seeds from now on."""


class _Captured(NamedTuple):
    state: Any
    obs: Nested
    """What the row had last observed, without the leading N."""


class StateVectorGroupEnv(GymnasiumVectorEnv, GroupEnv):
    """A ``gymnasium.vector.VectorEnv`` whose rows start, each alone, in states taken from its own seeded resets.

    The start of a seed is the state of row 0 after ``env.reset(seed=seed)``, kept for the members to come; rows that
    were running are put back. The environment must offer:

    - ``clone_state`` and ``restore_state``, see ``HasStates``;
    - ``metadata["autoreset_mode"]`` DISABLED: it resets nobody by itself;
    - a ``step`` that bears rows which are over: what it returns for them is ignored;
    - ``reseed_noise``, see ``HasNoise``, if its steps are random. Without it members share their noise, which is told once.

    Args:
        max_episode_steps: at which ``env`` truncates; None if it does not.

    Raises:
        GroupStartError: the environment offers less.
    """

    start_mode = "snapshot"

    def __init__(
        self,
        env: gymnasium.vector.VectorEnv,
        *,
        env_id: str,
        max_episode_steps: int | None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(env, env_id=env_id, max_episode_steps=max_episode_steps, device=device)
        if not isinstance(env, HasStates):
            raise GroupStartError(
                f"rows of {env_id} cannot be captured, so members of a group could not share a start; fix: add "
                "clone_state(rows) and restore_state(states, rows), or pass a callable that returns one gymnasium.Env"
            )
        if self.autoreset != "disabled":
            raise GroupStartError(
                f"{env_id} resets its rows itself ({self.autoreset}), so none could be paused; fix: leave finished rows "
                "alone and set metadata['autoreset_mode'] = AutoresetMode.DISABLED"
            )
        self._states: HasStates = env
        self._noise = env if isinstance(env, HasNoise) else None
        self._paused: Mask = np.ones(self.num_envs, dtype=np.bool_)
        self._obs: Nested | None = None
        self._starts: dict[int, _Captured] = {}
        self._has_told = False

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...]; see ``VectorEnv.reset``."""
        fresh = super().reset(seed=seed, mask=mask).clone()
        chosen = np.ones_like(self._paused) if mask is None else mask
        self._obs = fresh if self._obs is None else _put(self._obs, chosen, fresh)
        self._paused = self._paused & ~chosen
        return self._obs

    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, ...] after starting the rows of ``mask``; see ``GroupEnv.start``."""
        self._tell_of_noise(start_seed[mask], noise_seed[mask])
        seeds = {int(row): int(start_seed[row]) for row in np.flatnonzero(mask)}
        starts = self._start_states(sorted(set(seeds.values())))
        return self._place({row: starts[seed] for row, seed in seeds.items()}, noise_seed)

    def pause(self, mask: Mask) -> None:
        """Pause the rows of ``mask`` until they are started again."""
        self._paused = self._paused | mask

    def step(self, action: Tensor) -> EnvStep:
        """One step of the environment; rows that are paused show what they showed before."""
        before, live = self._shown(), torch.from_numpy(~self._paused)
        stepped = super().step(action)
        self._obs = _put(before, ~self._paused, stepped.obs)
        terminated, truncated = stepped.terminated & live, stepped.truncated & live
        self._paused = self._paused | (terminated | truncated).numpy()
        return EnvStep(self._obs, torch.where(live, stepped.reward, 0.0), terminated, truncated)

    def _start_states(self, seeds: list[int]) -> dict[int, _Captured]:
        """The states in which episodes with these seeds begin; the rows are afterwards where they were."""
        new = [seed for seed in seeds if seed not in self._starts]
        if new:
            running = np.flatnonzero(~self._paused).tolist()
            kept = self._states.clone_state(running) if running else []
            for seed in new:
                self._starts[seed] = self._start_state(seed)
            if running:
                self._states.restore_state(kept, running)
        starts = {seed: self._starts[seed] for seed in seeds}
        while len(self._starts) > max(_STARTS_KEPT, len(seeds)):
            self._starts.pop(next(iter(self._starts)))
        return starts

    def _start_state(self, seed: int) -> _Captured:
        obs = self._tensor(self._env.reset(seed=seed)[0]).clone()
        if self._obs is None:
            self._obs = obs
            self._check_repeatable(seed, obs)
        return _Captured(self._states.clone_state([0])[0], _row(obs, 0))

    def _check_repeatable(self, seed: int, obs: Nested) -> None:
        """Once: members get copies of one state, so nothing else would notice a reset that ignores its seed."""
        again = self._tensor(self._env.reset(seed=seed)[0])
        if not bool((again[0] == obs[0]).all()):
            raise GroupStartError(
                f"{self.env_id} began elsewhere when it was reset with the same seed again; fix: let reset draw all its "
                "randomness from self.np_random, after super().reset(seed=seed)"
            )

    def _place(self, captured: dict[int, _Captured], noise_seed: Seeds) -> Nested:
        obs = self._shown()
        if not captured:
            return obs
        rows = list(captured)
        self._states.restore_state([item.state for item in captured.values()], rows)
        if self._noise is not None:
            self._noise.reseed_noise([int(noise_seed[row]) for row in rows], rows)
        self._obs = obs.clone()
        for row, item in captured.items():
            self._obs[row] = item.obs
        self._paused[rows] = False
        return self._obs

    def _tell_of_noise(self, start_seed: Seeds, noise_seed: Seeds) -> None:
        if self._noise is not None or self._has_told or not wants_own_noise(start_seed, noise_seed):
            return
        self._has_told = True
        log.warning(
            "members of %s share all randomness, also after the start; fix: add reseed_noise(seeds, rows), if steps are "
            "random",
            self.env_id,
        )

    def _shown(self) -> Nested:
        if self._obs is None:
            raise EnvError(f"{self.env_id} was used before anything started; fix: call start or reset first")
        return self._obs


def _row(obs: Nested, row: int) -> Nested:
    """One row, in memory of its own."""
    return obs[row].clone()


def _put(obs: Nested, mask: Mask, new: Nested) -> Nested:
    """A copy of ``obs`` with the rows of ``mask`` from ``new``."""
    merged = obs.clone()
    index = torch.from_numpy(np.flatnonzero(mask))
    merged[index] = new[index]
    return merged
