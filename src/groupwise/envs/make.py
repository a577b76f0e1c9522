"""From a config, and perhaps an object of the user's, to environments in tensors."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import metadata
from importlib.resources import files
from typing import Any, Literal, overload

import gymnasium
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit, TransformObservation

from groupwise.envs import self_vectorised
from groupwise.envs.base import GroupEnv, VectorEnv
from groupwise.envs.cartpole import CartPoleGroupEnv
from groupwise.envs.configs import EnvCfg
from groupwise.envs.groups import SeededGroupEnv
from groupwise.envs.gymnasium import GymnasiumVectorEnv
from groupwise.envs.state_vector import HasStates, StateVectorGroupEnv
from groupwise.errors import EnvError, GroupStartError, MissingExtraError, UnknownNameError

EnvMaker = Callable[..., gymnasium.Env]
_VECTORIZERS: dict[str, type[SyncVectorEnv] | type[AsyncVectorEnv]] = {"sync": SyncVectorEnv, "async": AsyncVectorEnv}


@overload
def make_env(
    cfg: EnvCfg,
    *,
    grouped: Literal[True],
    num_envs: int | None = None,
    env: object | None = None,
    block_size: int = 1,
    device: torch.device | str = "cpu",
) -> GroupEnv: ...
@overload
def make_env(
    cfg: EnvCfg,
    *,
    grouped: bool = False,
    num_envs: int | None = None,
    env: object | None = None,
    block_size: int = 1,
    device: torch.device | str = "cpu",
) -> VectorEnv: ...
def make_env(
    cfg: EnvCfg,
    *,
    grouped: bool = False,
    num_envs: int | None = None,
    env: object | None = None,
    block_size: int = 1,
    device: torch.device | str = "cpu",
) -> VectorEnv:
    """The environments that ``cfg`` describes.

    Args:
        grouped: whether rows must start where they are told (GRPO); then a ``GroupEnv`` comes back.
        num_envs: instead of ``cfg.num_envs``.
        env: used instead of ``cfg.id``: a callable that returns a ``gymnasium.Env`` (called with ``cfg.kwargs``), one
            with a parameter ``num_envs`` that returns a whole ``GroupEnv`` (``TorchGroupEnv``, say), or a ready
            ``GroupEnv`` or ``gymnasium.vector.VectorEnv``, which brings its own number of rows and autoreset mode.
        block_size: rows that will only be started together, for environments that are faster then (EnvPool).
        device: where observations go.

    Raises:
        UnknownNameError: nobody registered ``cfg.id``.
        MissingExtraError: the environment needs a package that is not installed.
        GroupStartError: siblings could not share a start in this kind of environment.
        EnvError: the settings do not fit together or the environment, or ``cfg.id`` names a module to import.
    """
    if isinstance(env, GroupEnv):
        return self_vectorised.adopt(env, cfg, num_envs)
    if isinstance(env, gymnasium.vector.VectorEnv):
        return _adopt(env, cfg, grouped, num_envs, device)
    if env is not None and not callable(env):
        raise EnvError(
            f"env is a {type(env).__name__}, expected a Gymnasium id, a callable that returns a gymnasium.Env, a "
            "GroupEnv or a gymnasium.vector.VectorEnv; mend: pass the class or a lambda instead of one environment"
        )
    if grouped and cfg.autoreset != "disabled":
        raise EnvError(
            f"a grouped environment is reset by its collector, but autoreset is {cfg.autoreset!r}; mend: autoreset='disabled'"
        )
    if env is None and ":" in cfg.id:
        raise EnvError(
            f"environment {cfg.id!r} would import {cfg.id.partition(':')[0]!r}, and a config imports nothing; mend: import "
            "it yourself (on the command line: --plugin file.py) and name the id alone"
        )
    num_envs = num_envs or cfg.num_envs
    if env is not None and self_vectorised.makes_rows(env):
        return self_vectorised.from_maker(env, cfg, num_envs, device)
    vectorization = _vectorization(cfg, env)
    if vectorization == "envpool":
        return self_vectorised.from_envpool(cfg, grouped, num_envs, block_size, device)
    if vectorization == "entry_point":
        return _from_entry_point(cfg, grouped, num_envs, device)
    with _explained(cfg.id):
        make = _single(cfg, env)
        env_id, max_episode_steps = _describe(make)
        max_episode_steps = cfg.max_episode_steps or max_episode_steps
        if grouped:
            return SeededGroupEnv(
                make,
                num_envs,
                env_id=env_id,
                max_episode_steps=max_episode_steps,
                vectorizer=_VECTORIZERS[vectorization],
                device=device,
            )
        vector = _VECTORIZERS[vectorization](
            [_copying(make, cfg)] * num_envs, copy=False, autoreset_mode=AutoresetMode[cfg.autoreset.upper()]
        )
        return GymnasiumVectorEnv(vector, env_id=env_id, max_episode_steps=max_episode_steps, device=device)


def _single(cfg: EnvCfg, env: Callable[..., gymnasium.Env] | None) -> Callable[[], gymnasium.Env]:
    """What makes one environment, with its step limit."""
    if env is None:
        return partial(gymnasium.make, cfg.id, **_with_limit(cfg))
    make, limit = partial(env, **cfg.kwargs), cfg.max_episode_steps
    return make if limit is None else lambda: TimeLimit(make(), limit)


def _copying(make: EnvMaker, cfg: EnvCfg) -> EnvMaker:
    """``make``, with fresh observations under ``same_step``: the reset would overwrite the final one where it is reused."""
    return (lambda: TransformObservation(make(), copy.deepcopy, None)) if cfg.autoreset == "same_step" else make


def _with_limit(cfg: EnvCfg) -> dict[str, Any]:
    """Arguments of Gymnasium's makers, which take the step limit as one of them."""
    return cfg.kwargs if cfg.max_episode_steps is None else {**cfg.kwargs, "max_episode_steps": cfg.max_episode_steps}


def _vectorization(cfg: EnvCfg, env: object | None) -> str:
    if env is not None and cfg.vectorization in ("entry_point", "envpool"):
        raise EnvError(
            f"a callable cannot be vectorised by {cfg.vectorization!r}; mend: vectorization='sync' or 'async'"
        )
    if cfg.vectorization != "auto":
        return cfg.vectorization
    if env is not None or cfg.autoreset == "same_step":  # which no entry point offers
        return "sync"
    table: dict[str, str] = json.loads(files("groupwise.envs").joinpath("vectorization.json").read_text())
    return table.get(cfg.id, "sync")


def _from_entry_point(cfg: EnvCfg, grouped: bool, num_envs: int, device: torch.device | str) -> VectorEnv:
    with _explained(cfg.id):
        env = gymnasium.make_vec(cfg.id, num_envs, vectorization_mode="vector_entry_point", **_with_limit(cfg))
    if cfg.autoreset == "disabled" and isinstance(env, CartPoleVectorEnv):
        return CartPoleGroupEnv(env, env_id=cfg.id, device=device)
    if grouped:
        raise _no_shared_start(env, cfg.id, "vectorization='sync'")
    vector = GymnasiumVectorEnv(env, env_id=cfg.id, max_episode_steps=_step_limit(env), device=device)
    if vector.autoreset != cfg.autoreset:
        raise EnvError(
            f"the vectorised entry point of {cfg.id} resets finished rows by {vector.autoreset!r}, but autoreset is "
            f"{cfg.autoreset!r}; mend: autoreset={vector.autoreset!r}, or vectorization='sync'"
        )
    return vector


def _adopt(
    env: gymnasium.vector.VectorEnv, cfg: EnvCfg, grouped: bool, num_envs: int | None, device: torch.device | str
) -> VectorEnv:
    env_id = type(env.unwrapped).__name__ if env.spec is None else env.spec.id
    if num_envs not in (None, env.num_envs):
        raise EnvError(f"{env_id} has {env.num_envs} rows, but num_envs is {num_envs}; mend: leave num_envs out")
    if cfg.max_episode_steps is not None:
        raise EnvError(
            f"max_episode_steps is {cfg.max_episode_steps}, but {env_id} was given ready-made; mend: limit it when you make it"
        )
    if not grouped:
        return GymnasiumVectorEnv(env, env_id=env_id, max_episode_steps=_step_limit(env), device=device)
    if isinstance(env, CartPoleVectorEnv):
        return CartPoleGroupEnv(env, env_id=env_id, device=device)
    if isinstance(env, HasStates):
        return StateVectorGroupEnv(env, env_id=env_id, max_episode_steps=_step_limit(env), device=device)
    raise _no_shared_start(
        env, env_id, "pass the id or a callable that returns one gymnasium.Env, or add clone_state and restore_state"
    )


def _no_shared_start(env: gymnasium.vector.VectorEnv, env_id: str, mend: str) -> GroupStartError:
    return GroupStartError(
        f"rows of {env_id} ({type(env).__name__}) cannot be started one by one where they are told, so siblings of a "
        f"group could not share a start; mend: {mend}"
    )


def _step_limit(env: gymnasium.vector.VectorEnv) -> int | None:
    if isinstance(env, CartPoleVectorEnv):
        return env.max_episode_steps
    return None if env.spec is None else env.spec.max_episode_steps


def _describe(make: EnvMaker) -> tuple[str, int | None]:
    """Name and step limit, read from one environment made for it."""
    probe = make()
    if not isinstance(probe, gymnasium.Env):
        raise EnvError(f"the callable returned a {type(probe).__name__}, expected a gymnasium.Env")
    spec, name = probe.spec, type(probe.unwrapped).__name__
    probe.close()
    return (name, None) if spec is None else (spec.id, spec.max_episode_steps)


@contextmanager
def _explained(env_id: str) -> Iterator[None]:
    """Turn Gymnasium's errors about names and packages into ours."""
    try:
        yield
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        raise UnknownNameError("environment", env_id, gymnasium.registry) from error
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingExtraError(f"{env_id} needs a package that is not installed: {_mend(str(error))}") from error
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{env_id} needs {error.name!r}, which is not installed; mend: install it") from error
    except (gymnasium.error.Error, TypeError) as error:  # TypeError: arguments that it does not take
        raise EnvError(f"{env_id} cannot be made: {error}") from error


def _mend(message: str) -> str:
    """Gymnasium's message, with the extra of ours that brings what is missing."""
    named = re.search(r"gymnasium\[([\w-]+)\]", message)
    ours = metadata("groupwise").get_all("Provides-Extra") or []
    if named is None or named[1] not in ours:
        return message
    return f"{message}; mend: pip install 'groupwise[{named[1]}]'"
