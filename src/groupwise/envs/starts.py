"""The choice how siblings of a group share a start: the best way that is found to work."""

import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, TypeVar

from groupwise.envs.attempts import StartMethod
from groupwise.envs.base import GroupStartReport
from groupwise.envs.groups import FIXES, Fault, examine_branching, examine_start, start_repeats
from groupwise.envs.local_rows import RowCfg
from groupwise.envs.rows import RowsGroupEnv
from groupwise.envs.snapshots import adapter_for
from groupwise.errors import GroupStartError, GroupStartWarning, GroupwiseError

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")


class StartChoice(NamedTuple):
    """What was chosen, and why."""

    method: StartMethod
    report: GroupStartReport


def choose_start(cfg: RowCfg, wanted: Literal["auto", "native", "snapshot", "seed", "replay"]) -> StartChoice:
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
    faults: dict[StartMethod, Fault] = {}
    for method in _methods(wanted, _adapter_name(cfg)):
        if any(other.tier == method.tier != "snapshot" and fault.stage == "start" for other, fault in faults.items()):
            continue  # it would start just the same
        found = examine_method(cfg._replace(method=method))
        if not isinstance(found, Fault):
            return _settle(cfg, StartChoice(method, found), faults)
        faults[method] = found
    raise _refusal(cfg.env_id, wanted, faults)


def _refusal(env_id: str, wanted: str, faults: dict[StartMethod, Fault]) -> GroupStartError:
    if wanted == "auto":
        return GroupStartError(f"siblings of {env_id} cannot share a start: {_listed(faults)}; fix: {FIXES['start']}")
    reasons = next(iter(faults.values())).reason if len(faults) == 1 else _listed(faults)
    return GroupStartError(
        f"siblings of {env_id} cannot share a start by group_start={wanted!r}: {reasons}; fix: {FIXES['start']}; or "
        "group_start='auto', which tries every way"
    )


def examine_method(cfg: RowCfg) -> GroupStartReport | Fault:
    """What two rows show that start by ``cfg.method``, or where they differ."""
    tier, states = cfg.method
    env = RowsGroupEnv(cfg, 2)
    try:
        report = _guarded("start", tier == "snapshot", lambda: examine_start(env))
        if isinstance(report, Fault):
            return report
        fault = _guarded(
            "branch", states != "actions", lambda: examine_branching(env, noise_varies=report.noise_varies)
        )
        if fault is not None:
            return fault
        if tier == "snapshot" and not start_repeats(env, env.forget_starts):
            return Fault("start", "the captured start of a seed is another one when it is captured again")
    finally:
        env.close()
    name = _adapter_name(cfg) if states == "adapter" else states
    return report._replace(can_branch=True, states=name)


def _methods(wanted: str, adapter: str | None) -> Iterator[StartMethod]:
    """What to try, best first."""
    known = adapter is not None
    if wanted in ("auto", "snapshot") and known:
        yield StartMethod("snapshot", "adapter")
    if wanted in ("auto", "seed"):
        if known:
            yield StartMethod("seed", "adapter")
        yield StartMethod("seed", "fields")
        yield StartMethod("seed", "actions")
    if wanted in ("auto", "snapshot"):
        yield StartMethod("snapshot", "fields")
    if wanted in ("auto", "replay"):
        yield StartMethod("replay", "actions")


def _guarded(stage: Literal["start", "branch"], uses_adapter: bool, examine: Callable[[], _Found]) -> _Found | Fault:
    """What ``examine`` finds; an error of an adapter is a fault, any other one the user must see."""
    try:
        return examine()
    except Exception as error:
        if not uses_adapter:
            raise
        kind = "" if isinstance(error, GroupwiseError) else f"{type(error).__name__}: "
        return Fault(stage, kind + str(error).partition("; fix: ")[0])


def _adapter_name(cfg: RowCfg) -> str | None:
    env = cfg.make()
    adapter = adapter_for(env)
    env.close()
    return None if adapter is None else adapter.name


def _settle(cfg: RowCfg, choice: StartChoice, faults: dict[StartMethod, Fault]) -> StartChoice:
    """The choice with the reasons for it, told where they matter."""
    report = choice.report._replace(passed_over=tuple(_reasons(faults)))
    surprising = {
        method: fault for method, fault in faults.items() if fault.stage == "start" or method.states == "adapter"
    }
    if surprising:
        stage = "branch" if all(method.states == "adapter" for method in surprising) else "start"
        warnings.warn(
            f"siblings of {cfg.env_id} share their start by {choice.method}, since better ways failed: "
            f"{_listed(surprising)}; fix: {FIXES[stage]}",
            GroupStartWarning,
            stacklevel=4,
        )
    if not report.start_varies and cfg.random_prefix == 0:
        log.warning(
            "%s starts in the same state whatever the seed, so all groups start alike; fix: env.random_prefix, if that "
            "is not wanted",
            cfg.env_id,
        )
    return choice._replace(report=report)


def _listed(faults: dict[StartMethod, Fault]) -> str:
    return "; ".join(_reasons(faults))


def _reasons(faults: dict[StartMethod, Fault]) -> list[str]:
    """Each reason once, after the methods that it concerns."""
    methods: dict[str, list[str]] = {}
    for method, fault in faults.items():
        methods.setdefault(fault.reason, []).append(str(method))
    return [f"{', '.join(concerned)}: {reason}" for reason, concerned in methods.items()]
