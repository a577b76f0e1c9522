"""The choice of how members share their start, and the check that they do."""

import copy
import logging
import warnings
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
import torch

from groupwise.config.run import StartMode
from groupwise.data.rollout import Nested
from groupwise.data.spaces import allowed_action, check_dtypes, flat_action, leaf_spaces, space_kind
from groupwise.envs.base import GroupEnv, GroupStartReport, Seeds
from groupwise.envs.rows import EnvMaker, RowCfg, RowsGroupEnv
from groupwise.envs.snapshots import DrawsOnDemand, adapter_for
from groupwise.errors import GroupStartError, GroupStartWarning, GroupwiseError, UnsupportedSpaceError
from groupwise.seeding import derive_seed

log = logging.getLogger(__name__)

NUM_STEPS = 32
_MIN_EPISODES = 4
"""Compared at least: an episode may affect only some of the later ones (BipedalWalker's does)."""
_MAX_TRIES = 8
"""Episodes at most for that many steps; start seeds compared to find whether starts vary."""
FIX = (
    "let the environment draw all its randomness from self.np_random, after super().reset(seed=seed), and keep "
    "nothing from one episode to the next (running statistics, as NormalizeObservation's, belong into the policy: "
    "normalize_obs)"
)
"""Advice where members start apart."""
_NATIVE_FIX = (
    "draw all randomness from the argument random of initial and transition; without TorchGroupEnv, from the seeds that "
    "start is given"
)
"""The same for environments that start rows from seeds themselves."""

_FEW_STEPS = 8
"""Enough for statistics of an environment's to move, and too few for small differences to grow."""
_SIMILAR = 0.05
"""Share of the largest number: contacts of Box2D that outlive an episode of BipedalWalker make 0.011."""
KEEPS_STATE = (
    "the policy is evaluated, played and resumed in new environments, which differ; fix: policy.normalize_obs or "
    "policy.normalize_reward in place of running statistics (NormalizeObservation, NormalizeReward), and nothing that an "
    "environment keeps from one episode to the next"
)
"""Why that matters, and the advice."""

_Trace = list[dict[str, npt.NDArray[Any]]]


class _ApartError(Exception):
    """Rows that should share a start differ; says where."""


def verify_group_start(env: GroupEnv, *, seed: int = 0) -> GroupStartReport:
    """Check by trying that members share a start.

    Rows with equal seeds must agree bit for bit at the start and for 32 steps of equal random actions (over
    several episodes where they are short), among each other and in a second try after different episodes. Rows that
    differ only in their noise seed must agree at the start. Start or reset the environment afterwards.

    Raises:
        GroupStartError: names the environment, the step and the key where they differ.
    """
    try:
        return _examine(env, seed)
    except _ApartError as error:
        fix = _NATIVE_FIX if env.start_mode == "native" else FIX
        raise GroupStartError(f"members of {env.env_id} cannot share a start: {error}; fix: {fix}") from None


def _examine(env: GroupEnv, seed: int = 0) -> GroupStartReport:
    """The report of ``verify_group_start``; the error only says where members differ."""
    compared, noise_varies = 0, False
    for number in range(_MAX_TRIES):
        steps, varies = _examine_episode(env, derive_seed(seed, "episode", number) if number else seed, NUM_STEPS)
        compared, noise_varies = compared + steps, noise_varies or varies
        if compared >= NUM_STEPS and number + 1 >= _MIN_EPISODES:
            break
    start, noise, start_varies = _equal(env, seed, "start"), _equal(env, seed, "noise"), False
    first = _started(env, start, noise, [])
    for number in range(0, _MAX_TRIES, max(1, env.num_envs // env.block_size)):  # at least 8 other seeds
        others = _own(env, derive_seed(seed, "elsewhere", number), "start", env.block_size)
        if _first_difference(first, _started(env, others, noise, [])) is not None:
            start_varies = True
            break
    return GroupStartReport(env.env_id, env.start_mode, start_varies, noise_varies)


def _examine_episode(env: GroupEnv, seed: int, num_steps: int) -> tuple[int, bool]:
    """The number of steps of an episode that agreed, and whether members with noise of their own drifted apart."""
    actions = _random_actions(env, seed, num_steps)
    start, noise = _equal(env, seed, "start"), _equal(env, seed, "noise")
    first = _started(env, start, noise, actions)
    _scatter(env, seed, num_steps)
    again = _started(env, start, noise, actions)
    own = _own(env, seed, "noise")
    own[0] = noise[0] if env.num_envs > 1 else own[0]
    apart = _started(env, start, own, actions)
    for trace in (first, again, apart[:1]):
        if (where := _first_difference(first, trace)) is not None:
            raise _ApartError(f"two starts with the same seed differ {where}")
    alike = [{key: array[:1] for key, array in step.items()} for step in apart] if env.num_envs > 1 else []
    if (where := _first_difference(first, alike)) is not None:
        raise _ApartError(f"a row depends on the noise of others: with the same seeds it differs {where}")
    return len(first) - 1, _first_difference(first, apart) is not None


def verify_rows(env: GroupEnv) -> None:
    """Check that rows in worker processes share starts, at first and after different episodes.

    Raises:
        GroupStartError: names the environment, the step and the key where they differ.
    """
    try:
        _examine_episode(env, seed=0, num_steps=8)
    except _ApartError as error:
        raise GroupStartError(
            f"members of {env.env_id} cannot share a start across processes: {error}, though two rows of one process "
            "agreed; fix: let nothing depend on the process (its id, files, global generators), or vectorization='sync'"
        ) from None


def _equal(env: GroupEnv, seed: int, name: str) -> Seeds:
    return np.full(env.num_envs, derive_seed(seed, name), dtype=np.int64)


def _own(env: GroupEnv, seed: int, name: str, rows_alike: int = 1) -> Seeds:
    return np.array([derive_seed(seed, name, row // rows_alike) for row in range(env.num_envs)], dtype=np.int64)


def _random_actions(env: GroupEnv, seed: int, num_steps: int, *, equal: bool = True) -> list[torch.Tensor]:
    if any(space_kind(leaf) == "unsupported" for leaf in leaf_spaces(env.action_space).values()):
        raise UnsupportedSpaceError(
            f"action space {env.action_space} of {env.env_id} is not supported; supported: Box, Discrete, MultiDiscrete, "
            "MultiBinary, Dict and Tuple; fix: wrap it with gymnasium.wrappers.TransformAction"
        )
    space = copy.deepcopy(env.action_space)
    space.seed(seed)
    draws = 1 if equal else env.num_envs
    samples = ([flat_action(space, space.sample()) for _ in range(draws)] for _ in range(num_steps))
    return [torch.from_numpy(np.stack(sample * (env.num_envs // draws))) for sample in samples]


def _scatter(env: GroupEnv, seed: int, num_steps: int) -> None:
    """Give each row a history of its own."""
    every = np.ones(env.num_envs, dtype=np.bool_)
    obs = env.start(every, _own(env, seed, "scatter", env.block_size), _own(env, seed, "scatter noise"))
    for action in _random_actions(env, derive_seed(seed, "scatter"), num_steps, equal=False):
        obs = env.step(allowed_action(action, obs, env.action_space)).obs


def _started(env: GroupEnv, start_seed: Seeds, noise_seed: Seeds, actions: Sequence[torch.Tensor]) -> _Trace:
    """All outputs of the environment from the start up to the first end of an episode."""
    obs = env.start(np.ones(env.num_envs, dtype=np.bool_), start_seed, noise_seed)
    check_dtypes(env.obs_spec, obs, f"the observation of {env.env_id}")
    trace = [_arrays(obs, "obs")]
    for action in actions:
        step = env.step(allowed_action(action, obs, env.action_space))
        obs = step.obs
        if step.failed is not None:
            break
        flags = {"reward": step.reward, "terminated": step.terminated, "truncated": step.truncated}
        trace.append(_arrays(step.obs, "obs") | {key: tensor.cpu().numpy().copy() for key, tensor in flags.items()})
        if trace[-1]["terminated"].any() or trace[-1]["truncated"].any():
            break
    return trace


def _arrays(obs: Nested, name: str) -> dict[str, npt.NDArray[Any]]:
    if isinstance(obs, torch.Tensor):
        return {name: obs.cpu().numpy().copy()}
    return {key: array for child, leaf in obs.items() for key, array in _arrays(leaf, f"{name}.{child}").items()}


def _first_difference(expected: _Trace, trace: _Trace, tolerance: float = 0.0) -> str | None:
    """Where ``trace`` first differs from row 0 of ``expected``, by more than this share of the largest number; None if nowhere."""
    for step, (right, left) in enumerate(zip(expected, trace, strict=False)):
        for key, array in left.items():
            reference = right[key][:1]
            same = (array == reference) | ((array != array) & (reference != reference))
            if tolerance:
                largest = float(np.abs(np.nan_to_num(reference, posinf=0, neginf=0)).max(initial=0))
                same |= np.isclose(array, reference, rtol=0, atol=tolerance * largest)
            if not same.all():
                when = f"at step {step} of equal actions with equal noise" if step else "at the start"
                return f"{when}, in {key!r} of row {int(np.argwhere(~same)[0, 0])}"
    return None


def choose_start(cfg: RowCfg, wanted: StartMode | Literal["auto"]) -> GroupStartReport:
    """The report on the first start mode by which two rows share their start and pass every check.

    A captured start must be the same when it is captured again: otherwise no run would repeat, and rows in several
    processes would start apart.

    Args:
        cfg: its ``start_mode`` is replaced.
        wanted: the only mode to try; ``auto`` tries all.

    Raises:
        GroupStartError: no mode works; names the reason of each.
    """
    reasons: dict[StartMode, str] = {}
    cfg = cfg._replace(make=partial(_drawing_starts_only, cfg.make))
    modes: tuple[StartMode, ...] = (wanted,) if wanted != "auto" else ("snapshot", "seed", "fresh")
    if wanted == "auto":  # without an adapter, a snapshot copies all attributes, and may miss state
        with closing(cfg.make()) as env:
            modes = ("seed", "snapshot", "fresh") if adapter_for(env) is None else modes
    for mode in modes:
        try:
            report = _examine_mode(cfg._replace(start_mode=mode), wanted)._replace(rejected=tuple(_joined(reasons)))
        except _ApartError as error:
            reasons[mode] = str(error)
            continue
        if report.rejected:
            warnings.warn(
                f"members of {report.env_id} share their start by {mode}, since better ways failed: "
                f"{'; '.join(report.rejected)}; fix: {FIX}",
                GroupStartWarning,
                stacklevel=3,
            )
        if not report.start_varies:
            log.warning(
                "%s starts in the same state for every seed, so all groups start alike; fix: env.num_random_noops, if "
                "that is not wanted",
                report.env_id,
            )
        return report
    by, why, more = "", "; ".join(_joined(reasons)), ""
    if wanted != "auto":
        by, why, more = f" by start_mode={wanted!r}", reasons[wanted], "; or start_mode='auto', which tries every way"
    raise GroupStartError(f"members of {cfg.env_id} cannot share a start{by}: {why}; fix: {FIX}{more}")


def _examine_mode(cfg: RowCfg, wanted: StartMode | Literal["auto"]) -> GroupStartReport:
    """The report on two rows that start by ``cfg.start_mode``. Where another mode may work, errors of snapshots are reasons."""
    captures = cfg.start_mode == "snapshot"
    with closing(RowsGroupEnv(cfg, 2)) as env, closing(RowsGroupEnv(cfg, 2)) as used:
        try:
            report = _examine(env)
            if captures:  # environments with another history must capture the same start
                _scatter(used, 0, NUM_STEPS)
                actions = _random_actions(env, 0, NUM_STEPS)
                start, noise = _equal(env, 0, "start"), _equal(env, 0, "noise")
                expected = _started(env, start, noise, actions)
                if _first_difference(expected, _started(used, start, noise, actions)) is not None:
                    raise _ApartError("the start of a seed is another state when it is captured again")
            return report
        except Exception as error:
            if isinstance(error, _ApartError) or not captures or wanted != "auto":
                raise  # the user sees the environment's own
            kind = "" if isinstance(error, GroupwiseError) else f"{type(error).__name__}: "
            raise _ApartError(kind + str(error).partition("; fix: ")[0]) from error


def _drawing_starts_only(make: EnvMaker) -> gymnasium.Env:
    """An environment whose steps draw no images: they follow from states, which the check compares."""
    env = make()
    if isinstance(env.unwrapped, DrawsOnDemand):
        env.unwrapped.draws = False
    return env


def carried_over(cfg: RowCfg) -> str:
    """Where an episode differs after others from the same one in a new environment; empty if nowhere, or if no seed repeats it.

    Statistics of an environment's, or a level that rises, make large differences. What a physics engine keeps makes small
    ones, which do not count.
    """
    cfg = cfg._replace(make=partial(_drawing_starts_only, cfg.make), start_mode="seed", on_error="raise")
    try:
        with closing(RowsGroupEnv(cfg, 1)) as env:
            start, noise = _equal(env, 0, "start"), _equal(env, 0, "noise")
            actions = _random_actions(env, 0, _FEW_STEPS)
            first = _started(env, start, noise, actions)
            _scatter(env, 0, _FEW_STEPS)
            where = _first_difference(first, _started(env, start, noise, actions), tolerance=_SIMILAR)
        if where is None:
            return ""
        with closing(RowsGroupEnv(cfg, 1)) as new:
            repeats = _first_difference(first, _started(new, start, noise, actions), tolerance=_SIMILAR) is None
    except Exception:  # training meets it too, and says where
        return ""
    return where if repeats else ""


def _joined(reasons: dict[StartMode, str]) -> list[str]:
    """Each reason once, after the modes that it concerns."""
    by_reason = {why: ", ".join(mode for mode in reasons if reasons[mode] == why) for why in reasons.values()}
    return [f"{modes}: {why}" for why, modes in by_reason.items()]
