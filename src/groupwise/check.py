"""Try out what an environment supports in training: spaces, start modes, success."""

import logging
import multiprocessing.spawn
import re
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch

from groupwise.config import resolve
from groupwise.config.base import GIVEN
from groupwise.config.policy import PolicyCfg
from groupwise.config.run import DEFAULT_HORIZON, EnvCfg, StartMode
from groupwise.data.rollout import all_finite, leaves
from groupwise.data.spaces import allowed_action, flat_action, obs_spec, space_kind, subspaces
from groupwise.envs.base import VectorEnv
from groupwise.envs.gymnasium import kept_space
from groupwise.envs.make import make_env, make_one, makes_rows, of_sb3, step_limit
from groupwise.envs.names import check_id
from groupwise.envs.starts import KEEPS_STATE
from groupwise.errors import EnvError, GroupwiseError
from groupwise.policies.heads import make_head

NUM_ENVS = 8
_EPISODE_S = 3.0
_MIN_STEPS = 200

T = TypeVar("T")
Maker: TypeAlias = Callable[..., Any] | None
"""Function that makes the environment, if it has no id."""


@dataclass(frozen=True)
class Finding(Generic[T]):
    """A result; or None with the reason, and a fix if there is one."""

    value: T | None
    reason: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Training:
    """GRPO's defaults for the environment."""

    start_mode: StartMode
    """How members share a start."""
    vectorization: str
    """``own``: the callable makes all rows; otherwise as ``env.vectorization``."""
    num_envs: int
    rejected: tuple[str, ...]
    """Reasons why better start modes were not chosen."""

    def __str__(self) -> str:
        words = f"{self.num_envs} environments by {self.vectorization}, shared starts: {self.start_mode}"
        return "; ".join([words, *(f"not {why}" for why in self.rejected)])


@dataclass(frozen=True)
class EnvReport:
    """The result of ``check_env``; printed, the table of ``groupwise check-env``.

    ``observation``, ``action``: the spaces, if they are supported. ``max_episode_steps``: the step limit. ``success``:
    whether success is reported, and tasks are named. ``start_varies``: whether the start depends on the seed.
    ``noise_varies``: whether members drift apart under equal actions. ``forgets``: whether an episode is the same after
    others as in a new environment. ``training``: GRPO's defaults; its value is None where GRPO refuses the environment.
    ``plays``: whether random actions could be played, which is what PPO needs. ``warnings``: Gymnasium's warnings about the environment.
    """

    env_id: str
    observation: Finding[str]
    action: Finding[str]
    max_episode_steps: Finding[int]
    success: Finding[str]
    start_varies: Finding[bool]
    noise_varies: Finding[bool]
    forgets: Finding[bool]
    training: Finding[Training]
    plays: bool = True
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Dictionaries, lists, texts and numbers."""
        return asdict(self)

    def __str__(self) -> str:
        """A table, each reason once."""
        rows: dict[str, Finding[Any]] = {
            "observation": self.observation,
            "action": self.action,
            "step limit": self.max_episode_steps,
            "success": self.success,
            "start depends on the seed": self.start_varies,
            "steps are random": self.noise_varies,
            "episodes are independent": self.forgets,
            "training uses": self.training,
        }
        reasons = [finding.reason for finding in rows.values() if finding.value is None]
        shared = dict.fromkeys(reason for reason in reasons if reasons.count(reason) > 1)
        lines = [self.env_id, *(f"{'problem':<26}{reason}" for reason in shared)]
        lines += [f"{'warning':<26}{warning}" for warning in self.warnings]
        for question, finding in rows.items():
            answer = {"True": "yes", "False": "no"}.get(str(finding.value), str(finding.value))
            if finding.value is None:
                answer = "no, see 'problem'" if finding.reason in shared else f"no: {finding.reason}"
            lines.append(f"{question:<26}{answer}")
        if self.training.value is None and self.plays:
            lines.append(f"{'PPO':<26}can train here: it needs no shared starts")
        if self.training.fix:
            lines.append(f"{'fix':<26}{self.training.fix}")
        return "\n".join(lines)


def check_env(env: object) -> EnvReport:
    """Tries out for some seconds what an environment supports in training.

    Args:
        env: a Gymnasium id, an ``EnvCfg`` (for ``kwargs`` and the step limit), or a callable that returns one
            environment or, given ``num_envs``, a whole ``GroupEnv``.

    Raises:
        UnknownNameError: the id is not registered.
        MissingExtraError: the environment needs a package that is not installed.
        EnvError: it is none of these, or does not take these arguments.
        RuntimeError: called while a child process imports the script, which then has no ``__main__`` guard.
    """
    multiprocessing.spawn.get_preparation_data("groupwise check")  # raises in such a child
    make: Maker = None
    if isinstance(env, EnvCfg | str):
        given = EnvCfg(id=env) if isinstance(env, str) else env
        check_id(given.id)
        set_by_user = {name: vars(given)[name] for name in given.model_fields_set - {"id"}}
        cfg = resolve(given.id, env=set_by_user).env  # as training would have it
    elif callable(env):
        cfg, make = EnvCfg(id=GIVEN), env
    else:
        raise EnvError(
            f"env is a {type(env).__name__}, expected a Gymnasium id, an EnvCfg or a callable that makes an environment, "
            f"since several are tried; fix: check_env(lambda: {type(env).__name__}(...)){of_sb3(env)}"
        )
    own_rows = make is not None and makes_rows(make)
    rows = own_rows or cfg.vectorization == "torch"
    simple = {"start_mode": "auto", "num_random_noops": 0, "log_info": ()} | ({} if rows else {"vectorization": "sync"})
    plain, count = cfg.model_copy(update=simple), NUM_ENVS if rows else 1
    opened = partial(make_env, plain, grouped=True, num_envs=count, env=make, verify=False)
    if rows:
        with closing(opened()) as made:
            name, space, actions = made.env_id, made.observation_space, made.action_space
            max_steps = made.max_episode_steps
    else:
        with closing(make_one(cfg, make)) as one:
            name = type(one.unwrapped).__name__ if one.spec is None else one.spec.id
            space, _ = kept_space(one.observation_space, cfg.obs_keys, one.action_space)
            actions, max_steps = one.action_space, step_limit(one)

    checked = _tried(lambda: make_env(cfg, grouped=True, num_envs=2, env=make))
    refused = Finding[Any](None, checked.reason, checked.fix)
    start_varies = noise_varies = training = refused
    if checked.value is not None and (report := checked.value.start_report) is not None:
        checked.value.close()
        automatic = "entry_point" if report.start_mode == "native" else "sync"
        way = "own" if own_rows else automatic if cfg.vectorization == "auto" else cfg.vectorization
        start_varies, noise_varies = Finding(report.start_varies), Finding(report.noise_varies)
        training = Finding(Training(report.start_mode, way, cfg.num_envs, report.rejected))
    observation = _tried(lambda: (obs_spec(space), _brief(space))[1])
    action = _tried(lambda: (make_head(actions, PolicyCfg()), _brief(actions))[1])
    if missing := [needed for needed in (observation, action) if needed.value is None]:
        training = Finding(None, missing[0].reason, missing[0].fix)
    no_limit = f"none is known, so GRPO and evaluations cut episodes after at most {DEFAULT_HORIZON:,} steps"
    limit = Finding[int](None, no_limit) if max_steps is None else Finding(max_steps)
    heard: list[str] = []
    played = _tried(partial(_played, opened), heard)
    if played.value is None:
        success = forgets = Finding[Any](None, played.reason, played.fix)
        training = training if training.value is None else success
    else:
        success = played.value
        if not rows:
            forgets = _tried(lambda: _forgets(plain, make))
        else:  # the check of shared starts compares episodes after others, too
            forgets = Finding(True) if checked.value is not None else refused
    plays = played.value is not None and not missing
    return EnvReport(
        name, observation, action, limit, success, start_varies, noise_varies, forgets, training, plays, (*heard,)
    )


def _forgets(cfg: EnvCfg, make: Maker) -> bool:
    with closing(make_env(cfg, num_envs=1, env=make)) as env:
        if env.carries_over:
            raise EnvError(f"an episode depends on those before it ({env.carries_over}): {KEEPS_STATE}")
    return True


def _played(opened: Callable[[], VectorEnv]) -> Finding[str]:
    """Play random actions until an episode ended; whether it reports success."""
    success, steps = "", 0
    with closing(opened()) as env:
        space, obs, over, ended, begun = env.action_space, env.reset(seed=0), False, False, time.perf_counter()
        space.seed(0)
        while (not ended or steps < _MIN_STEPS) and time.perf_counter() - begun < _EPISODE_S:
            if over:
                obs, over = env.reset(seed=steps), False
                continue
            action = np.stack([flat_action(space, space.sample()) for _ in range(env.num_envs)])
            step = env.step(allowed_action(torch.from_numpy(action), obs, space))
            obs, over, steps = step.obs, bool((step.terminated | step.truncated).any()), steps + 1
            if not all(map(all_finite, leaves(obs))):
                raise EnvError(f"the observation of step {steps} is not finite; fix: return finite observations")
            if not step.reward.isfinite().all():
                number = step.reward[~step.reward.isfinite()][0]
                raise EnvError(f"the reward of step {steps} is {number}; fix: return finite rewards")
            if over and not ended and "success" in step.info:
                has_names = bool(np.any(step.info.get("task", "") != ""))
                success = f"reported at the end of episodes{', with the names of tasks' if has_names else ''}"
            ended |= over
    if success:
        return Finding(success)
    where = "at the end of an episode" if ended else f"in {_EPISODE_S:g} s, in which no episode ended"
    reason = f"no flag {where}: success metrics will be missing; report info['success'] at the last step "
    return Finding(None, f"{reason}(of a TorchGroupEnv: write its method success)")


def _tried(probe: Callable[[], T], heard: list[str] | None = None) -> Finding[T]:
    """The result of ``probe``; or why it fails, with the type of the error unless it is one of ours, and the fix.

    Args:
        heard: gets Gymnasium's warnings. Others are not shown: the report has the same messages.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logging.disable(logging.WARNING)
        try:
            return Finding(probe())
        except (Exception, SystemExit) as error:
            kind = "" if isinstance(error, GroupwiseError) else f"{type(error).__name__}: "
            text = re.sub(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+", "", str(error))  # of another process
            reason, _, fix = " ".join(text.split()).partition("; fix: ")
            reason = re.sub(r"^members of \S+ cannot share a start( by start_mode='\w+')?: ", "", reason)
            return Finding(None, kind + reason, fix)
        finally:
            logging.disable(logging.NOTSET)
            if heard is not None:
                texts = (" ".join(re.sub(r"\x1b\[\d*m", "", str(warning.message)).split()) for warning in caught)
                heard += dict.fromkeys(text.removeprefix("WARN: ") for text in texts if text.startswith("WARN: "))


def _brief(space: Any) -> str:
    """A space in a few words, without its bounds."""
    if (children := subspaces(space)) is not None:
        return f"{type(space).__name__}({', '.join(f'{name}: {_brief(child)}' for name, child in children.items())})"
    return f"Box{list(space.shape)} {space.dtype}" if space_kind(space) == "box" else str(space)
