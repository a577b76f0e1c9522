"""Members share their start: the choice of the best way that works, and the proof by trying it."""

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from groupwise.data.rollout import Nested
from groupwise.data.spaces import space_kind
from groupwise.envs.base import GroupEnv, GroupStartReport, Mask, Seeds
from groupwise.envs.local_rows import RowCfg, StartMethod
from groupwise.envs.rows import RowsGroupEnv
from groupwise.envs.snapshots import adapter_for
from groupwise.errors import GroupStartError, GroupStartWarning, GroupwiseError, UnsupportedSpaceError
from groupwise.seeding import derive_seed

NUM_STEPS = 32
_NUM_EPISODES = 4
"""Episodes compared at least: what one leaves behind need not matter to each next one (BipedalWalker's does to some)."""
_NUM_TRIES = 8
"""Episodes at most for that many steps; seeds at least before starts count as all alike, or steps as free of noise."""
FIX = (
    "let the environment draw all its randomness from self.np_random, after super().reset(seed=seed), and keep "
    "nothing from one episode to the next (running statistics, as NormalizeObservation's, belong into the policy: "
    "normalize_obs)"
)
"""What to do where members start apart."""

_Trace = list[dict[str, npt.NDArray[Any]]]


class _Difference(NamedTuple):
    step: int
    key: str
    row: int

    @property
    def where(self) -> str:
        when = "at the start" if self.step == 0 else f"at step {self.step} of equal actions with equal noise"
        return f"{when}, in {self.key!r} of row {self.row}"


class Fault(NamedTuple):
    """Why members cannot share a start."""

    reason: str


def verify_group_start(env: GroupEnv, *, seed: int = 0, num_steps: int = NUM_STEPS) -> GroupStartReport:
    """Proof that members share a start, found by trying.

    Rows with equal seeds must agree bit for bit at the start and for ``num_steps`` steps of equal random actions (over
    several episodes where they are short), among each other and with a second try after all have gone their own ways.
    Rows that differ in their noise seed only must agree at the start. Leaves the environment somewhere; start or reset
    it afterwards.

    Raises:
        GroupStartError: names the environment, the step and the key where they differ.
    """
    report = examine_start(env, seed=seed, num_steps=num_steps)
    if isinstance(report, Fault):
        raise GroupStartError(f"members of {env.env_id} cannot share a start: {report.reason}; fix: {FIX}")
    return report


def examine_start(env: GroupEnv, *, seed: int = 0, num_steps: int = NUM_STEPS) -> GroupStartReport | Fault:
    """What ``verify_group_start`` finds about starts, or where rows differ."""
    compared, noise_varies = 0, False
    for number in range(_NUM_TRIES):
        found = _examine_episode(env, derive_seed(seed, "episode", number) if number else seed, num_steps)
        if isinstance(found, Fault):
            return found
        compared, noise_varies = compared + found.steps, noise_varies or found.noise_varies
        if compared >= num_steps and number + 1 >= _NUM_EPISODES:
            break
    return GroupStartReport(env.env_id, env.start_mode, _start_varies(env, seed), noise_varies)


class _Episode(NamedTuple):
    steps: int
    noise_varies: bool


def _examine_episode(env: GroupEnv, seed: int, num_steps: int) -> _Episode | Fault:
    """How many steps of an episode agreed, and whether members with noise of their own drifted apart."""
    actions = _random_actions(env, seed, num_steps)
    start, noise = _equal(env, seed, "start"), _equal(env, seed, "noise")
    first = _started(env, start, noise, actions)
    _scatter(env, seed, num_steps)
    again = _started(env, start, noise, actions)
    apart = _started(env, start, _own(env, seed, "noise"), actions)
    for trace in (first, again, apart[:1]):
        if (difference := _first_difference(first, trace)) is not None:
            return Fault(f"rows that were started with the same seed differ {difference.where}")
    return _Episode(len(first) - 1, _first_difference(first, apart) is not None)


def _start_varies(env: GroupEnv, seed: int) -> bool:
    """Whether some of the starts of at least 8 other seeds is another one than the start of the first."""
    start, noise = _equal(env, seed, "start"), _equal(env, seed, "noise")
    first = _started(env, start, noise, [])
    for number in range(0, _NUM_TRIES, max(1, env.num_envs // env.block_size)):
        others = _own(env, derive_seed(seed, "elsewhere", number), "start", env.block_size)
        if _first_difference(first, _started(env, others, noise, [])) is not None:
            return True
    return False


def start_repeats(env: GroupEnv, forget: Callable[[], None], *, seed: int = 0, num_steps: int = NUM_STEPS) -> bool:
    """Whether a seed's start is the same once more when nobody remembers it.

    Args:
        forget: drops what is remembered of starts.
    """
    actions = _random_actions(env, seed, num_steps)
    start, noise = _equal(env, seed, "start"), _equal(env, seed, "noise")
    first = _started(env, start, noise, actions)
    _scatter(env, seed, num_steps)
    forget()
    return _first_difference(first, _started(env, start, noise, actions)) is None


def verify_rows(env: GroupEnv, forget: Callable[[], None], *, seed: int = 0, num_steps: int = 8) -> None:
    """Proof that rows share starts where they live now: workers may differ from the process that tried two rows.

    All rows must agree bit for bit at a start and for some equal steps, and once more after ``forget``, see
    ``start_repeats``. Leaves the environment somewhere.

    Raises:
        GroupStartError: names the environment, the step and the key where they differ.
    """
    actions = _random_actions(env, seed, num_steps)
    start, noise = _equal(env, seed, "start"), _equal(env, seed, "noise")
    first = _started(env, start, noise, actions)
    forget()
    for trace in (first, _started(env, start, noise, actions)):
        if (difference := _first_difference(first, trace)) is not None:
            raise GroupStartError(
                f"members of {env.env_id} cannot share a start across processes: rows that were started with the same "
                f"seed differ {difference.where}, though two rows of one process agreed; fix: let "
                "nothing depend on the process (its id, files, global generators), or vectorization='sync'"
            )
    forget()


def _equal(env: GroupEnv, seed: int, name: str) -> Seeds:
    return np.full(env.num_envs, derive_seed(seed, name), dtype=np.int64)


def _own(env: GroupEnv, seed: int, name: str, rows_alike: int = 1) -> Seeds:
    return np.array([derive_seed(seed, name, row // rows_alike) for row in range(env.num_envs)], dtype=np.int64)


def _random_actions(env: GroupEnv, seed: int, num_steps: int, *, equal: bool = True) -> list[torch.Tensor]:
    if space_kind(env.action_space) in ("dict", "tuple", "unsupported"):
        raise UnsupportedSpaceError(
            f"action space {env.action_space} of {env.env_id} is not supported; supported: Box, Discrete, MultiDiscrete, "
            "MultiBinary; fix: flatten it with gymnasium.wrappers.TransformAction"
        )
    space = copy.deepcopy(env.action_space)
    space.seed(seed)
    draws = 1 if equal else env.num_envs
    samples = ([np.asarray(space.sample()) for _ in range(draws)] for _ in range(num_steps))
    return [torch.from_numpy(np.stack(sample * (env.num_envs // draws))) for sample in samples]


def _scatter(env: GroupEnv, seed: int, num_steps: int) -> None:
    """Give each row a history of its own."""
    _started(env, _own(env, seed, "scatter", env.block_size), _own(env, seed, "scatter noise"), [])
    for action in _random_actions(env, derive_seed(seed, "scatter"), num_steps, equal=False):
        env.step(action)


def _everybody(env: GroupEnv) -> Mask:
    return np.ones(env.num_envs, dtype=np.bool_)


def _started(env: GroupEnv, start_seed: Seeds, noise_seed: Seeds, actions: Sequence[torch.Tensor]) -> _Trace:
    return _trace(env, env.start(_everybody(env), start_seed, noise_seed), actions)


def _trace(env: GroupEnv, obs: Nested, actions: Sequence[torch.Tensor]) -> _Trace:
    """Everything the environment said, ``obs`` first, up to the first end of an episode."""
    trace = [_arrays(obs, "obs")]
    for action in actions:
        step = env.step(action)
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


def _first_difference(expected: _Trace, trace: _Trace) -> _Difference | None:
    """Where ``trace`` first differs from row 0 of ``expected``; None if nowhere."""
    for step, (right, left) in enumerate(zip(expected, trace, strict=False)):
        for key, array in left.items():
            reference = right[key][:1]
            same = (array == reference) | ((array != array) & (reference != reference))
            if not same.all():
                return _Difference(step, key, int(np.argwhere(~same)[0, 0]))
    return None


log = logging.getLogger(__name__)


class StartChoice(NamedTuple):
    """What was chosen, and why."""

    method: StartMethod
    report: GroupStartReport


def choose_start(cfg: RowCfg, wanted: Literal["auto", "native", "snapshot", "seed", "fresh"]) -> StartChoice:
    """How members in rows of this kind share their start: by the first method that passes every check.

    Tried with two rows of this process, in this order: states captured by an adapter, seeded resets, states captured
    field by field, fresh environments. A start must be the same when nobody remembers it: otherwise no run would repeat,
    and rows in several processes would start apart.

    Args:
        cfg: its method is not looked at.
        wanted: the only mode to try; ``auto`` tries all.

    Raises:
        GroupStartError: no method works; says why of each.
    """
    adapter = _adapter_name(cfg)
    faults: dict[StartMethod, Fault] = {}
    for method in _methods(wanted, known=adapter is not None):
        found = examine_method(cfg._replace(method=method))
        if not isinstance(found, Fault):
            name = adapter if method.states == "adapter" else method.states
            report = found._replace(states=name, rejected=tuple(_reasons(faults)))
            _warn(cfg, method, report)
            return StartChoice(method, report)
        faults[method] = found
    raise _refusal(cfg.env_id, wanted, faults)


def examine_method(cfg: RowCfg) -> GroupStartReport | Fault:
    """What two rows show that start by ``cfg.method``, or where they differ."""
    env = RowsGroupEnv(cfg, 2)
    captures = cfg.method.mode == "snapshot"
    try:
        report = examine_start(env)
        if captures and isinstance(report, GroupStartReport) and not start_repeats(env, env.forget_starts):
            return Fault("the captured start of a seed is another one when it is captured again")
        return report
    except Exception as error:
        if not captures:  # the environment's own error, which the user must see
            raise
        kind = "" if isinstance(error, GroupwiseError) else f"{type(error).__name__}: "
        return Fault(kind + str(error).partition("; fix: ")[0])
    finally:
        env.close()


def _methods(wanted: str, *, known: bool) -> Iterator[StartMethod]:
    """What to try, best first."""
    if wanted in ("auto", "snapshot") and known:
        yield StartMethod("snapshot", "adapter")
    if wanted in ("auto", "seed"):
        yield StartMethod("seed")
    if wanted in ("auto", "snapshot"):
        yield StartMethod("snapshot", "fields")
    if wanted in ("auto", "fresh"):
        yield StartMethod("fresh")


def _adapter_name(cfg: RowCfg) -> str | None:
    env = cfg.make()
    adapter = adapter_for(env)
    env.close()
    return None if adapter is None else adapter.name


def _warn(cfg: RowCfg, method: StartMethod, report: GroupStartReport) -> None:
    """Say what is surprising about the choice."""
    if report.rejected:
        warnings.warn(
            f"members of {cfg.env_id} share their start by {method}, since better ways failed: "
            f"{'; '.join(report.rejected)}; fix: {FIX}",
            GroupStartWarning,
            stacklevel=4,
        )
    if not report.start_varies:
        log.warning(
            "%s starts in the same state for every seed, so all groups start alike; fix: env.num_random_noops, if that "
            "is not wanted",
            cfg.env_id,
        )


def _refusal(env_id: str, wanted: str, faults: dict[StartMethod, Fault]) -> GroupStartError:
    reasons = [fault.reason for fault in faults.values()] if len(faults) == 1 else _reasons(faults)
    if wanted == "auto":
        return GroupStartError(f"members of {env_id} cannot share a start: {'; '.join(reasons)}; fix: {FIX}")
    return GroupStartError(
        f"members of {env_id} cannot share a start by start_mode={wanted!r}: {'; '.join(reasons)}; fix: {FIX}; or "
        "start_mode='auto', which tries every way"
    )


def _reasons(faults: dict[StartMethod, Fault]) -> list[str]:
    """Each reason once, after the methods that it concerns."""
    methods: dict[str, list[str]] = {}
    for method, fault in faults.items():
        methods.setdefault(fault.reason, []).append(str(method))
    return [f"{', '.join(concerned)}: {reason}" for reason, concerned in methods.items()]
