"""What ``check_env`` found out: as data, as plain data for scripts, as a table for people. Imports no torch."""

import math
import shutil
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from groupwise.config.env import StartTier

T = TypeVar("T")

Verdict = Literal["found", "none", "unknown"]
"""There is such a thing, and this is it; it was tried, and does not work or does not exist; nobody can tell, since the trial failed."""
Noise = Literal["none", "drawn", "seen", "stray"]
"""Steps draw no random numbers; draw some, without effect in the trial; end otherwise with numbers of their own; end otherwise with other numbers from a generator that no seed of training reaches."""


@dataclass(frozen=True)
class Finding(Generic[T]):
    """What was found, or why nothing was.

    ``value``: what was found, else None. ``verdict``: ``found``; ``none``, it does not work or does not exist; ``unknown``,
    the trial failed, so nobody can tell. ``reason``: why there is no value, else empty. ``fix``: what to do about it, if
    there is something to do.
    """

    value: T | None
    verdict: Verdict = "found"
    reason: str = ""
    fix: str = ""


def none(reason: str, fix: str = "") -> Finding[Any]:
    """The finding that there is nothing of the kind, or that it does not work."""
    return Finding(None, "none", reason, fix)


def unknown(reason: str, fix: str = "") -> Finding[Any]:
    """The finding that nobody can tell."""
    return Finding(None, "unknown", reason, fix)


class Branching(NamedTuple):
    """How states in the middle of an episode are captured, some 16 steps into it.

    ``states``: where they come from: ``mujoco``, ``ale``, ``own``, ``fields`` (copies), ``actions`` (the way there is
    replayed), ``native`` (arrays), or the name of another adapter. ``capture_us``, ``restore_us``: microseconds.
    """

    states: str
    capture_us: float
    restore_us: float


class Training(NamedTuple):
    """What ``groupwise train`` does with the environment by default.

    ``tier``: how siblings share a start: ``native``, ``snapshot``, ``seed`` or ``replay``. ``vectorization``:
    ``entry_point``; ``sync``, one after another in this process; ``async``, ``envpool`` or ``torch``, if the settings say so; ``own``,
    the callable makes all rows. ``num_envs``: rows. ``autoreset``: ``disabled``, groups reset themselves. ``passed_over``:
    why better ways to share a start were not taken, a text each.
    """

    tier: StartTier
    vectorization: str
    num_envs: int
    autoreset: str
    passed_over: tuple[str, ...]


class EnvReport(NamedTuple):
    """What ``check_env`` found out about an environment; printed, the table of ``groupwise check-env``.

    Each finding has a ``value`` (as below), or None with a ``reason`` and a ``verdict``: ``none`` (it does not work, or
    does not exist) or ``unknown`` (the trial failed).

    - ``env_id``: its id, or the name of its class.
    - ``observation``, ``action``: the space in words, if rollouts can hold it and a policy can act in it.
    - ``max_episode_steps``: the step limit, if one is known. GRPO needs it.
    - ``start_varies``: True or False, whether the first observation depends on the seed of the reset. Unknown where equal
      seeds start differently.
    - ``noise``: ``none``, steps draw no random numbers; ``drawn``, they do, without effect in the trial; ``seen``, siblings
      with numbers of their own drift apart; ``stray``, steps are random by a generator that training cannot seed: a global
      one (``np.random``, ``random``, ``torch``), a space's, or one hidden in an object of the environment's.
    - ``tiers``: of ``native``, ``snapshot``, ``seed`` and ``replay``: microseconds that a sibling's start takes, if it works.
    - ``branching``: whether groups can start in mid-episode: ``states`` (where these come from: ``mujoco``, ``ale``, ``own``,
      ``fields``, ``actions``, ``native``), ``capture_us`` and ``restore_us`` (microseconds).
    - ``entry_point_autoreset``: who resets finished rows of its own vectorised version: ``next_step``, ``same_step``,
      ``disabled``.
    - ``steps_per_second``: environment steps a second with 8 environments and random actions on this machine, by
      vectorisation. ``sync`` and ``async``: rows in groups; ``entry_point``: its own version; ``envpool``: where it is
      installed and has this task; ``own`` or ``torch`` alone: a callable that makes all rows, or the task in torch.
    - ``training``: what GRPO does by default: ``tier``, ``vectorization``, ``num_envs`` (rows), ``autoreset``,
      ``passed_over`` (why not better). None: it refuses.
    """

    env_id: str
    observation: Finding[str]
    action: Finding[str]
    max_episode_steps: Finding[int]
    start_varies: Finding[bool]
    noise: Finding[Noise]
    tiers: dict[str, Finding[float]]
    branching: Finding[Branching]
    entry_point_autoreset: Finding[str]
    steps_per_second: dict[str, Finding[float]]
    training: Finding[Training]

    def __str__(self) -> str:
        """The table, as wide as the terminal."""
        width = shutil.get_terminal_size((100, 24)).columns
        rows = table(self)
        column = max(len(question) for question, _ in rows) + 2
        lines = [self.env_id]
        for question, found in rows:
            wrapped = textwrap.wrap(found, max(width - column, 30), break_long_words=False, break_on_hyphens=False)
            lines += [f"{label:<{column}}{part}".rstrip() for label, part in _beside(question, wrapped)]
        return "\n".join(lines)


def plain(report: EnvReport) -> dict[str, Any]:
    """The report in dictionaries, lists, texts and numbers."""
    return {name: _plain(value) for name, value in report._asdict().items()}


def table(report: EnvReport) -> list[tuple[str, str]]:
    """Questions with their answers; an empty answer marks a heading. Each reason is told once."""
    told: dict[str, str] = {}

    def row(question: str, finding: Finding[T], show: Callable[[T], str] = str) -> tuple[str, str]:
        return question, _answer(question.strip(), finding, show, told)

    return [
        row("observation", report.observation),
        row("action", report.action),
        row("step limit", report.max_episode_steps),
        row("start depends on the seed", report.start_varies, lambda value: "yes" if value else "no"),
        row("steps are random", report.noise, NOISE.__getitem__),
        ("siblings share a start by", ""),
        *(row(f"  {tier}", found, lambda us: f"yes, {duration(us)} a start") for tier, found in report.tiers.items()),
        row("starts in mid-episode", report.branching, _describe_branching),
        row("own vectorised version", report.entry_point_autoreset, lambda mode: f"yes, resets itself: {mode}"),
        ("steps a second, 8 at once", ""),
        *(row(f"  {way}", found, speed) for way, found in report.steps_per_second.items()),
        *_training_rows(report, told),
    ]


def duration(microseconds: float) -> str:
    """Two digits, in us or ms."""
    unit, scale = ("us", 1.0) if microseconds < 1000 else ("ms", 1000.0)
    return f"{_two_digits(microseconds / scale)} {unit}"


def speed(steps_per_second: float) -> str:
    """Two digits, with thousands apart."""
    return f"{round(float(_two_digits(steps_per_second))):,}"


NOISE: Mapping[Noise, str] = {
    "none": "no",
    "drawn": "random numbers are drawn, without effect in some tens of steps",
    "seen": "yes",
    "stray": "yes, by a generator that training cannot seed: a global one, a space's, or one hidden in an object",
}
_STATES = {
    "native": "states are arrays",
    "mujoco": "states by a copy of MjData",
    "ale": "states by ALE's own clone",
    "own": "states by the environment's clone_state",
    "fields": "states by a copy of all attributes",
    "actions": "states by replaying the actions that led there",
}


def _answer(question: str, finding: Finding[T], show: Callable[[T], str], told: dict[str, str]) -> str:
    """What was found in words; or why nothing was, or where that was ``told`` already."""
    if finding.value is not None:
        return show(finding.value)
    word = "unknown" if finding.verdict == "unknown" else "no"
    if finding.reason in told:
        return f"{word}, see {told[finding.reason]!r}"
    told[finding.reason] = question
    return f"{word}: {finding.reason}"


def _training_rows(report: EnvReport, told: dict[str, str]) -> list[tuple[str, str]]:
    training = report.training
    if training.value is not None:
        return [("training uses", _describe_training(training.value))]
    startless = report.observation.value is not None and all(tier.verdict == "none" for tier in report.tiers.values())
    refusal = "GRPO refuses it, since no way above to share a start works" if startless else training.reason
    return [
        ("training uses", _answer("training uses", none(refusal), str, told)),
        *([("fix", training.fix)] if training.fix else []),
    ]


def _describe_branching(branching: Branching) -> str:
    costs = f"capture {duration(branching.capture_us)}, restore {duration(branching.restore_us)}"
    return f"yes, {_STATES.get(branching.states, branching.states)}; {costs}"


def _describe_training(training: Training) -> str:
    """What GRPO does by default, and why not better."""
    used = f"{training.num_envs} environments by {training.vectorization}, starts by {training.tier}"
    return "; ".join([used, *(f"not {why}" for why in training.passed_over)])


def _beside(label: str, lines: list[str]) -> list[tuple[str, str]]:
    return [(label if number == 0 else "", line) for number, line in enumerate(lines or [""])]


def _two_digits(value: float) -> str:
    digits = max(0, 1 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{min(digits, 1)}f}" if value < 100 else str(int(round(value, 1 - math.floor(math.log10(value)))))


def _plain(value: Any) -> Any:
    if isinstance(value, Finding):
        return {name: _plain(item) for name, item in vars(value).items()}
    if isinstance(value, Branching | Training):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return list(value) if isinstance(value, tuple) else value
