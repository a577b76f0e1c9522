"""The choice how siblings of a group share a start: the best way that is found to work."""

import logging
import warnings
from collections.abc import Iterator
from typing import Literal, NamedTuple

from groupwise.envs.attempts import StartMethod
from groupwise.envs.base import GroupStartReport
from groupwise.envs.groups import FIX, Fault, examine_start, start_repeats
from groupwise.envs.local_rows import RowCfg
from groupwise.envs.rows import RowsGroupEnv
from groupwise.envs.snapshots import adapter_for
from groupwise.errors import GroupStartError, GroupStartWarning, GroupwiseError

log = logging.getLogger(__name__)


class StartChoice(NamedTuple):
    """What was chosen, and why."""

    method: StartMethod
    report: GroupStartReport


def choose_start(cfg: RowCfg, wanted: Literal["auto", "native", "snapshot", "seed", "fresh"]) -> StartChoice:
    """How siblings in rows of this kind share their start: by the first method that passes every check.

    Tried with two rows of this process, in this order: states captured by an adapter, seeded resets, states captured
    field by field, fresh environments. A start must be the same when nobody remembers it: otherwise no run would repeat,
    and rows in several processes would start apart.

    Args:
        cfg: its method is not looked at.
        wanted: the only tier to try; ``auto`` tries all.

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
            f"siblings of {cfg.env_id} share their start by {method}, since better ways failed: "
            f"{'; '.join(report.rejected)}; fix: {FIX}",
            GroupStartWarning,
            stacklevel=4,
        )
    if not report.start_varies and cfg.num_random_noops == 0:
        log.warning(
            "%s starts in the same state whatever the seed, so all groups start alike; fix: env.num_random_noops, if that "
            "is not wanted",
            cfg.env_id,
        )


def _refusal(env_id: str, wanted: str, faults: dict[StartMethod, Fault]) -> GroupStartError:
    reasons = [fault.reason for fault in faults.values()] if len(faults) == 1 else _reasons(faults)
    if wanted == "auto":
        return GroupStartError(f"siblings of {env_id} cannot share a start: {'; '.join(reasons)}; fix: {FIX}")
    return GroupStartError(
        f"siblings of {env_id} cannot share a start by start_mode={wanted!r}: {'; '.join(reasons)}; fix: {FIX}; or "
        "start_mode='auto', which tries every way"
    )


def _reasons(faults: dict[StartMethod, Fault]) -> list[str]:
    """Each reason once, after the methods that it concerns."""
    methods: dict[str, list[str]] = {}
    for method, fault in faults.items():
        methods.setdefault(fault.reason, []).append(str(method))
    return [f"{', '.join(concerned)}: {reason}" for reason, concerned in methods.items()]
