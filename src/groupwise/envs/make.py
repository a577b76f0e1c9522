"""Make environments in tensors, from a config or an object of the user's."""

import inspect
import logging
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import gymnasium
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, TimeLimit
from gymnasium.wrappers import vector as vector_wrappers

from groupwise.config.run import EnvCfg
from groupwise.envs.base import GroupEnv, GroupStartReport, VectorEnv
from groupwise.envs.gymnasium import ActionChunk, GymnasiumVectorEnv, RandomNoops, kept_space, mask_notes, with_masks
from groupwise.envs.names import check_id, import_package, unknown_environment
from groupwise.envs.rows import OnError, RowCfg, RowsGroupEnv
from groupwise.envs.starts import KEEPS_STATE, carried_over, choose_start, verify_group_start, verify_rows
from groupwise.envs.torch_env import CartPoleGroupEnv, TorchCartPole
from groupwise.errors import EnvError, GroupStartError, MissingExtraError, installing
from groupwise.system import num_cpus

log = logging.getLogger(__name__)

# Rows of single Gymnasium environments: a registered id, or the user's callable


def _from_single(
    cfg: EnvCfg,
    env: Callable[..., gymnasium.Env] | None,
    num_envs: int,
    *,
    grouped: bool,
    in_workers: bool,
    verify: bool,
    on_error: OnError,
    reward_parts: tuple[str, ...],
    device: torch.device | str,
) -> VectorEnv:
    """Rows that start independently, by the best start mode that works; not ``grouped``: rows that are reset by the caller.

    Without ``verify``, ``cfg.start_mode`` is taken as it is; ``auto`` is ``seed``.

    Raises:
        GroupStartError: members could not share a start.
    """
    if cfg.start_mode == "native":
        raise GroupStartError(
            f"env.start_mode is 'native', but {cfg.id} is made of single environments, whose states are not in arrays; "
            "fix: env.start_mode='auto'"
        )
    probe = make_one(cfg, env)
    registered = gymnasium.registry.get(cfg.id, cfg.id)  # the id may be unknown in another process
    limit = cfg.max_episode_steps or step_limit(probe)
    space, notes = kept_space(probe.observation_space, cfg.obs_keys, probe.action_space)
    notes += mask_notes(probe, space, cfg)
    probe.close()
    rows = RowCfg(
        partial(_make, registered if env is None else env, cfg, reward_parts),
        env_id=type(probe.unwrapped).__name__ if probe.spec is None else probe.spec.id,
        observation_space=space,
        action_space=probe.action_space,
        max_episode_steps=None if limit is None else math.ceil(limit / cfg.decision_steps),
        start_mode="seed" if cfg.start_mode == "auto" else cfg.start_mode,
        reward_parts=reward_parts,
        log_info=cfg.log_info,
        chunked=cfg.is_multi_step,
        on_error=on_error,
        notes=notes,
        timeout=cfg.timeout,
    )
    report = None
    if grouped and cfg.start_mode == "none":
        report = GroupStartReport(cfg.id, "none", start_varies=True, noise_varies=True)
    elif grouped and verify:
        report = choose_start(rows, cfg.start_mode)
        rows = rows._replace(start_mode=report.start_mode)
    made = RowsGroupEnv(rows, num_envs, num_workers=num_cpus() if in_workers else 0, device=device)
    made.start_report = report
    if verify and not grouped:
        made.carries_over = _statistics(probe) or carried_over(rows)
        _warn_of_state(made)
    if report is not None and report.start_mode != "none" and in_workers:
        try:
            verify_rows(made)
        except BaseException:
            made.close()
            raise
    return made


def _with_limit(cfg: EnvCfg) -> dict[str, Any]:
    """Arguments of Gymnasium's makers, which take the step limit as one of them."""
    return cfg.kwargs if cfg.max_episode_steps is None else {**cfg.kwargs, "max_episode_steps": cfg.max_episode_steps}


@contextmanager
def explained(env_id: str) -> Iterator[None]:
    """Turn Gymnasium's errors about names and packages into ours."""
    try:
        yield
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.DeprecatedEnv) as error:
        raise unknown_environment(env_id, gymnasium.registry) from error
    except gymnasium.error.DependencyNotInstalled as error:
        named = re.search(r"gymnasium\[(box2d|mujoco)\]", str(error))  # groupwise's extras have the same names
        fix = installing(named[1]) if named else error
        raise MissingExtraError(f"{env_id} needs a package that is not installed; fix: {fix}") from error
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{env_id} needs {error.name!r}, which is not installed; fix: install it") from error
    except (gymnasium.error.Error, TypeError) as error:  # TypeError: arguments that it does not take
        raise EnvError(f"{env_id} cannot be made: {error}; fix: env.kwargs, or env.vectorization") from error


def step_limit(env: gymnasium.Env) -> int | None:
    """The step limit of the outermost ``TimeLimit``, read from the spec; an unregistered environment gets a spec for it."""
    if env.unwrapped.spec is None:
        env.unwrapped.spec = EnvSpec(type(env.unwrapped).__name__)
    return None if env.spec is None else env.spec.max_episode_steps


def make_one(cfg: EnvCfg, env: Callable[..., gymnasium.Env] | None) -> gymnasium.Env:
    """One environment, with its step limit and random first actions."""
    with explained(cfg.id):
        return _make(cfg.id if env is None else env, cfg)


def make_own_rows(cfg: EnvCfg, num_envs: int) -> gymnasium.vector.VectorEnv:
    """The environment's own vectorised version."""
    with explained(cfg.id):
        import_package(cfg.id)
        return gymnasium.make_vec(cfg.id, num_envs, "vector_entry_point", **_with_limit(cfg))


def of_sb3(env: object) -> str:
    """How to write one of Stable-Baselines3's vectors of environments here; empty for others."""
    fix = "its id or function, with num_envs=...; VecNormalize is policy={'normalize_obs': True, 'normalize_reward': True}"
    return f"; of Stable-Baselines3's: {fix}" if type(env).__module__.startswith("stable_baselines3.") else ""


def _make(
    env: Callable[..., gymnasium.Env] | EnvSpec | str, cfg: EnvCfg, reward_parts: tuple[str, ...] = ()
) -> gymnasium.Env:
    if callable(env):
        made = env(**cfg.kwargs)
        if not isinstance(made, gymnasium.Env):
            raise EnvError(f"the callable returned a {type(made).__name__}, expected a gymnasium.Env{of_sb3(made)}")
        if cfg.max_episode_steps is not None:
            if (own := step_limit(made)) is not None and own < cfg.max_episode_steps:
                raise EnvError(
                    f"max_episode_steps is {cfg.max_episode_steps}, but the callable's own limit is {own}; fix: set it where you "
                    "make the environment"
                )
            made = TimeLimit(made, cfg.max_episode_steps)
    else:
        import_package(cfg.id)
        made = gymnasium.make(env, **_with_limit(cfg))
    made = with_masks(made, cfg)
    if cfg.num_random_noops:
        made = RandomNoops(made, cfg.num_random_noops)
    if cfg.is_multi_step:
        made = ActionChunk(made, cfg.action_chunk, reward_parts, cfg.num_action_steps, cfg.action_repeat)
    return made


VECTORISED = ("CartPole-v0", "CartPole-v1")
"""Gymnasium's tasks whose own vectorised version is the default."""
_ONLY_SINGLE = (
    "obs_keys", "action_masks", "num_random_noops", "action_chunk", "num_action_steps", "action_repeat", "log_info"
)  # fmt: skip
"""Settings that only single environments support."""


def makes_rows(env: object) -> bool:
    """Whether ``env`` is a callable with a parameter ``num_envs``, which returns a whole ``VectorEnv``."""
    return callable(env) and "num_envs" in _parameters(env)


def _parameters(env: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(env).parameters)
    except (TypeError, ValueError):  # some built-in callables do not say
        return set()


class _Settings(TypedDict, total=False):
    """The other arguments of ``make_env``."""

    num_envs: int | None
    env: object | None
    verify: bool
    on_error: OnError
    reward_parts: tuple[str, ...]
    device: torch.device | str


@overload
def make_env(cfg: EnvCfg, *, grouped: Literal[True], **settings: Unpack[_Settings]) -> GroupEnv: ...
@overload
def make_env(cfg: EnvCfg, *, grouped: bool = False, **settings: Unpack[_Settings]) -> VectorEnv: ...
def make_env(
    cfg: EnvCfg,
    *,
    grouped: bool = False,
    num_envs: int | None = None,
    env: object | None = None,
    verify: bool = True,
    on_error: OnError = "raise",
    reward_parts: tuple[str, ...] = (),
    device: torch.device | str = "cpu",
) -> VectorEnv:
    """The environments that ``cfg`` describes.

    Args:
        grouped: whether rows must start independently (GRPO); then the result is a ``GroupEnv``.
        num_envs: instead of ``cfg.num_envs``.
        env: used instead of ``cfg.id``: a callable that returns a ``gymnasium.Env`` (called with ``cfg.kwargs``), one
            with a parameter ``num_envs`` that returns a whole ``VectorEnv`` (such as a ``TorchGroupEnv``), or a ready
            ``VectorEnv`` or ``gymnasium.vector.VectorEnv``, which brings its own number of rows.
        verify: try out how members share their start, and choose the best start mode (grouped only). Without it rows
            start by unchecked seeded resets, which is enough for evaluation.
        on_error: ``report`` turns errors in a row's ``step`` into ``EnvStep.failed`` (single environments only).
        reward_parts: entries of ``info`` that make up the reward, for ``EnvStep.reward_parts`` (single environments only).
        device: where observations go.

    Raises:
        UnknownNameError: ``cfg.id`` is not registered.
        MissingExtraError: the environment needs a package that is not installed.
        GroupStartError: members could not share a start in this kind of environment.
        EnvError: the settings do not fit together or the environment, or ``cfg.id`` names a module to import.
    """
    if cfg.start_mode != "auto" and not grouped:
        raise EnvError(
            f"env.start_mode = {cfg.start_mode!r} is for groups of episodes; fix: env.start_mode='auto', or an algorithm "
            "with groups (grpo)"
        )
    made: VectorEnv
    if isinstance(env, VectorEnv | gymnasium.vector.VectorEnv):
        made = env if isinstance(env, VectorEnv) else _adopt(env, device)
        _check_ready(made, cfg, num_envs, device)
    elif env is not None and not callable(env):
        raise EnvError(
            f"env is a {type(env).__name__}, expected a Gymnasium id, a callable that returns a gymnasium.Env, a "
            "GroupEnv or a gymnasium.vector.VectorEnv; fix: pass the class or a lambda instead of one environment; for "
            f"prompts gw.TextTask(prompts, reward=...){of_sb3(env)}"
        )
    else:
        num_envs = num_envs or cfg.num_envs
        if env is None:
            check_id(cfg.id)
        way = cfg.vectorization
        if env is not None and makes_rows(env):
            made = _from_maker(env, cfg, num_envs, device)
        elif env is not None and way in ("entry_point", "torch"):
            raise EnvError(f"a callable cannot be vectorised by {way!r}; fix: vectorization='sync' or 'async'")
        elif way == "torch":
            if cfg.id != "CartPole-v1":
                raise EnvError(
                    f"{cfg.id} is not written in torch, only CartPole-v1 is; fix: env.vectorization='auto', or a "
                    "TorchGroupEnv of yours, given as a class in Python"
                )
            with explained(cfg.id):
                made = _from_maker(TorchCartPole, cfg, num_envs, device)
        elif way == "entry_point" or (
            way == "auto"
            and env is None
            and cfg.id in VECTORISED
            and not (reward_parts or cfg.changed(*_ONLY_SINGLE) or cfg.start_mode not in ("auto", "native"))
        ):
            made = _adopt(make_own_rows(cfg, num_envs), device)
        else:
            how: dict[str, Any] = {"verify": verify, "on_error": on_error, "reward_parts": reward_parts}
            return _from_single(cfg, env, num_envs, grouped=grouped, in_workers=way == "async", **how, device=device)
    if grouped:
        made = made.as_group_env(verify=verify)
    elif verify:
        _warn_of_state(made)
    parts = {"credit.reward.names": reward_parts} if reward_parts else {}
    for name, value in (cfg.changed(*_ONLY_SINGLE) | parts).items():
        raise EnvError(f"{made.env_id} vectorises itself, without {name} = {value!r}; fix: vectorization='sync'")
    if isinstance(made, GroupEnv) and cfg.start_mode not in ("auto", made.start_mode):
        raise GroupStartError(
            f"start_mode is {cfg.start_mode!r}, but {made.env_id} vectorises itself and starts groups by "
            f"{made.start_mode!r}; fix: start_mode='auto', or vectorization='sync'"
        )
    if grouped and verify and isinstance(made, GroupEnv) and made.start_report is None:
        made.start_report = verify_group_start(made)
    return made


def _from_maker(make: Callable[..., Any], cfg: EnvCfg, num_envs: int, device: torch.device | str) -> VectorEnv:
    """The ``VectorEnv`` that ``make`` returns, called with the parameters that it has."""
    settings = {"num_envs": num_envs, **cfg.kwargs}
    parameters = _parameters(make)
    if "device" in parameters:
        settings["device"] = device
    if cfg.max_episode_steps is not None and "max_episode_steps" in parameters:
        settings["max_episode_steps"] = cfg.max_episode_steps
    env = make(**settings)
    if not isinstance(env, VectorEnv):
        raise EnvError(
            f"the callable with num_envs returned a {type(env).__name__}, expected a GroupEnv or gw.from_torch_sim; fix: a "
            "callable that returns one gymnasium.Env has no parameter num_envs"
        )
    _check_ready(env, cfg, num_envs, device)
    return env


def _check_ready(env: VectorEnv, cfg: EnvCfg, num_envs: int | None, device: torch.device | str) -> None:
    """Refuse settings that a ready environment does not follow."""
    check_rows(env, num_envs)
    if cfg.max_episode_steps not in (None, env.max_episode_steps):
        raise EnvError(
            f"max_episode_steps is {cfg.max_episode_steps}, but that of {env.env_id} is {env.max_episode_steps}; fix: set "
            "it where you make the environment, or take max_episode_steps in its constructor"
        )
    if env.device.type != torch.device(device).type:
        raise EnvError(f"{env.env_id} is on {env.device}, the policy on {device}; fix: device={env.device.type!r}")


def check_rows(env: object, num_envs: int | None) -> None:
    """Refuse a ready environment of another number of rows than ``num_envs``, if that is set."""
    if isinstance(env, VectorEnv | gymnasium.vector.VectorEnv) and num_envs not in (None, env.num_envs):
        name = env.env_id if isinstance(env, VectorEnv) else type(env).__name__
        raise EnvError(f"{name} has {env.num_envs} rows, but num_envs is {num_envs}; fix: as many, or leave it out")


def _adopt(env: gymnasium.vector.VectorEnv, device: torch.device | str) -> VectorEnv:
    env_id = type(env.unwrapped).__name__ if env.spec is None else env.spec.id
    if isinstance(env, CartPoleVectorEnv):
        return CartPoleGroupEnv(env, env_id=env_id, device=device)
    # a limit given to make_vec is among its arguments
    limit = None if env.spec is None else env.spec.kwargs.get("max_episode_steps", env.spec.max_episode_steps)
    adopted = GymnasiumVectorEnv(env, env_id=env_id, max_episode_steps=limit, device=device)
    adopted.carries_over = _statistics(env)
    return adopted


_RUNNING = (
    NormalizeObservation,
    NormalizeReward,
    vector_wrappers.NormalizeObservation,
    vector_wrappers.NormalizeReward,
)
"""Gymnasium's wrappers with running statistics."""


def _statistics(env: Any) -> str:
    """The first wrapper with running statistics around an environment, or around a vector environment and its rows."""
    while isinstance(env, gymnasium.Wrapper | gymnasium.vector.VectorWrapper):
        if isinstance(env, _RUNNING):
            return f"running statistics of {type(env).__name__}"
        env = env.env
    return _statistics(env.envs[0]) if isinstance(env, gymnasium.vector.SyncVectorEnv) else ""


def _warn_of_state(env: VectorEnv) -> None:
    if env.carries_over:
        log.warning("an episode of %s depends on those before it (%s): %s", env.env_id, env.carries_over, KEEPS_STATE)
