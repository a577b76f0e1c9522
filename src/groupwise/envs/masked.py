"""Masks of allowed actions of single environments, on their way into the observation."""

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Dict, MultiBinary

from groupwise.config.env import EnvCfg
from groupwise.data.action_masks import KEY, allowed_action, check, has_mask, options
from groupwise.errors import EnvError


def with_masks(env: gymnasium.Env, cfg: EnvCfg) -> gymnasium.Env:
    """The environment with its masks in the observation, if it has any.

    Raises:
        EnvError: ``cfg.action_masks`` asks for masks of actions that are no choices.
    """
    if cfg.action_masks:
        if not options(env.action_space):
            raise EnvError(
                f"env.action_masks is for Discrete and MultiDiscrete actions, and those of {cfg.id} are {env.action_space}; "
                "fix: leave it out"
            )
        return MaskFromInfo(env)
    return CheckedMask(env) if has_mask(env.observation_space, env.action_space) else env


def mask_notes(env: gymnasium.Env, space: Any, cfg: EnvCfg) -> tuple[str, ...]:
    """What a run says about masks that it did not ask for: that they are used, or how to use them.

    Args:
        env: is reset.
        space: of the observations that the policy gets.
    """
    if cfg.action_masks or not options(env.action_space):
        return ()
    if has_mask(space, env.action_space):
        return (f"Action masks: from the observation's {KEY!r}.",)
    if KEY in env.reset(seed=0)[1]:
        return (
            f"Action masks: info[{KEY!r}] is not used; env.action_masks=True has the policy take only allowed actions.",
        )
    return ()


def allowed_sample(action_space: Any, obs: Any) -> Any:
    """A random action of the space, allowed where the observation has a mask."""
    action = action_space.sample()
    if not isinstance(obs, dict) or KEY not in obs or not options(action_space):
        return action
    tensor = torch.from_numpy(np.asarray(action)[None])
    return allowed_action(tensor, {KEY: torch.as_tensor(obs[KEY])[None]}, action_space)[0].numpy()


class CheckedMask(gymnasium.Wrapper):
    """Refuses a mask that allows nothing while the episode continues."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observation."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._masked(obs, info, over=False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """The outcome of a step."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._masked(obs, info, over=bool(terminated or truncated)), reward, terminated, truncated, info

    def _masked(self, obs: Any, info: dict[str, Any], *, over: bool) -> Any:
        if not over:
            check(np.asarray(obs[KEY]), self.env.action_space, str(self.env), error=EnvError)
        return obs


class MaskFromInfo(CheckedMask):
    """Puts ``info["action_mask"]`` of each reset and step into the observation, which becomes a Dict if it is none."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._size = sum(options(env.action_space))
        self._is_dict = isinstance(env.observation_space, Dict)
        entries = (
            env.observation_space.spaces if isinstance(env.observation_space, Dict) else {"obs": env.observation_space}
        )
        self.observation_space = Dict({**entries, KEY: MultiBinary(self._size)})

    def _masked(self, obs: Any, info: dict[str, Any], *, over: bool) -> Any:
        mask = np.ones(self._size, np.int8) if over else self._of_info(info)
        return {**(obs if self._is_dict else {"obs": obs}), KEY: mask}

    def _of_info(self, info: dict[str, Any]) -> np.ndarray:
        if KEY not in info:
            raise EnvError(
                f"env.action_masks needs info[{KEY!r}] of {self.env}, and its info holds {sorted(info)}; fix: give it in reset "
                "and in every step"
            )
        found = info[KEY]
        parts = found if isinstance(found, tuple) else (found,)  # as MultiDiscrete.sample takes it
        mask = np.concatenate([np.asarray(part).ravel() for part in parts]).astype(np.bool_).astype(np.int8)
        if mask.size != self._size:
            raise EnvError(
                f"info[{KEY!r}] of {self.env} has {mask.size} numbers, expected {self._size}, one for each option of "
                f"{self.env.action_space}"
            )
        check(mask, self.env.action_space, str(self.env), error=EnvError)
        return mask
