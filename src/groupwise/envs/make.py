"""From a config, and perhaps an object of the user's, to environments in tensors."""

import json
from importlib.resources import files
from typing import Literal, overload

import gymnasium
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from groupwise.config.env import EnvCfg
from groupwise.envs import self_vectorised, single
from groupwise.envs.base import GroupEnv, VectorEnv
from groupwise.envs.cartpole import CartPoleGroupEnv
from groupwise.envs.groups import verify_group_start
from groupwise.envs.gymnasium import GymnasiumVectorEnv
from groupwise.envs.local_rows import OnError
from groupwise.envs.names import refuse_module
from groupwise.envs.rows import RowsGroupEnv
from groupwise.envs.state_vector import HasStates, StateVectorGroupEnv
from groupwise.errors import EnvError, GroupStartError


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
        verify: try out, two rows at a time, how siblings share their start, and take the best way (grouped only).
            Without it rows start by seeded resets that nobody checked, which is enough for evaluation.
        on_error: ``report`` turns errors in a row's ``step`` into ``EnvStep.failed`` (environments made one by one).
        device: where observations go.

    Raises:
        UnknownNameError: nobody registered ``cfg.id``.
        MissingExtraError: the environment needs a package that is not installed.
        GroupStartError: siblings could not share a start in this kind of environment.
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
        return self_vectorised.adopt(env, cfg, num_envs)
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
    if env is not None and self_vectorised.makes_rows(env):
        return self_vectorised.from_maker(env, cfg, num_envs, device)
    vectorization = _vectorization(cfg, env)
    if vectorization == "torch":
        return self_vectorised.from_torch(cfg, num_envs, device)
    if vectorization == "envpool":
        return self_vectorised.from_envpool(cfg, grouped, num_envs, block_size, device)
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
    table: dict[str, str] = json.loads(files("groupwise.envs").joinpath("vectorization.json").read_text())
    return table.get(cfg.id, "sync")


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
                f"env.{name} = {value!r} is for groups of attempts, and these environments have none; fix: "
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
        f"rows of {env_id} ({type(env).__name__}) cannot be started one by one where they are told, so siblings of a "
        f"group could not share a start; fix: {fix}"
    )


def _step_limit(env: gymnasium.vector.VectorEnv) -> int | None:
    if isinstance(env, CartPoleVectorEnv):
        return env.max_episode_steps
    return None if env.spec is None else env.spec.max_episode_steps
