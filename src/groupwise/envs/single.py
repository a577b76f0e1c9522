"""Rows made of single Gymnasium environments: a registered id, or a callable of the user's."""

import copy
import math
import pkgutil
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import gymnasium
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import TimeLimit

from groupwise.config.env import EnvCfg, StartMode
from groupwise.envs.base import GroupStartReport, VectorEnv
from groupwise.envs.gymnasium import GymnasiumVectorEnv, LeanSyncVectorEnv
from groupwise.envs.local_rows import OnError, RowCfg
from groupwise.envs.log_info import LogInfo
from groupwise.envs.masked import allowed_sample, mask_notes, with_masks
from groupwise.envs.names import import_package, unknown_environment
from groupwise.envs.obs_keys import kept_space
from groupwise.envs.rows import RowsGroupEnv
from groupwise.envs.starts import choose_start, verify_rows
from groupwise.errors import EnvError, GroupStartError, MissingExtraError, installing
from groupwise.system.cpus import num_cpus

ACTION_CHUNK = "groupwise.embodied.chunks:ActionChunk"
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
