"""Environments that make all their rows at once: what ``make_env`` does when it is given such a one, or asked for one by name."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from groupwise.config.env import EnvCfg
from groupwise.envs.base import GroupEnv, VectorEnv
from groupwise.errors import EnvError

IN_TORCH = {
    "CartPole-v1": "groupwise.envs.torch_control:TorchCartPole",
    "Pendulum-v1": "groupwise.envs.torch_control:TorchPendulum",
    "Acrobot-v1": "groupwise.contrib.torch_tasks:TorchAcrobot",
    "MountainCar-v0": "groupwise.envs.torch_control:TorchMountainCar",
    "MountainCarContinuous-v0": "groupwise.envs.torch_control:TorchMountainCarContinuous",
    "HalfCheetah-v5": "groupwise.contrib.warp_tasks:WarpHalfCheetah",
}
"""Gymnasium's tasks of which there is one in torch, step by step the same up to rounding."""


def makes_rows(env: object) -> bool:
    """Whether ``env`` is a callable that returns a whole ``GroupEnv``: one that asks for ``num_envs``."""
    return callable(env) and "num_envs" in _parameters(env)


def from_maker(make: Callable[..., Any], cfg: EnvCfg, num_envs: int, device: torch.device | str = "cpu") -> GroupEnv:
    """The ``GroupEnv`` that ``make`` returns for so many rows.

    Args:
        make: called with ``num_envs``, with ``device`` if it asks for that, and with ``cfg.kwargs``.

    Raises:
        EnvError: it returned something else, or a setting cannot be met.
    """
    settings = {"num_envs": num_envs, **cfg.kwargs}
    parameters = _parameters(make)
    if "device" in parameters:
        settings["device"] = device
    if cfg.max_episode_steps is not None and "max_episode_steps" in parameters:
        settings["max_episode_steps"] = cfg.max_episode_steps
    env = make(**settings)
    if not isinstance(env, GroupEnv):
        raise EnvError(
            f"the callable with num_envs returned a {type(env).__name__}, expected a GroupEnv; fix: a callable that "
            "returns one gymnasium.Env has no parameter num_envs"
        )
    return adopt(env, cfg, num_envs)


def adopt(env: GroupEnv, cfg: EnvCfg, num_envs: int | None) -> GroupEnv:
    """``env`` itself, if it is what the settings say.

    Raises:
        EnvError: it has other rows, another step limit or another autoreset mode.
    """
    if num_envs not in (None, env.num_envs):
        raise EnvError(f"{env.env_id} has {env.num_envs} rows, but num_envs is {num_envs}; fix: leave num_envs out")
    if cfg.max_episode_steps not in (None, env.max_episode_steps):
        raise EnvError(
            f"max_episode_steps is {cfg.max_episode_steps}, but {env.env_id} ends its episodes after "
            f"{env.max_episode_steps}; fix: set it there, or take max_episode_steps in its constructor"
        )
    if cfg.autoreset != "disabled":
        raise EnvError(
            f"{env.env_id} never resets itself, but autoreset is {cfg.autoreset!r}; fix: autoreset='disabled'"
        )
    return env


def from_torch(cfg: EnvCfg, num_envs: int, device: torch.device | str = "cpu") -> GroupEnv:
    """The task ``cfg.id`` in torch.

    Raises:
        EnvError: there is none in torch, or arguments are given, of which it takes none.
        MissingExtraError: its simulator is not installed.
    """
    if cfg.id not in IN_TORCH:
        raise EnvError(
            f"{cfg.id} is not written in torch, only {', '.join(IN_TORCH)} are; fix: env.vectorization='auto', or a "
            "TorchGroupEnv of yours, given as a class in Python"
        )
    if cfg.kwargs:
        raise EnvError(f"{cfg.id} in torch takes no env.kwargs, got {cfg.kwargs}; fix: env.vectorization='auto'")
    return from_maker(_resolve(IN_TORCH[cfg.id]), cfg, num_envs, device)


def torch_fix(env_id: str) -> str:
    """What to say first to those who need the task in torch, where there is one."""
    return "env.vectorization='torch', or " if env_id in IN_TORCH else ""


def from_envpool(
    cfg: EnvCfg, grouped: bool, num_envs: int, block_size: int = 1, device: torch.device | str = "cpu"
) -> VectorEnv:
    """EnvPool's version of ``cfg.id``.

    Args:
        block_size: neighbours that start together, see ``EnvPoolGroupEnv``.

    Raises:
        MissingExtraError: EnvPool is not installed.
        UnknownNameError: EnvPool has no such environment.
        EnvError: the settings do not fit.
    """
    make: Callable[..., VectorEnv] = _resolve("groupwise.contrib.envpool:make")
    return make(cfg, num_envs, block_size=block_size if grouped else 1, device=device)


def _resolve(path: str) -> Any:
    """What ``module:attribute`` names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _parameters(env: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(env).parameters)
    except (TypeError, ValueError):  # some built-in callables do not say
        return set()
