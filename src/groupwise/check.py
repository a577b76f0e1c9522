"""What an environment offers to training, found out by trying."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

from groupwise.config import resolve
from groupwise.envs import check
from groupwise.envs.base import GroupEnv, GroupStartReport
from groupwise.envs.check import Branching, Finding, Maker, attempt
from groupwise.envs.configs import EnvCfg, StartTier
from groupwise.envs.groups import verify_group_start
from groupwise.envs.make import make_env
from groupwise.envs.rows import RowsGroupEnv
from groupwise.envs.self_vectorised import makes_rows
from groupwise.errors import GroupwiseError
from groupwise.policies.configs import PolicyCfg
from groupwise.policies.distributions import make_head

T = TypeVar("T")


class Training(NamedTuple):
    """What ``groupwise train`` does with the environment by default."""

    tier: StartTier
    """How siblings share a start."""
    vectorization: str
    """``entry_point``; ``sync``: one after another in this process; ``async`` or ``envpool``, if the settings say so; ``own``: the callable makes all rows."""
    num_envs: int
    autoreset: str
    passed_over: tuple[str, ...]
    """Why better ways to share a start were not taken."""


Noise = Literal["none", "drawn", "seen"]
"""Steps draw no random numbers; they draw some; and siblings with numbers of their own drifted apart in some tens of steps."""


class EnvReport(NamedTuple):
    """What ``check_env`` found out about an environment. A finding without a value has a reason."""

    env_id: str
    observation: Finding[str]
    """The observation space, if it is supported."""
    action: Finding[str]
    """The action space, if a policy can act in it."""
    start_varies: Finding[bool]
    """Whether the first observation depends on the seed of the reset."""
    noise: Finding[Noise]
    """Whether steps are random, see ``Noise``."""
    tiers: dict[str, Finding[float]]
    """Of each way to share a start: microseconds a start takes, if it works."""
    branching: Finding[Branching]
    """Whether groups can start in the middle of an episode."""
    entry_point_autoreset: Finding[str]
    """Who resets finished rows in the environment's own vectorised version."""
    steps_per_second: dict[str, Finding[float]]
    """With 8 environments, by vectorisation, on this machine. ``sync`` and ``async``: of rows in groups. ``envpool``: where it is installed and has this task. ``own`` alone: of a callable that makes all rows."""
    training: Finding[Training]


def check_env(env: str | EnvCfg | Maker) -> EnvReport:
    """What an environment offers to training, found out by trying for some seconds.

    Args:
        env: a Gymnasium id, an ``EnvCfg`` (for ``kwargs`` and the step limit), or a callable that returns one environment
            or, given ``num_envs``, a whole ``GroupEnv``. With ``vectorization="envpool"`` EnvPool's version is tried out.

    Raises:
        UnknownNameError: nobody registered this id.
        MissingExtraError: the environment needs a package that is not installed.
        EnvError: it is none, or does not take these arguments.
    """
    make = None if isinstance(env, EnvCfg | str) else env
    given = env if isinstance(env, EnvCfg) else EnvCfg(id=env if isinstance(env, str) else "<given in Python>")
    with _quiet():
        return _check(given, make)


def _check(given: EnvCfg, make: Maker | None) -> EnvReport:
    cfg = given
    if make is None:  # the environment's preset says how training makes it
        cfg = resolve(given.id, env={name: vars(given)[name] for name in given.model_fields_set - {"id"}}).env
    if cfg.vectorization == "envpool" or (make is not None and makes_rows(make)):
        return _check_rows(cfg, make)
    try:
        single = check.make_single(given, make)
    except GroupwiseError:
        raise
    except Exception as error:
        return _broken(given.id, check.reason_of(error))
    env_id = type(single.unwrapped).__name__ if single.spec is None else single.spec.id
    single.close()
    ways = (*check.VECTORIZATIONS, "envpool") if make is None and check.in_envpool(cfg.id) else check.VECTORIZATIONS
    observation = attempt(lambda: check.observation_support(cfg, make))
    action = attempt(lambda: _action_support(single.action_space))
    trial = _attempt_nothing if observation.value is None else attempt
    training, branching, siblings_differ = _trained(cfg, make, trial)
    if action.value is None:
        training = Finding(None, "its actions are not supported")
    return EnvReport(
        env_id,
        observation,
        action,
        attempt(lambda: check.start_varies(cfg, make)),
        Finding("seen") if siblings_differ else attempt(lambda: _drawn(cfg, make)),
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
        return _broken(cfg.id, check.reason_of(error))
    try:
        found = attempt(lambda: verify_group_start(env))
        training, branching, siblings_differ = _trained(cfg, make, attempt)
        return EnvReport(
            env.env_id,
            attempt(lambda: check.brief(env.observation_space)),
            attempt(lambda: _action_support(env.action_space)),
            Finding(None, found.reason) if found.value is None else Finding(found.value.start_varies),
            Finding("seen") if siblings_differ else Finding(None, "siblings stayed together in some tens of steps"),
            {tier: _cost_of_rows(env, tier, found) for tier in check.TIERS},
            branching,
            Finding(None, "its rows are reset by the collector"),
            {"own": attempt(lambda: check.speed(env))}
            if make is not None
            else {"envpool": attempt(lambda: check.steps_per_second(cfg, make, "envpool"))},
            training,
        )
    finally:
        env.close()


def _cost_of_rows(env: GroupEnv, tier: StartTier, found: Finding[GroupStartReport]) -> Finding[float]:
    if tier != env.start_tier:
        return Finding(None, f"it makes its rows itself, and starts them by {env.start_tier}")
    if found.value is None:
        return Finding(None, found.reason)
    return attempt(lambda: check.start_us(env, env.num_envs) / env.num_envs)


def _broken(env_id: str, reason: str) -> EnvReport:
    """The report on an environment that cannot even be made."""
    nothing: Finding[Any] = Finding(None, f"cannot be made: {reason}")
    tiers: dict[str, Finding[float]] = dict.fromkeys(check.TIERS, nothing)
    speeds: dict[str, Finding[float]] = dict.fromkeys(check.VECTORIZATIONS, nothing)
    return EnvReport(env_id, nothing, nothing, nothing, nothing, tiers, nothing, nothing, speeds, nothing)


def _attempt_nothing(probe: Callable[[], T]) -> Finding[T]:
    return Finding(None, "its observations are not supported")


def _trained(
    cfg: EnvCfg, make: Maker | None, trial: Callable[[Callable[[], GroupEnv]], Finding[GroupEnv]]
) -> tuple[Finding[Training], Finding[Branching], bool]:
    """What training would use, its branching, and whether siblings with noise of their own drifted apart."""
    made = trial(lambda: make_env(cfg, grouped=True, num_envs=2, env=make))
    if made.value is None or made.value.start_report is None:
        return Finding(None, made.reason), Finding(None, made.reason), False
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


def _drawn(cfg: EnvCfg, make: Maker | None) -> Noise:
    return "drawn" if check.steps_draw(cfg, make) else "none"


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
