"""Make environments in tensors, from a config or an object of the user's."""

import copy
import inspect
import math
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypedDict, Unpack, overload

import gymnasium
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeLimit

from groupwise.config.run import EnvCfg, StartMode
from groupwise.envs.base import GroupEnv, GroupStartReport, VectorEnv
from groupwise.envs.gymnasium import (
    GymnasiumVectorEnv,
    LeanSyncVectorEnv,
    allowed_sample,
    kept_space,
    mask_notes,
    with_masks,
)
from groupwise.envs.names import check_id, import_package, unknown_environment
from groupwise.envs.rows import LogInfo, OnError, RowCfg, RowsGroupEnv
from groupwise.envs.starts import choose_start, verify_group_start, verify_rows
from groupwise.envs.torch_env import CartPoleGroupEnv, TorchCartPole
from groupwise.errors import EnvError, GroupStartError, MissingExtraError, installing
from groupwise.system import num_cpus

# Rows made of single Gymnasium environments: a registered id, or a callable of the user's.

ACTION_CHUNK = "groupwise.embodied.vla:ActionChunk"
"""The wrapper of ``env.action_chunk``, which is no part of the core."""


def group_env(
    cfg: EnvCfg,
    env: Callable[..., gymnasium.Env] | None,
    num_envs: int,
    vectorization: str,
    *,
    verify: bool,
    on_error: OnError,
    reward_parts: tuple[str, ...],
    device: torch.device | str,
) -> RowsGroupEnv:
    """Rows that start independently, by the best start mode that works.

    Without ``verify``, ``cfg.start_mode`` is taken as it is; ``auto`` is ``seed``.

    Raises:
        GroupStartError: members could not share a start.
    """
    if cfg.start_mode == "native":
        raise GroupStartError(
            f"env.start_mode is 'native', but {cfg.id} is made of single environments, whose states are not in arrays; "
            "fix: env.start_mode='auto'"
        )
    in_one_process = vectorization == "sync"
    rows = _describe(cfg, env, on_error, reward_parts)
    shared = cfg.start_mode != "none"
    report = choose_start(rows, cfg.start_mode) if verify and shared else None
    unchecked: StartMode = "seed" if cfg.start_mode == "auto" else cfg.start_mode
    rows = rows._replace(start_mode=unchecked if report is None else report.start_mode)
    made = RowsGroupEnv(rows, num_envs, num_workers=0 if in_one_process else num_cpus(), device=device)
    made.start_report = report if shared else GroupStartReport(cfg.id, "none", start_varies=True, noise_varies=True)
    if verify and shared and not in_one_process:
        try:
            verify_rows(made)
        except BaseException:
            made.close()
            raise
    return made


def vector_env(
    cfg: EnvCfg,
    env: Callable[..., gymnasium.Env] | None,
    num_envs: int,
    vectorization: str,
    device: torch.device | str,
) -> VectorEnv:
    """Rows that are reset by the caller: Gymnasium's own in this process, ours in others."""
    rows = _describe(cfg, env, "raise")
    if vectorization == "async":
        return RowsGroupEnv(rows._replace(start_mode="none"), num_envs, num_workers=num_cpus(), device=device)
    with explained(cfg.id):
        vector = LeanSyncVectorEnv([rows.make] * num_envs, copy=False, autoreset_mode=AutoresetMode.DISABLED)
    made = GymnasiumVectorEnv(
        vector,
        env_id=rows.env_id,
        max_episode_steps=rows.max_episode_steps,
        obs_keys=cfg.kept_keys,
        log_info=cfg.log_info,
        device=device,
    )
    made.notes = rows.notes
    return made


class RandomNoops(gymnasium.Wrapper):
    """Starts each episode with up to ``num_random_noops`` random actions, drawn from the seed of the reset."""

    def __init__(self, env: gymnasium.Env, num_random_noops: int) -> None:
        super().__init__(env)
        self._num_random_noops = num_random_noops
        self._actions = copy.deepcopy(env.action_space)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observation after the random actions; where they end the episode, the one of another reset."""
        first = self.env.reset(seed=seed, options=options)
        if seed is not None:
            self._actions.seed(seed)
        for _ in range(self._actions.np_random.integers(self._num_random_noops + 1)):
            action = allowed_sample(self._actions, first[0])
            obs, _, terminated, truncated, info = self.env.step(action)
            first = self.env.reset(options=options) if terminated or truncated else (obs, info)
        return first


def with_limit(cfg: EnvCfg) -> dict[str, Any]:
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


def _describe(
    cfg: EnvCfg, env: Callable[..., gymnasium.Env] | None, on_error: OnError, reward_parts: tuple[str, ...] = ()
) -> RowCfg:
    """The config of a row, read from one environment made for it."""
    probe = make_one(cfg, env)
    registered = gymnasium.registry.get(cfg.id, cfg.id)  # the id may be unknown in another process
    name = type(probe.unwrapped).__name__ if probe.spec is None else probe.spec.id
    limit = cfg.max_episode_steps or step_limit(probe)
    if limit is not None:
        limit = math.ceil(limit / cfg.actions_executed)
    space, notes = kept_space(probe.observation_space, cfg.kept_keys)
    notes += mask_notes(probe, space, cfg)
    probe.close()
    return RowCfg(
        partial(_make, registered if env is None else env, cfg, reward_parts),
        env_id=name,
        observation_space=space,
        action_space=probe.action_space,
        max_episode_steps=limit,
        reward_parts=reward_parts,
        log_info=cfg.log_info,
        chunked=cfg.action_chunk > 1,
        on_error=on_error,
        notes=notes,
        timeout=cfg.timeout,
    )


def _make(
    env: Callable[..., gymnasium.Env] | EnvSpec | str, cfg: EnvCfg, reward_parts: tuple[str, ...] = ()
) -> gymnasium.Env:
    if callable(env):
        made = env(**cfg.kwargs)
        if not isinstance(made, gymnasium.Env):
            raise EnvError(f"the callable returned a {type(made).__name__}, expected a gymnasium.Env")
        if cfg.max_episode_steps is not None:
            made = TimeLimit(made, cfg.max_episode_steps)
    else:
        import_package(cfg.id)
        made = gymnasium.make(env, **with_limit(cfg))
    made = with_masks(made, cfg)
    if cfg.num_random_noops:
        made = RandomNoops(made, cfg.num_random_noops)
    if cfg.log_info:
        made = LogInfo(made, cfg.log_info)
    if cfg.action_chunk == 1:
        return made
    chunked: gymnasium.Env = pkgutil.resolve_name(ACTION_CHUNK)(
        made, cfg.action_chunk, reward_parts, cfg.num_action_steps
    )
    return chunked


VECTORISED = ("CartPole-v0", "CartPole-v1")
"""Gymnasium's tasks whose own vectorised version is the default."""
_ONLY_SINGLE = (
    "obs_keys",
    "action_masks",
    "num_random_noops",
    "action_chunk",
    "num_action_steps",
    "log_info",
)
"""Settings that only single environments support."""


def makes_rows(env: object) -> bool:
    """Whether ``env`` is a callable with a parameter ``num_envs``, which returns a whole ``VectorEnv``."""
    return callable(env) and "num_envs" in _parameters(env)


def torch_fix(env_id: str) -> str:
    """The fix for users who need the task in torch, if there is one."""
    return "env.vectorization='torch', or " if env_id == "CartPole-v1" else ""


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
        reward_parts: entries of ``info`` that make up the reward, for ``EnvStep.reward_parts`` (grouped single
            environments only).
        device: where observations go.

    Raises:
        UnknownNameError: ``cfg.id`` is not registered.
        MissingExtraError: the environment needs a package that is not installed.
        GroupStartError: members could not share a start in this kind of environment.
        EnvError: the settings do not fit together or the environment, or ``cfg.id`` names a module to import.
    """
    if not grouped:
        _refuse_group_settings(cfg, reward_parts)
    made: VectorEnv
    if isinstance(env, VectorEnv):
        made = env
        _check_ready(made, cfg, num_envs, device)
    elif isinstance(env, gymnasium.vector.VectorEnv):
        env_id = type(env.unwrapped).__name__ if env.spec is None else env.spec.id
        fix = "pass the id or a callable that returns one gymnasium.Env, or derive a GroupEnv of yours"
        made = _adopt(env, env_id, grouped, device, fix)
        _check_ready(made, cfg, num_envs, device)
    else:
        make, num_envs = _checked_callable(env, cfg), num_envs or cfg.num_envs
        way = "callable" if make is not None and makes_rows(make) else _vectorization(cfg, make, reward_parts)
        if way in ("sync", "async") and grouped:
            how: dict[str, Any] = {"verify": verify, "on_error": on_error, "reward_parts": reward_parts}
            return group_env(cfg, make, num_envs, way, **how, device=device)
        if way in ("sync", "async"):
            return vector_env(cfg, make, num_envs, way, device)
        if way == "callable":
            assert make is not None
            made = _from_maker(make, cfg, num_envs, device)
        elif way == "torch":
            made = _from_torch(cfg, num_envs, device)
        else:
            made = _from_entry_point(cfg, grouped, num_envs, device)
    if grouped:
        made = made.as_group_env(verify=verify)
    _refuse_single_settings(made, cfg, reward_parts)
    if grouped and verify and isinstance(made, GroupEnv) and made.start_report is None:
        made.start_report = verify_group_start(made)
    return made


def _checked_callable(env: object | None, cfg: EnvCfg) -> Callable[..., Any] | None:
    if env is None:
        check_id(cfg.id)
        return None
    if not callable(env):
        raise EnvError(
            f"env is a {type(env).__name__}, expected a Gymnasium id, a callable that returns a gymnasium.Env, a "
            "GroupEnv or a gymnasium.vector.VectorEnv; fix: pass the class or a lambda instead of one environment"
        )
    return env


def _vectorization(cfg: EnvCfg, env: object | None, reward_parts: tuple[str, ...]) -> str:
    if env is not None and cfg.vectorization in ("entry_point", "torch"):
        raise EnvError(
            f"a callable cannot be vectorised by {cfg.vectorization!r}; fix: vectorization='sync' or 'async'"
        )
    if cfg.vectorization != "auto":
        return cfg.vectorization
    only_single = reward_parts or cfg.changed(*_ONLY_SINGLE) or cfg.start_mode not in ("auto", "native")
    return "entry_point" if env is None and cfg.id in VECTORISED and not only_single else "sync"


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
    if env.num_envs != num_envs:
        raise EnvError(
            f"{env.env_id} was asked for {num_envs} rows and has {env.num_envs}; fix: as many as num_envs says"
        )
    _check_ready(env, cfg, None, device)
    return env


def _check_ready(env: VectorEnv, cfg: EnvCfg, num_envs: int | None, device: torch.device | str) -> None:
    """Refuse settings that a ready environment does not follow."""
    if num_envs not in (None, env.num_envs):
        raise EnvError(f"{env.env_id} has {env.num_envs} rows, but num_envs is {num_envs}; fix: leave num_envs out")
    if cfg.max_episode_steps not in (None, env.max_episode_steps):
        raise EnvError(
            f"max_episode_steps is {cfg.max_episode_steps}, but that of {env.env_id} is {env.max_episode_steps}; fix: set "
            "it where you make the environment, or take max_episode_steps in its constructor"
        )
    if env.device.type != torch.device(device).type:
        raise EnvError(
            f"{env.env_id} is on {env.device}, and the policy on {device}; fix: device={env.device.type!r}, or move it"
        )


def _from_torch(cfg: EnvCfg, num_envs: int, device: torch.device | str) -> VectorEnv:
    """CartPole in torch."""
    if cfg.id != "CartPole-v1":
        raise EnvError(
            f"{cfg.id} is not written in torch, only CartPole-v1 is; fix: env.vectorization='auto', or a TorchGroupEnv of "
            "yours, given as a class in Python"
        )
    if cfg.kwargs:
        raise EnvError(f"{cfg.id} in torch takes no env.kwargs, got {cfg.kwargs}; fix: env.vectorization='auto'")
    return _from_maker(TorchCartPole, cfg, num_envs, device)


def _from_entry_point(cfg: EnvCfg, grouped: bool, num_envs: int, device: torch.device | str) -> VectorEnv:
    with explained(cfg.id):
        env = gymnasium.make_vec(cfg.id, num_envs, vectorization_mode="vector_entry_point", **with_limit(cfg))
    return _adopt(env, cfg.id, grouped or isinstance(env, CartPoleVectorEnv), device, "vectorization='sync'")


def _adopt(
    env: gymnasium.vector.VectorEnv, env_id: str, grouped: bool, device: torch.device | str, fix: str
) -> VectorEnv:
    if isinstance(env, CartPoleVectorEnv) and grouped:
        return CartPoleGroupEnv(env, env_id=env_id, device=device)
    if grouped:
        raise GroupStartError(
            f"rows of {env_id} ({type(env).__name__}) cannot be started one by one, so members of a group could not "
            f"share a start; fix: {fix}"
        )
    limit = None if env.spec is None else env.spec.max_episode_steps
    if isinstance(env, CartPoleVectorEnv):
        limit = env.max_episode_steps
    return GymnasiumVectorEnv(env, env_id=env_id, max_episode_steps=limit, device=device)


def _refuse_group_settings(cfg: EnvCfg, reward_parts: tuple[str, ...]) -> None:
    """Refuse settings that only groups use."""
    if reward_parts:
        raise EnvError(
            f"reward_parts = {reward_parts!r} are for groups of episodes; fix: grouped=True, or leave them out"
        )
    if cfg.start_mode != "auto":
        raise EnvError(
            f"env.start_mode = {cfg.start_mode!r} is for groups of episodes; fix: env.start_mode='auto', or an algorithm "
            "with groups (grpo)"
        )


def _refuse_single_settings(env: VectorEnv, cfg: EnvCfg, reward_parts: tuple[str, ...]) -> None:
    """Refuse settings that only single environments support."""
    parts = {"credit.reward.names": reward_parts} if reward_parts else {}
    for name, value in (cfg.changed(*_ONLY_SINGLE) | parts).items():
        raise EnvError(
            f"{env.env_id} vectorises itself, which does not support {name} = {value!r}; fix: vectorization='sync'"
        )
    if isinstance(env, GroupEnv) and cfg.start_mode not in ("auto", env.start_mode):
        raise GroupStartError(
            f"start_mode is {cfg.start_mode!r}, but {env.env_id} vectorises itself and starts groups by "
            f"{env.start_mode!r}; fix: start_mode='auto', or vectorization='sync'"
        )
