"""Gymnasium's vector environments as tensors, in any of its three autoreset modes, and wrappers of single environments."""

import copy
import os
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat, cast

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Dict, MultiBinary
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, RecordEpisodeStatistics, TimeLimit
from torch import Tensor

from groupwise.config.run import EnvCfg
from groupwise.data.rollout import Nested
from groupwise.data.spaces import (
    KEY,
    allowed_action,
    check,
    chosen_entries,
    has_mask,
    leaf_spaces,
    nested_action,
    obs_to_tensor,
    options,
    space_kind,
    subspaces,
)
from groupwise.envs import snapshots as states
from groupwise.envs.base import Autoreset, EnvStep, Mask, VectorEnv, first_of, outcomes_of_rows
from groupwise.envs.snapshots import DrawsOnDemand
from groupwise.errors import DataError, EnvError
from groupwise.seeding import row_seeds

# Entries of an observation for the policy


def kept_space(space: Any, keys: tuple[str, ...] | None, action_space: Any) -> tuple[Any, tuple[str, ...]]:
    """The space without the entries that the policy does not get, and a note that names those without a fixed shape.

    Args:
        keys: of a Dict, to keep, beside a mask of actions; None: all that can be stored.

    Raises:
        ConfigError: there is no such key.
    """
    if keys is not None:
        masks = (KEY,) if space_kind(space) == "dict" and has_mask(space, action_space) else ()
        return chosen_entries(space, (*keys, *masks), "env.obs_keys"), ()
    missing = {path: leaf for path, leaf in leaf_spaces(space).items() if space_kind(leaf) == "unsupported"}
    kept = _storable(space) if missing else space
    if not missing or kept is None:
        return space, ()
    names = ", ".join(f"{'.'.join(map(str, path))} ({type(leaf).__name__})" for path, leaf in missing.items())
    return kept, (f"Left out of the observation, because it has no fixed shape: {names}.",)


def _storable(space: Any) -> Any | None:
    """The space without leaves of unsupported kinds; None if nothing is left."""
    children = subspaces(space)
    if children is None:
        return None if space_kind(space) == "unsupported" else space
    kept = {key: found for key, child in children.items() if (found := _storable(child)) is not None}
    return gymnasium.spaces.Dict(kept) if kept else None


class GymnasiumVectorEnv(VectorEnv):
    """Any ``gymnasium.vector.VectorEnv``, with tensors in and out.

    Observations share memory with Gymnasium's arrays where their dtype allows. Reward and flags stay on the CPU,
    where they are made. Environments that vectorise themselves take one seed for all rows, so there the rows share a
    stream; sync and async ones get a seed a row.

    Args:
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
        device: torch.device | str = "cpu",
    ) -> None:
        space, self.notes = kept_space(env.single_observation_space, None, env.single_action_space)
        super().__init__(env_id, env.num_envs, (space, env.single_action_space), max_episode_steps, device)
        mode = env.metadata.get("autoreset_mode")
        if not isinstance(mode, AutoresetMode):
            raise EnvError(f"metadata['autoreset_mode'] of {env_id} is {mode!r}; fix: one of gymnasium's AutoresetMode")
        self.autoreset = cast(Autoreset, mode.name.lower())
        self._env = env
        self._seeds_rows = isinstance(env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        self._shared = states.shared_objects(env.unwrapped.envs if isinstance(env.unwrapped, SyncVectorEnv) else ())

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...]; see ``VectorEnv.reset``."""
        if mask is not None and self.autoreset != "disabled":
            raise EnvError(f"{self.env_id} resets rows itself ({self.autoreset}); fix: AutoresetMode.DISABLED")
        seeds = seed if seed is None or not self._seeds_rows else row_seeds(seed, self.num_envs)
        # Gymnasium pops reset_mask from the dictionary: a reused one would mean a full reset.
        options = None if mask is None else {"reset_mask": mask}
        try:
            obs, _ = self._env.reset(seed=seeds, options=options)  # type: ignore[arg-type]
        except TypeError as error:
            self._explain("reset", error)
            raise
        return self._tensor(obs)

    def step(self, action: Tensor) -> EnvStep:
        """One step of every row with environment actions [N, ...]."""
        actions = nested_action(self.action_space, action.cpu().numpy())
        try:
            obs, reward, terminated, truncated, info = self._env.step(actions)
        except TypeError as error:
            self._explain("step", error)
            raise
        final_obs = None
        if self.autoreset == "same_step" and (terminated | truncated).any():
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
            final_obs = self._tensor(final)
        return EnvStep(
            self._tensor(obs),
            torch.from_numpy(np.asarray(reward, dtype=np.float32)),
            torch.from_numpy(terminated),
            torch.from_numpy(truncated),
            final_obs,
            info=outcomes_of_rows(info, self.num_envs),
        )

    def state_dict(self) -> dict[str, Any] | None:
        """The state of all rows as plain data; None for rows in other processes and simulators that cannot be read."""
        return states.capture(self._env, shared=self._shared)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved ``state_dict``."""
        self._env.reset(seed=0)  # the first reset creates some of an environment's attributes
        states.restore(self._env, state, self._shared)

    def close(self) -> None:
        """Free simulators and processes."""
        self._env.close()

    def _explain(self, method: str, error: TypeError) -> None:
        """Raise a ``DataError`` if it is NumPy's error about an observation that Gymnasium cannot store."""
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        own = method == "step" and not any(name.startswith(_UTILS) for name in frames)  # in the user's code
        if not own and str(error).startswith("Cannot cast array data"):
            raise DataError(
                f"{method}() of {self.env_id} returned what {self.observation_space!s:.80} does not allow: {error}; fix: return "
                "the space's dtype, or declare another space"
            ) from error

    def _tensor(self, obs: Any) -> Nested:
        return obs_to_tensor(self.observation_space, obs, self.device, batched=True)


_UTILS = os.path.dirname(gymnasium.vector.utils.__file__)
"""Where Gymnasium stores observations."""


# Wrappers of single environments

_PASS_OBSERVATIONS_ON = frozenset(
    kind.step
    for kind in (
        gymnasium.Wrapper,
        gymnasium.ActionWrapper,
        gymnasium.RewardWrapper,
        OrderEnforcing,
        PassiveEnvChecker,
        RecordEpisodeStatistics,
        TimeLimit,
    )
)
"""Steps of wrappers that return the observation as it is."""


def _draws_on_demand(env: gymnasium.Env) -> bool:
    """Whether the image that the environment draws is the one that all its wrappers return."""
    while isinstance(env, gymnasium.Wrapper):
        if type(env).step not in _PASS_OBSERVATIONS_ON:
            return False
        env = env.env
    return isinstance(env, DrawsOnDemand)


class ActionChunk(gymnasium.Wrapper):
    """Executes the first ``num_steps`` actions of a chunk, or one action ``repeat`` times, or fewer where the episode ends.

    The action space of chunks is ``Box [C, *A]``. The reward is the sum over the executed steps, ``info`` that of the last one
    with ``executed``, their number. Step limits inside count environment steps.

    Args:
        size: C, actions of a chunk. 1: an action of the environment.
        reward_parts: entries of ``info`` that are summed like the reward.
        num_steps: None: all of them.
        repeat: how often each action is executed.

    Raises:
        EnvError: the action space of chunks is no ``Box``, or actions to be repeated are chunks or have a mask.
    """

    def __init__(
        self,
        env: gymnasium.Env,
        size: int = 1,
        reward_parts: Sequence[str] = (),
        num_steps: int | None = None,
        repeat: int = 1,
    ) -> None:
        super().__init__(env)
        self._size, self._num_steps, self._repeat = size, num_steps or size, repeat
        self._reward_parts = tuple(reward_parts)
        space: Any = env.action_space
        if repeat > 1 and has_mask(env.observation_space, space):
            raise EnvError(
                f"{env} may mask an action before its last of env.action_repeat={repeat} times; fix: action_repeat=1"
            )
        if repeat > 1 and space_kind(space) == "box" and len(space.shape) > 1:
            raise EnvError(
                f"env.action_repeat={repeat} repeats single actions, but {env} has {space}; fix: action_repeat=1"
            )
        if size == 1:
            return
        if space_kind(space) != "box":
            raise EnvError(f"env.action_chunk={size} needs Box actions, {env} has {space}; fix: env.action_chunk=1")
        low, high = (np.broadcast_to(bound, (size, *space.shape)) for bound in (space.low, space.high))
        self.action_space = gymnasium.spaces.Box(low, high, dtype=space.dtype)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Execute the first actions of ``[C, *A]``, or one action repeatedly, as far as the episode goes.

        Images are drawn at the end only, unless a wrapper may change observations.
        """
        env: Any = self.env.unwrapped
        if not _draws_on_demand(self.env) or not env.draws:
            return self._execute(action)
        env.draws = False
        try:
            obs, reward, terminated, truncated, info = self._execute(action)
        finally:
            env.draws = True
        return {**obs, "image": env.image()}, reward, terminated, truncated, info

    def _execute(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        total, executed, parts = 0.0, 0, dict.fromkeys(self._reward_parts, 0.0)
        actions = [action] if self._size == 1 else action[: self._num_steps]
        for one in (one for one in actions for _ in range(self._repeat)):
            executed += 1
            obs, reward, terminated, truncated, info = self.env.step(copy.deepcopy(one))  # which may change it
            total += float(reward)
            parts = {name: parts[name] + info[name] for name in parts if name in info}
            if terminated or truncated:
                break
        # a part that a step lacks is missing in all, and not that of the last one
        others = {name: value for name, value in info.items() if name not in self._reward_parts}
        return obs, total, terminated, truncated, others | parts | {"executed": executed}


class RandomNoops(gymnasium.Wrapper):
    """Starts each episode with up to ``num_random_noops`` random actions, drawn from the seed of the reset."""

    def __init__(self, env: gymnasium.Env, num_random_noops: int) -> None:
        super().__init__(env)
        self._num_random_noops = num_random_noops
        self._actions = copy.deepcopy(env.action_space)
        self._random = np.random.default_rng()  # in place of the space's own, which no checkpoint has
        self._has_mask = has_mask(env.observation_space, env.action_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observation after the random actions; where they end the episode, the one of another reset."""
        first = self.env.reset(seed=seed, options=options)
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self._actions.seed(int(self._random.integers(2**31)))
        for _ in range(self._random.integers(self._num_random_noops + 1)):
            action = self._actions.sample()
            if self._has_mask:
                mask = {KEY: torch.as_tensor(first[0][KEY])[None]}
                allowed = allowed_action(torch.from_numpy(np.asarray(action)[None]), mask, self._actions)
                action = allowed[0].numpy()[()]  # a number for a Discrete space, which may be a key of a dictionary
            obs, _, terminated, truncated, info = self.env.step(action)
            first = self.env.reset(options=options) if terminated or truncated else (obs, info)
        return first


def with_masks(env: gymnasium.Env, cfg: EnvCfg) -> gymnasium.Env:
    """The environment with its masks in the observation, if any; an ``EnvError`` if masked actions are not discrete."""
    if cfg.action_masks and not options(env.action_space):
        raise EnvError(
            f"env.action_masks is for Discrete and MultiDiscrete actions, and those of {cfg.id} are {env.action_space}; "
            "fix: leave it out"
        )
    needs_check = cfg.action_masks or has_mask(env.observation_space, env.action_space)
    return Masked(env, from_info=cfg.action_masks) if needs_check else env


def mask_notes(env: gymnasium.Env, space: Any, cfg: EnvCfg) -> tuple[str, ...]:
    """Notes of a run on masks that its settings do not name: that they are used, or how to use them.

    Args:
        env: is reset.
        space: of the observations that the policy gets.
    """
    if cfg.action_masks or not options(env.action_space):
        return ()
    if has_mask(space, env.action_space):
        return (f"Action masks: from the observation's {KEY!r}.",)
    if cfg.action_repeat == 1 and KEY in first_of(env, type(env.unwrapped).__name__, seed=0)[1]:
        return (f"Action masks: info[{KEY!r}] is not used; env.action_masks=True allows only its actions.",)
    return ()


class Masked(gymnasium.Wrapper):
    """Refuses a mask that allows nothing while the episode continues.

    Args:
        from_info: put ``info["action_mask"]`` of each reset and step into the observation, which becomes a Dict if it is none.
    """

    def __init__(self, env: gymnasium.Env, *, from_info: bool) -> None:
        super().__init__(env)
        self._from_info, self._size = from_info, sum(options(env.action_space))
        self._is_dict = isinstance(env.observation_space, Dict)
        if from_info:
            space: Any = env.observation_space
            self.observation_space = Dict(
                {**(space.spaces if self._is_dict else {"obs": space}), KEY: MultiBinary(self._size)}
            )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observation."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._masked(obs, info, over=False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """The outcome of a step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._masked(obs, info, over=bool(terminated or truncated)), reward, terminated, truncated, info

    def _masked(self, obs: Any, info: dict[str, Any], *, over: bool) -> Any:
        if self._from_info:
            mask = np.ones(self._size, np.int8)
            if not over:
                if KEY not in info:
                    raise EnvError(
                        f"env.action_masks needs info[{KEY!r}] of {self.env}, and its info holds {sorted(info)}; fix: give it in "
                        "reset and in every step"
                    )
                parts = info[KEY] if isinstance(info[KEY], tuple) else (info[KEY],)  # as MultiDiscrete.sample takes it
                mask = np.concatenate([np.asarray(part).ravel() for part in parts]).astype(np.bool_).astype(np.int8)
            obs = {**(obs if self._is_dict else {"obs": obs}), KEY: mask}
        if not over:
            if (size := np.size(obs[KEY])) != self._size:
                place = f"info[{KEY!r}]" if self._from_info else KEY
                raise EnvError(
                    f"{place} of {self.env} has {size} numbers, expected {self._size}, one for each option of {self.env.action_space}"
                )
            check(np.asarray(obs[KEY]), self.env.action_space, str(self.env), error=EnvError)
        return obs
