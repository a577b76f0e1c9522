"""Gymnasium's vector environments as tensors, in any of its three autoreset modes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from torch import Tensor

from groupwise.data.nested_actions import nested_action
from groupwise.data.rollout import Nested
from groupwise.data.spaces import obs_spec, obs_to_tensor, subspaces
from groupwise.envs import states
from groupwise.envs.base import Autoreset, EnvStep, Mask, VectorEnv
from groupwise.envs.local_rows import explained_step, refuse_misfit
from groupwise.envs.log_info import LOGGED, by_name
from groupwise.envs.obs_keys import kept_space
from groupwise.envs.success import SUCCESS_KEYS, success_of_rows, tasks_of_rows
from groupwise.errors import EnvError
from groupwise.seeding import row_seeds

_KEPT = ("executed", *SUCCESS_KEYS, "task", LOGGED)


class GymnasiumVectorEnv(VectorEnv):
    """Any ``gymnasium.vector.VectorEnv``, with tensors in and out.

    Observations share memory with Gymnasium's arrays where their dtype allows. Reward and flags stay on the CPU,
    where they are made. Environments that vectorise themselves take one seed for all rows, so there the rows share a
    stream; sync and async ones get a seed a row.

    Args:
        obs_keys: entries of a Dict observation to keep, as ``EnvCfg.obs_keys``.
        log_info: names of the numbers that ``LogInfo`` adds.
        device: where observations go.

    Raises:
        EnvError: ``metadata["autoreset_mode"]`` is missing.
        UnsupportedSpaceError: its observations cannot be stored.
    """

    def __init__(
        self,
        env: gymnasium.vector.VectorEnv,
        *,
        env_id: str,
        max_episode_steps: int | None,
        obs_keys: tuple[str, ...] | None = None,
        log_info: Sequence[str] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        self.env_id = env_id
        self.num_envs = env.num_envs
        self.observation_space, self.notes = kept_space(env.single_observation_space, obs_keys)
        self.action_space = env.single_action_space
        self.obs_spec = obs_spec(self.observation_space)
        self.max_episode_steps = max_episode_steps
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise EnvError(
                f"metadata['autoreset_mode'] of {env_id} is {mode!r}; fix: set it to a gymnasium.vector.AutoresetMode"
            )
        self.autoreset = cast(Autoreset, mode.name.lower())
        self.device = torch.device(device)
        self._env = env
        self._log_info = log_info
        self._seeds_rows = isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv)

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...]; see ``VectorEnv.reset``."""
        if mask is not None and self.autoreset != "disabled":
            raise EnvError(
                f"{self.env_id} resets itself ({self.autoreset}), so single rows cannot be reset; "
                "fix: AutoresetMode.DISABLED"
            )
        seeds = seed if seed is None or not self._seeds_rows else row_seeds(seed, self.num_envs)
        # Gymnasium pops reset_mask from the dictionary: a reused one would mean a full reset.
        options = None if mask is None else {"reset_mask": mask}
        try:
            obs, _ = self._env.reset(seed=seeds, options=options)  # type: ignore[arg-type]
        except Exception:
            self._refuse_misfits("reset")
            raise
        return self._tensor(obs)

    def step(self, action: Tensor) -> EnvStep:
        """One step of every row with environment actions [N, ...]."""
        try:
            obs, reward, terminated, truncated, info = self._env.step(self._env_action(action.cpu().numpy()))
        except Exception as error:
            self._refuse_misfits("step")
            raise explained_step(error, self.env_id) from error.__cause__
        final_obs = None
        if self.autoreset == "same_step" and (terminated | truncated).any():
            final_obs = self._final_obs(info)
        success = success_of_rows(info, self.num_envs)
        return EnvStep(
            self._tensor(obs),
            torch.from_numpy(np.asarray(reward, dtype=np.float32)),
            torch.from_numpy(terminated),
            torch.from_numpy(truncated),
            final_obs,
            success=success,
            executed=torch.from_numpy(info["executed"]) if "executed" in info else None,
            info=by_name(info[LOGGED], self._log_info) if LOGGED in info else None,
            task=None if success is None else tasks_of_rows(info, self.num_envs),
        )

    def state_dict(self) -> dict[str, Any] | None:
        """The state of all rows as plain data; None for rows in other processes and simulators that cannot be read."""
        return states.capture(self._env)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved ``state_dict``."""
        self._env.reset(seed=0)  # the first reset creates some of an environment's attributes
        states.restore(self._env, state)

    def close(self) -> None:
        """Free simulators and processes."""
        self._env.close()

    def _env_action(self, action: np.ndarray) -> Any:
        return action if subspaces(self.action_space) is None else nested_action(self.action_space, action)

    def _tensor(self, obs: Any) -> Nested:
        return obs_to_tensor(self.observation_space, obs, self.device, batched=True)

    def _refuse_misfits(self, method: str) -> None:
        """Name the observation that Gymnasium could not store, if that is why it failed."""
        if isinstance(self._env, LeanSyncVectorEnv):
            for obs in self._env.last_obs():
                refuse_misfit(obs, self.observation_space, f"{method}() of {self.env_id}")

    def _final_obs(self, info: dict[str, Any]) -> Nested:
        if "final_obs" not in info:
            raise EnvError(
                f"{self.env_id} resets in the same step but gives no info['final_obs'], so truncated episodes have no "
                "value; fix: AutoresetMode.NEXT_STEP or DISABLED"
            )
        final = info["final_obs"]
        if isinstance(final, np.ndarray) and final.dtype == object:
            filler = next(obs for obs in final if obs is not None)
            rows = [filler if obs is None else obs for obs in final]
            space = self._env.single_observation_space
            final = concatenate(space, rows, create_empty_array(space, self.num_envs))  # type: ignore[arg-type]
        return self._tensor(final)


class LeanSyncVectorEnv(SyncVectorEnv):
    """Gymnasium's rows in this process. Of ``info`` they keep ``executed``, and success and task of episodes that end.

    Collecting all of it takes a tenth of a step of 8 HalfCheetahs.
    """

    def last_obs(self) -> Iterator[Any]:
        """The last observation of each row, as its environment returned it."""
        return (obs for obs in self._env_obs if obs is not None)

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        if env_info.keys().isdisjoint(_KEPT):
            return vector_infos
        ended = self._terminations[env_num] or self._truncations[env_num]
        kept = {key: env_info[key] for key in (_KEPT if ended else _KEPT[:1]) if key in env_info}
        return super()._add_info(vector_infos, kept, env_num) if kept else vector_infos
