"""What an environment offers to training, found out by trying."""

import logging
import multiprocessing.spawn
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import gymnasium

from groupwise.config import resolve
from groupwise.config.env import EnvCfg, StartTier
from groupwise.config.policy import PolicyCfg
from groupwise.envs import check
from groupwise.envs.base import GroupEnv, GroupStartReport
from groupwise.envs.check import Maker, attempt
from groupwise.envs.findings import Branching, EnvReport, Finding, Training, none, unknown
from groupwise.envs.groups import verify_group_start
from groupwise.envs.make import make_env
from groupwise.envs.names import refuse_module
from groupwise.envs.noise import generators_kept, global_generators_kept, step_noise
from groupwise.envs.rows import RowsGroupEnv
from groupwise.envs.self_vectorised import makes_rows
from groupwise.errors import EnvError, GroupwiseError
from groupwise.policies.distributions import make_head

T = TypeVar("T")


def check_env(env: object) -> EnvReport:
    """What an environment offers to training, found out by trying for some seconds.

    Args:
        env: a Gymnasium id, an ``EnvCfg`` (for ``kwargs`` and the step limit), or a callable that returns one environment
            or, given ``num_envs``, a whole ``GroupEnv``. With ``vectorization="envpool"`` EnvPool's version is tried out, with ``"torch"`` ours.

    Raises:
        UnknownNameError: nobody registered this id.
        MissingExtraError: the environment needs a package that is not installed.
        EnvError: it is none, is made already, or does not take these arguments.
        RuntimeError: called while a child process imports the script, which then has no ``__main__`` guard.
    """
    multiprocessing.spawn.get_preparation_data("groupwise check")  # raises in such a child, before anything is tried
    if isinstance(env, EnvCfg | str):
        given, make = EnvCfg(id=env) if isinstance(env, str) else env, None
    elif callable(env):
        given, make = EnvCfg(id="<given in Python>"), env
    else:
        raise EnvError(
            f"env is a {type(env).__name__} that is made already, expected a Gymnasium id, an EnvCfg or a callable that "
            f"makes one, since several are tried; fix: check_env({_maker_of(env)})"
        )
    with _quiet(), global_generators_kept():
        return _check(given, make)


def _maker_of(made: object) -> str:
    """What to write instead of an environment that is made already."""
    if isinstance(made, gymnasium.Env) and made.spec is not None and made.spec.id in gymnasium.registry:
        return f"lambda: gymnasium.make({made.spec.id!r}, ...)"
    return f"lambda: {type(made).__name__}(...)"


def _check(given: EnvCfg, make: Maker | None) -> EnvReport:
    cfg = given
    if make is None:
        refuse_module(given.id)  # before anything could import it
        # the environment's preset says how training makes it
        cfg = resolve(given.id, env={name: vars(given)[name] for name in given.model_fields_set - {"id"}}).env
    if cfg.vectorization in ("envpool", "torch") or (make is not None and makes_rows(make)):
        return _check_rows(cfg, make)
    try:
        single = check.make_single(given, make)
    except GroupwiseError:
        raise
    except Exception as error:
        return _broken(given.id, error)
    env_id = type(single.unwrapped).__name__ if single.spec is None else single.spec.id
    single.close()
    with generators_kept(single):
        return _check_single(cfg, make, env_id, single.action_space)


def _check_single(cfg: EnvCfg, make: Maker | None, env_id: str, action_space: Any) -> EnvReport:
    """The report on an environment that is made one by one."""
    ways = (*check.VECTORIZATIONS, "envpool") if make is None and check.in_envpool(cfg.id) else check.VECTORIZATIONS
    observation = attempt(lambda: check.observation_support(cfg, make))
    action = attempt(lambda: _action_support(action_space))
    limit = attempt(lambda: check.known_step_limit(cfg, make))
    trial = attempt if observation.value is not None else partial(_attempt_nothing, observation.fix)
    training, branching, siblings_differ = _trained(cfg, make, trial)
    if action.value is None:
        training = none("its actions are not supported", action.fix)
    training = _limited(training, limit)
    return EnvReport(
        env_id,
        observation,
        action,
        limit,
        attempt(lambda: check.start_varies(cfg, make)),
        Finding("seen") if siblings_differ else attempt(lambda: step_noise(cfg, make)),
        {tier: trial(partial(check.tier_cost, cfg, make, tier)) for tier in check.TIERS},
        branching,
        attempt(lambda: check.entry_point_autoreset(cfg, make)),
        {way: trial(partial(check.steps_per_second, cfg, make, way)) for way in ways},
        training,
    )


def _check_rows(cfg: EnvCfg, make: Maker | None) -> EnvReport:
    """The report on an environment that makes all its rows itself."""
    plain = check.without_group_settings(cfg).model_copy(update={"autoreset": "disabled"})
    try:
        env = make_env(plain, grouped=True, num_envs=check.NUM_ENVS, env=make, verify=False)
    except GroupwiseError:
        raise
    except Exception as error:
        return _broken(cfg.id, error)
    try:
        found = attempt(lambda: verify_group_start(env))
        limit = attempt(lambda: check.stated(env.max_episode_steps))
        training, branching, siblings_differ = _trained(cfg, make, attempt)
        together = found.reason or "siblings stayed together in some tens of steps"
        return EnvReport(
            env.env_id,
            attempt(lambda: check.brief(env.observation_space)),
            attempt(lambda: _action_support(env.action_space)),
            limit,
            unknown(found.reason) if found.value is None else Finding(found.value.start_varies),
            Finding("seen") if siblings_differ else unknown(together),
            {tier: _cost_of_rows(env, tier, found) for tier in check.TIERS},
            branching,
            none("its rows are reset by the collector"),
            _speed_of_rows(cfg, make, env),
            _limited(training, limit),
        )
    finally:
        env.close()


def _speed_of_rows(cfg: EnvCfg, make: Maker | None, env: GroupEnv) -> dict[str, Finding[float]]:
    if make is None and cfg.vectorization == "envpool":
        return {"envpool": attempt(lambda: check.steps_per_second(cfg, make, "envpool"))}
    return {"own" if make is not None else cfg.vectorization: attempt(lambda: check.speed(env))}


def _cost_of_rows(env: GroupEnv, tier: StartTier, found: Finding[GroupStartReport]) -> Finding[float]:
    if tier != env.start_tier:
        return none(f"it makes its rows itself, and starts them by {env.start_tier}")
    if found.value is None:
        return Finding(None, found.verdict, found.reason, found.fix)
    return attempt(lambda: check.start_us(env, env.num_envs) / env.num_envs)


def _broken(env_id: str, error: Exception) -> EnvReport:
    """The report on an environment that cannot even be made."""
    reason, fix = check.reason_and_fix(error)
    nothing = unknown(f"cannot be made: {reason}", fix)
    tiers: dict[str, Finding[float]] = dict.fromkeys(check.TIERS, nothing)
    speeds: dict[str, Finding[float]] = dict.fromkeys(check.VECTORIZATIONS, nothing)
    return EnvReport(
        env_id,
        nothing,
        nothing,
        nothing,
        nothing,
        nothing,
        tiers,
        nothing,
        nothing,
        speeds,
        replace(nothing, verdict="none"),
    )


def _attempt_nothing(fix: str, probe: Callable[[], T]) -> Finding[T]:
    return none("its observations are not supported", fix)


def _trained(
    cfg: EnvCfg, make: Maker | None, trial: Callable[[Callable[[], GroupEnv]], Finding[GroupEnv]]
) -> tuple[Finding[Training], Finding[Branching], bool]:
    """What training would use, its branching, and whether siblings with noise of their own drifted apart."""
    made = trial(lambda: make_env(cfg, grouped=True, num_envs=2, env=make))
    if made.value is None or made.value.start_report is None:
        refused = none(made.reason, made.fix)  # whatever stopped it stops training, too
        return refused, Finding(None, made.verdict, "groups cannot start at all"), False
    env, report = made.value, made.value.start_report
    try:
        vectorization: str = cfg.vectorization
        if make is not None and makes_rows(make):
            vectorization = "own"
        elif vectorization == "auto":
            vectorization = "sync" if isinstance(env, RowsGroupEnv) else "entry_point"
        chosen = Training(env.start_tier, vectorization, cfg.num_envs, env.autoreset, report.passed_over)
        return Finding(chosen), attempt(lambda: check.branching(env)), report.noise_varies
    finally:
        env.close()


def _limited(training: Finding[Training], limit: Finding[int]) -> Finding[Training]:
    """``training``, if attempts are sure to end."""
    if training.value is None or limit.value is not None:
        return training
    return none(limit.reason, limit.fix)


def _action_support(space: Any) -> str:
    make_head(space, PolicyCfg())
    return check.brief(space)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the environments' makers from telling what the report says."""
    logger = logging.getLogger("groupwise.envs")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
