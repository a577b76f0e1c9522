"""Rows made of single Gymnasium environments: a registered id, or a callable of the user's."""

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import metadata
from typing import Any

import gymnasium
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import TimeLimit, TransformObservation

from groupwise.config.env import EnvCfg
from groupwise.cpus import num_cpus
from groupwise.envs.base import VectorEnv
from groupwise.envs.gymnasium import GymnasiumVectorEnv, LeanSyncVectorEnv
from groupwise.envs.local_rows import EnvMaker, OnError, RowCfg, StartMethod
from groupwise.envs.names import unknown_environment
from groupwise.envs.rows import RowsGroupEnv
from groupwise.envs.starts import choose_start, verify_rows
from groupwise.errors import EnvError, GroupStartError, MissingExtraError, installing

_NATIVE_ENTRY_POINT = "gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv"
_VECTORIZERS: dict[str, type[SyncVectorEnv] | type[AsyncVectorEnv]] = {
    "sync": LeanSyncVectorEnv,
    "async": AsyncVectorEnv,
}


def group_env(
    cfg: EnvCfg,
    env: Callable[..., gymnasium.Env] | None,
    num_envs: int,
    vectorization: str,
    *,
    verify: bool,
    on_error: OnError,
    device: torch.device | str,
) -> RowsGroupEnv:
    """Rows that start where they are told, in the best way that works.

    Where nobody verifies: in seeded resets, or in fresh environments if ``cfg.start_mode`` is ``fresh``.

    Raises:
        GroupStartError: members could not share a start.
    """
    if cfg.start_mode == "native":
        raise GroupStartError(
            f"env.start_mode is 'native', but {cfg.id} is made of single environments, whose states are not in arrays; "
            f"fix: env.start_mode='auto'{_native_way(cfg, env)}"
        )
    in_one_process = vectorization == "sync"
    rows = _describe(cfg, _maker(cfg, env, knows_ids=in_one_process), on_error)
    report = None
    if verify:
        method, report = choose_start(rows, cfg.start_mode)
        rows = rows._replace(method=method)
    elif cfg.start_mode == "fresh":
        rows = rows._replace(method=StartMethod("fresh"))
    made = RowsGroupEnv(rows, num_envs, num_workers=0 if in_one_process else num_cpus(), device=device)
    made.start_report = report
    if verify and not in_one_process:
        try:
            verify_rows(made, made.forget_starts)
        except BaseException:
            made.close()
            raise
    return made


def _native_way(cfg: EnvCfg, env: object | None) -> str:
    """Where the environment has a version with states in arrays, how to get it."""
    native = env is None and cfg.id in gymnasium.registry and gymnasium.spec(cfg.id).vector_entry_point
    return ", or env.vectorization='auto'" if native == _NATIVE_ENTRY_POINT else ""


def vector_env(
    cfg: EnvCfg,
    env: Callable[..., gymnasium.Env] | None,
    num_envs: int,
    vectorization: str,
    device: torch.device | str,
) -> VectorEnv:
    """Gymnasium's own vectorisation, in any autoreset mode."""
    rows = _describe(cfg, _maker(cfg, env), "raise")
    with explained(cfg.id):
        vector = _VECTORIZERS[vectorization](
            [_copying(rows.make, cfg)] * num_envs, copy=False, autoreset_mode=AutoresetMode[cfg.autoreset.upper()]
        )
    return GymnasiumVectorEnv(vector, env_id=rows.env_id, max_episode_steps=rows.max_episode_steps, device=device)


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
        raise MissingExtraError(f"{env_id} needs a package that is not installed: {_fix(str(error))}") from error
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"{env_id} needs {error.name!r}, which is not installed; fix: install it") from error
    except (gymnasium.error.Error, TypeError) as error:  # TypeError: arguments that it does not take
        raise EnvError(f"{env_id} cannot be made: {error}; fix: env.kwargs, or env.vectorization") from error


def _describe(cfg: EnvCfg, make: EnvMaker, on_error: OnError) -> RowCfg:
    """What a row is, read from one environment made for it."""
    with explained(cfg.id):
        probe = make()
    if not isinstance(probe, gymnasium.Env):
        raise EnvError(f"the callable returned a {type(probe).__name__}, expected a gymnasium.Env")
    spec, name = probe.spec, type(probe.unwrapped).__name__
    limit = cfg.max_episode_steps or step_limit(probe)
    probe.close()
    return RowCfg(
        make,
        env_id=name if spec is None else spec.id,
        observation_space=probe.observation_space,
        action_space=probe.action_space,
        max_episode_steps=limit,
        method=StartMethod("seed"),
        num_random_noops=cfg.num_random_noops,
        reward_parts=cfg.reward_parts,
        on_error=on_error,
    )


def step_limit(probe: gymnasium.Env) -> int | None:
    """What the outermost ``TimeLimit`` says through the spec. An environment that nobody registered gets one to say it in."""
    if probe.unwrapped.spec is None:
        probe.unwrapped.spec = EnvSpec(type(probe.unwrapped).__name__)
    return None if probe.spec is None else probe.spec.max_episode_steps


def _maker(cfg: EnvCfg, env: Callable[..., gymnasium.Env] | None, *, knows_ids: bool = True) -> EnvMaker:
    """What makes one environment, with its step limit.

    Args:
        knows_ids: whether ids are registered where it is called; otherwise it brings what is registered here.
    """
    if env is None:
        known = cfg.id if knows_ids else gymnasium.registry.get(cfg.id, cfg.id)
        return partial(gymnasium.make, known, **with_limit(cfg))
    make, limit = partial(env, **cfg.kwargs), cfg.max_episode_steps
    return make if limit is None else partial(_limited, make, limit)


def _limited(make: EnvMaker, limit: int) -> gymnasium.Env:
    return TimeLimit(make(), limit)


def _copying(make: EnvMaker, cfg: EnvCfg) -> EnvMaker:
    """``make``, with fresh observations under ``same_step``: the reset would overwrite the final one where it is reused."""
    return (lambda: TransformObservation(make(), copy.deepcopy, None)) if cfg.autoreset == "same_step" else make


def _fix(message: str) -> str:
    """Gymnasium's message; what is to be done about it by the extra of ours that brings what is missing."""
    named = re.search(r"gymnasium\[([\w-]+)\]", message)
    ours = metadata("groupwise").get_all("Provides-Extra") or []
    if named is None or named[1] not in ours:
        return message
    reason = re.split(r",? *(?:you can|run) ", message)[0] or named[1]  # theirs names other commands than ours
    return f"{reason}; fix: {installing(named[1])}"
