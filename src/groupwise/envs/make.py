"""From a config, and perhaps an object of the user's, to environments in tensors."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, Literal, overload

import gymnasium
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from groupwise.config.env import EnvCfg
from groupwise.envs import single
from groupwise.envs.base import GroupEnv, VectorEnv
from groupwise.envs.cartpole import CartPoleGroupEnv
from groupwise.envs.gymnasium import GymnasiumVectorEnv
from groupwise.envs.local_rows import OnError
from groupwise.envs.names import refuse_module
from groupwise.envs.rows import RowsGroupEnv
from groupwise.envs.starts import verify_group_start
from groupwise.envs.state_vector import HasStates, StateVectorGroupEnv
from groupwise.errors import EnvError, GroupStartError

VECTORISED = ("CartPole-v0", "CartPole-v1")
"""Gymnasium's tasks whose own vectorised version is taken by default."""
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


def _from_maker(make: Callable[..., Any], cfg: EnvCfg, num_envs: int, device: torch.device | str = "cpu") -> GroupEnv:
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
    return _adopt_rows(env, cfg, num_envs)


def _adopt_rows(env: GroupEnv, cfg: EnvCfg, num_envs: int | None) -> GroupEnv:
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


def _from_torch(cfg: EnvCfg, num_envs: int, device: torch.device | str = "cpu") -> GroupEnv:
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
    return _from_maker(_resolve(IN_TORCH[cfg.id]), cfg, num_envs, device)


def torch_fix(env_id: str) -> str:
    """What to say first to those who need the task in torch, where there is one."""
    return "env.vectorization='torch', or " if env_id in IN_TORCH else ""


def _from_envpool(
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


@overload
def make_env(
    cfg: EnvCfg,
    *,
    grouped: Literal[True],
    num_envs: int | None = None,
    env: object | None = None,
    block_size: int = 1,
    verify: bool = True,
    on_error: OnError = "raise",
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
    verify: bool = True,
    on_error: OnError = "raise",
    device: torch.device | str = "cpu",
) -> VectorEnv: ...
def make_env(
    cfg: EnvCfg,
    *,
    grouped: bool = False,
    num_envs: int | None = None,
    env: object | None = None,
    block_size: int = 1,
    verify: bool = True,
    on_error: OnError = "raise",
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
        verify: try out, two rows at a time, how members share their start, and take the best way (grouped only).
            Without it rows start by seeded resets that nobody checked, which is enough for evaluation.
        on_error: ``report`` turns errors in a row's ``step`` into ``EnvStep.failed`` (environments made one by one).
        device: where observations go.

    Raises:
        UnknownNameError: nobody registered ``cfg.id``.
        MissingExtraError: the environment needs a package that is not installed.
        GroupStartError: members could not share a start in this kind of environment.
        EnvError: the settings do not fit together or the environment, or ``cfg.id`` names a module to import.
    """
    if not grouped:
        _refuse_what_groups_have(cfg)
    made = _make(cfg, grouped, num_envs, env, block_size, verify, on_error, device)
    if grouped and not isinstance(made, RowsGroupEnv):
        _check_settings(made, cfg)
    if grouped and verify and isinstance(made, GroupEnv) and made.start_report is None:
        made.start_report = verify_group_start(made)
    return made


def _make(
    cfg: EnvCfg,
    grouped: bool,
    num_envs: int | None,
    env: object | None,
    block_size: int,
    verify: bool,
    on_error: OnError,
    device: torch.device | str,
) -> VectorEnv:
    if isinstance(env, GroupEnv):
        return _adopt_rows(env, cfg, num_envs)
    if isinstance(env, gymnasium.vector.VectorEnv):
        return _adopt(env, cfg, grouped, num_envs, device)
    if env is not None and not callable(env):
        raise EnvError(
            f"env is a {type(env).__name__}, expected a Gymnasium id, a callable that returns a gymnasium.Env, a "
            "GroupEnv or a gymnasium.vector.VectorEnv; fix: pass the class or a lambda instead of one environment"
        )
    if grouped and cfg.autoreset != "disabled":
        raise EnvError(
            f"a grouped environment is reset by its collector, but autoreset is {cfg.autoreset!r}; fix: autoreset='disabled'"
        )
    if env is None:
        refuse_module(cfg.id)
    if cfg.start_mode == "native":
        _refuse_what_arrays_lack(cfg)
    num_envs = num_envs or cfg.num_envs
    if env is not None and makes_rows(env):
        return _from_maker(env, cfg, num_envs, device)
    vectorization = _vectorization(cfg, env)
    if vectorization == "torch":
        return _from_torch(cfg, num_envs, device)
    if vectorization == "envpool":
        return _from_envpool(cfg, grouped, num_envs, block_size, device)
    if vectorization == "entry_point":
        return _from_entry_point(cfg, grouped, num_envs, device)
    if grouped:
        return single.group_env(cfg, env, num_envs, vectorization, verify=verify, on_error=on_error, device=device)
    return single.vector_env(cfg, env, num_envs, vectorization, device)


def _vectorization(cfg: EnvCfg, env: object | None) -> str:
    if env is not None and cfg.vectorization in ("entry_point", "envpool", "torch"):
        raise EnvError(
            f"a callable cannot be vectorised by {cfg.vectorization!r}; fix: vectorization='sync' or 'async'"
        )
    if cfg.vectorization != "auto":
        return cfg.vectorization
    offered = cfg.autoreset != "same_step" and cfg.start_mode in ("auto", "native")
    if env is not None or cfg.num_random_noops or cfg.reward_parts or not offered:  # no entry point has these
        return "sync"
    return "entry_point" if cfg.id in VECTORISED else "sync"


def _from_entry_point(cfg: EnvCfg, grouped: bool, num_envs: int, device: torch.device | str) -> VectorEnv:
    with single.explained(cfg.id):
        env = gymnasium.make_vec(cfg.id, num_envs, vectorization_mode="vector_entry_point", **single.with_limit(cfg))
    if cfg.autoreset == "disabled" and isinstance(env, CartPoleVectorEnv):
        return CartPoleGroupEnv(env, env_id=cfg.id, device=device)
    if grouped:
        raise _no_shared_start(env, cfg.id, "vectorization='sync'")
    vector = GymnasiumVectorEnv(env, env_id=cfg.id, max_episode_steps=_step_limit(env), device=device)
    if vector.autoreset != cfg.autoreset:
        raise EnvError(
            f"the vectorised entry point of {cfg.id} resets finished rows by {vector.autoreset!r}, but autoreset is "
            f"{cfg.autoreset!r}; fix: autoreset={vector.autoreset!r}, or vectorization='sync'"
        )
    return vector


def _adopt(
    env: gymnasium.vector.VectorEnv, cfg: EnvCfg, grouped: bool, num_envs: int | None, device: torch.device | str
) -> VectorEnv:
    env_id = type(env.unwrapped).__name__ if env.spec is None else env.spec.id
    if num_envs not in (None, env.num_envs):
        raise EnvError(f"{env_id} has {env.num_envs} rows, but num_envs is {num_envs}; fix: leave num_envs out")
    if cfg.max_episode_steps is not None:
        raise EnvError(
            f"max_episode_steps is {cfg.max_episode_steps}, but {env_id} was given ready-made; fix: limit it when you make it"
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


def _refuse_what_groups_have(cfg: EnvCfg) -> None:
    """Refuse what would be ignored where rows do not start where they are told."""
    for name in ("num_random_noops", "reward_parts", "start_mode"):
        value, default = cfg.model_dump()[name], EnvCfg.model_fields[name].default
        if value != default:
            raise EnvError(
                f"env.{name} = {value!r} is for groups of episodes, and these environments have none; fix: "
                f"env.{name}={default!r}, or an algorithm with groups (grpo)"
            )


def _refuse_what_arrays_lack(cfg: EnvCfg) -> None:
    """Refuse both settings together: each by itself would be told to give way to the other."""
    for name, value in {"num_random_noops": cfg.num_random_noops, "reward_parts": cfg.reward_parts}.items():
        if value:
            raise GroupStartError(
                f"env.start_mode is 'native', but env.{name} = {value!r} is only for environments made one by one, whose "
                f"states are not in arrays; fix: env.start_mode='auto', or env.{name}={EnvCfg.model_fields[name].default!r}"
            )


def _check_settings(env: VectorEnv, cfg: EnvCfg) -> None:
    """Refuse what only environments made one by one can do."""
    for name, value in {"num_random_noops": cfg.num_random_noops, "reward_parts": cfg.reward_parts}.items():
        if value:
            raise EnvError(
                f"{env.env_id} vectorises itself, so {name} = {value!r} cannot be had; fix: vectorization='sync'"
            )
    if isinstance(env, GroupEnv) and cfg.start_mode not in ("auto", env.start_mode):
        raise GroupStartError(
            f"start_mode is {cfg.start_mode!r}, but {env.env_id} vectorises itself and starts groups by "
            f"{env.start_mode!r}; fix: start_mode='auto', or vectorization='sync'"
        )


def _no_shared_start(env: gymnasium.vector.VectorEnv, env_id: str, fix: str) -> GroupStartError:
    return GroupStartError(
        f"rows of {env_id} ({type(env).__name__}) cannot be started one by one where they are told, so members of a "
        f"group could not share a start; fix: {fix}"
    )


def _step_limit(env: gymnasium.vector.VectorEnv) -> int | None:
    if isinstance(env, CartPoleVectorEnv):
        return env.max_episode_steps
    return None if env.spec is None else env.spec.max_episode_steps
