"""What ``check_env`` found: as a table for people, and as plain data for scripts."""

import json
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from groupwise.check import EnvReport, Training, check_env
from groupwise.envs.check import Branching, Finding
from groupwise.envs.configs import EnvCfg

T = TypeVar("T")

NOISE = {
    "none": "no",
    "drawn": "random numbers are drawn, without effect on siblings in some tens of steps",
    "seen": "yes",
}
_STATES = {
    "native": "states are arrays",
    "mujoco": "states by a copy of MjData",
    "ale": "states by ALE's own clone",
    "own": "states by the environment's clone_state",
    "fields": "states by a copy of all attributes",
    "actions": "states by replaying the actions that led there",
}


def check_and_print(env: EnvCfg, form: Literal["table", "json"]) -> int:
    """Exit code of ``groupwise check-env``: 0 if GRPO can train, else 1."""
    report = check_env(env)
    if form == "json":
        print(json.dumps(plain(report)))
    else:
        show(report)
    return int(report.training.value is None)


def plain(report: EnvReport) -> dict[str, Any]:
    """The report in dictionaries, lists, texts and numbers."""
    return {name: _plain(value) for name, value in report._asdict().items()}


def table(report: EnvReport) -> list[tuple[str, str]]:
    """Questions with their answers; an empty answer marks a heading."""
    tiers = [
        (f"  {tier}", answer(found, lambda us: f"yes, {duration(us)} a start")) for tier, found in report.tiers.items()
    ]
    speeds = [(f"  {way}", answer(found, speed)) for way, found in report.steps_per_second.items()]
    return [
        ("observation", answer(report.observation)),
        ("action", answer(report.action)),
        ("start depends on the seed", answer(report.start_varies, yes_or_no)),
        ("steps are random", answer(report.noise, NOISE.__getitem__)),
        ("siblings share a start by", ""),
        *tiers,
        ("starts in mid-episode", answer(report.branching, describe_branching)),
        ("own vectorised version", answer(report.entry_point_autoreset, lambda mode: f"yes, resets itself: {mode}")),
        ("steps a second, 8 at once", ""),
        *speeds,
        ("training uses", answer(report.training, describe_training)),
    ]


def answer(finding: Finding[T], show: Callable[[T], str] = str) -> str:
    """What was found in words, or why nothing was."""
    return f"no: {finding.reason}" if finding.value is None else show(finding.value)


def yes_or_no(value: bool) -> str:
    """As it says."""
    return "yes" if value else "no"


def duration(microseconds: float) -> str:
    """Two digits, in us or ms."""
    unit, scale = ("us", 1.0) if microseconds < 1000 else ("ms", 1000.0)
    return f"{_two_digits(microseconds / scale)} {unit}"


def speed(steps_per_second: float) -> str:
    """Two digits, with thousands apart."""
    return f"{round(float(_two_digits(steps_per_second))):,}"


def describe_branching(branching: Branching) -> str:
    """Where states come from and what they cost."""
    costs = f"capture {duration(branching.capture_us)}, restore {duration(branching.restore_us)}"
    return f"yes, {_STATES[branching.states]}; {costs}"


def describe_training(training: Training) -> str:
    """What GRPO does by default, and why not better."""
    used = f"{training.num_envs} x {training.vectorization}, starts by {training.tier}, autoreset {training.autoreset}"
    return "; ".join([used, *(f"not {why}" for why in training.passed_over)])


def show(report: EnvReport) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    printed = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    printed.add_column(no_wrap=True)
    printed.add_column(overflow="fold")
    for question, found in table(report):
        printed.add_row(Text(question), Text(found))
    Console(highlight=False).print(f"[bold]{report.env_id}[/bold]", printed, sep="\n")


def _two_digits(value: float) -> str:
    digits = max(0, 1 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 1)}f}" if value < 100 else str(int(round(value, 1 - math.floor(math.log10(value)))))


def _plain(value: Any) -> Any:
    if isinstance(value, Finding):
        return {"value": _plain(value.value), "reason": value.reason}
    if isinstance(value, Branching | Training):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
