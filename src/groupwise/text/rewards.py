"""Scores of completions: functions of TRL's signature, weighted.

One call for all completions, ``reward(prompts=..., completions=..., completion_ids=..., trainer_state=..., log_extra=...,
log_metric=..., **columns)``, returns a score for each, None where it does not apply. A function without ``**kwargs`` gets
the arguments that it names. A function with a parameter ``completion`` scores one completion at a time.

Source: the signature is that of TRL 1.16's ``GRPOTrainer``.
"""

import asyncio
import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from groupwise.config.algorithm import OnNonFinite
from groupwise.config.text import RewardCfg
from groupwise.errors import ConfigError, DataError, RewardError, UnknownNameError, nearest
from groupwise.plugins import register
from groupwise.text.data import Completion, Prompt
from groupwise.text.isolated import described
from groupwise.text.registered import check_settings
from groupwise.text.reward_functions import ARGUMENTS, Reward, RewardFunction, Score, numbers

log = logging.getLogger(__name__)

LARGEST = 3.4e38
"""Of float32; larger scores are as good as infinite."""

MOST_FAILED, FAILURE_WINDOW = 0.2, 10
"""Training stops above this part of failed scores, over this many calls."""
REWARDS: dict[str, Reward] = {}
"""Registered ones; a class is instantiated with the settings."""
NEVER_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that functions do not get."""


def register_reward(name: str) -> Callable[[Reward], Reward]:
    """Decorator: make a function available as ``RewardCfg(name=name)``.

    Settings (``kwargs``) are arguments of the function. A class is instantiated with them once; its objects are called.
    """
    return register("reward", REWARDS, name)


def make_reward(cfg: RewardCfg, given: Reward | None = None) -> RewardFunction:
    """The function that the settings describe.

    Args:
        given: the function itself, if it was given in Python.

    Raises:
        ConfigError: there is no such reward, or it does not take those settings.
    """
    if given is not None:
        function = given.func if isinstance(given, partial) else given
        name = function.__name__ if inspect.isroutine(function) else type(function).__name__
        return RewardFunction(name, given, cfg.weight)
    import groupwise.text.builtin_rewards  # noqa: F401  registers them

    if cfg.name not in REWARDS:
        raise UnknownNameError("reward", cfg.name, REWARDS)
    reward = REWARDS[cfg.name]
    is_class = inspect.isclass(reward)
    # missing arguments of a function are columns
    check_settings(f"reward {cfg.name!r}", reward, cfg.kwargs, complete=is_class)
    if is_class:
        return RewardFunction(cfg.name, reward(**cfg.kwargs), cfg.weight)
    return RewardFunction(cfg.name, reward, cfg.weight, cfg.kwargs)


class TrainingState(NamedTuple):
    """Progress of training; functions get it as ``trainer_state``."""

    global_step: int = 0
    """Iterations so far."""
    max_steps: int = 0
    """As in TRL; always 0, because a run's length is counted in tokens."""
    epoch: float = 0.0
    """Of the data."""


class Scores(NamedTuple):
    """Of each completion."""

    reward: tuple[float | None, ...]
    """Weighted sum of the functions' scores. None: the completion is unscorable, because no function has a score, or one failed."""
    parts: tuple[tuple[float | None, ...], ...]
    """Score of each function, unweighted. None: it does not apply, or failed."""


class RewardSet:
    """Functions whose weighted scores add up.

    Args:
        on_nonfinite: what a score that is NaN, infinite or beyond float32 does. ``stop``: an error; ``drop``: the function has
            no score; ``zero``: it is 0.
        timeout: seconds that a call of a function may take, which then runs in a process of its own. None: no limit.

    Raises:
        ConfigError: there is none, or one cannot be sent to a process.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        on_nonfinite: OnNonFinite = "stop",
        timeout: float | None = None,
    ) -> None:
        if not functions:
            raise ConfigError("there is no reward; fix: reward=my_function, or a registered name")
        self.functions = tuple(functions)
        self.on_nonfinite = on_nonfinite
        self.names = _distinct([function.name for function in functions])
        self.weights = tuple(function.weight for function in functions)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._metrics: dict[str, list[float]] = {}
        self._failed: deque[float] = deque(maxlen=FAILURE_WINDOW)
        for name, function in zip(self.names, self.functions, strict=True):
            function.name = name
            if timeout is not None:
                function.isolate(timeout)

    def check_columns(self, columns: Iterable[str], data: str = "data") -> None:
        """Refuse data that lack a column of a function, or have one with the name of an argument."""
        there = sorted(set(columns) - set(NEVER_COLUMNS))
        if taken := set(there) & set(ARGUMENTS):
            raise DataError(
                f"the {data} have a column {min(taken)!r}, which is an argument of every reward; fix: rename it"
            )
        for function in self.functions:
            for column in function.needed_columns():
                if column not in there:
                    raise DataError(
                        f"reward {function.name!r} needs the column {column!r}; the {data} have {', '.join(map(repr, there)) or 'none'} "
                        f"besides the prompt; fix: add it{nearest(column, there)}"
                    )

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Sequence[Any]],
        state: TrainingState | None = None,
    ) -> Scores:
        """Rewards of the completions.

        Args:
            completions: texts; messages after a prompt of messages.
            columns: by name, a value for each completion.

        Raises:
            RewardError: a function raises, does not return a number or None for each completion, returns one that is not finite
                (``on_nonfinite``), or failed too often.
        """
        keywords = {name: list(values) for name, values in columns.items() if name not in NEVER_COLUMNS} | {
            "prompts": [p if isinstance(p, str) else [dict(message) for message in p] for p in prompts],
            "completions": list(completions),
            "completion_ids": [list(ids) for ids in completion_ids],
            "trainer_state": state or TrainingState(),
        }
        started = {function: self._start(function, keywords) for function in sorted(self.functions, key=_waits)}
        scores = [self._result(function.name, started[function], len(prompts)) for function in self.functions]
        members = list(zip(*scores, strict=True))
        self._count_failures(members)
        parts = tuple(tuple(score if isinstance(score, float) else None for score in part) for part in scores)
        return Scores(tuple(map(self._sum, members)), parts)

    def take_logged(self) -> dict[str, float]:
        """Means of the values that functions logged with ``log_metric(name, value)`` since the last call."""
        logged = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics.clear()
        return logged

    def close(self) -> None:
        """End the event loop, and close the reward objects."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
        for function in self.functions:
            function.close()

    def _start(self, function: RewardFunction, keywords: Mapping[str, Any]) -> Any:
        """What the function returns; the ``Future`` of an async one, which runs while others are called."""
        with _blaming(function.name):
            result = function(keywords, self._log_metric)
            if inspect.iscoroutine(result):
                return asyncio.run_coroutine_threadsafe(result, self._running_loop())
            return result

    def _result(self, name: str, started: Any, count: int) -> list[Score]:
        """The scores of a function; those that are not finite as ``on_nonfinite`` says. Warns of those that failed."""
        with _blaming(name):
            result = started.result() if isinstance(started, Future) else started
        scores = numbers(name, result, count)
        if failures := [score for score in scores if isinstance(score, RewardError)]:
            log.warning("reward %r failed for %d of %d completions: %s", name, len(failures), count, failures[0])
        bad = [number for number, score in enumerate(scores) if isinstance(score, float) and not abs(score) <= LARGEST]
        if not bad:
            return scores
        what = f"reward {name!r} is {scores[bad[0]]} for completion {bad[0]} of {count}"
        if self.on_nonfinite == "stop":
            raise RewardError(
                f"{what}; fix: a finite number, or None for what it cannot score; or algorithm.on_nonfinite='drop'"
            )
        log.warning("%s (%d in all); on_nonfinite=%r", what, len(bad), self.on_nonfinite)
        instead = 0.0 if self.on_nonfinite == "zero" else None
        return [instead if number in bad else score for number, score in enumerate(scores)]

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """One loop for all calls, as async clients are bound to it; in a thread, as notebooks run their own loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), daemon=True, name="rewards").start()
        return self._loop

    def _count_failures(self, members: Sequence[Sequence[Score]]) -> None:
        """A ``RewardError`` if a fifth of the latest completions have a score that failed."""
        self._failed.append(sum(map(_failed, members)) / max(len(members), 1))
        if sum(self._failed) > MOST_FAILED * FAILURE_WINDOW:
            raise RewardError(
                f"more than {MOST_FAILED:.0%} of the scores of {FAILURE_WINDOW} calls failed, the latest warnings say why; "
                "fix: the reward, or a larger task.reward_timeout"
            )

    def _sum(self, member: Sequence[Score]) -> float | None:
        if _failed(member):
            return None
        pairs = zip(self.weights, member, strict=True)
        weighted = [weight * value for weight, value in pairs if isinstance(value, float)]
        return sum(weighted) if weighted else None

    def _log_metric(self, name: str, value: Any) -> None:
        self._metrics.setdefault(name, []).append(float(value))


def _waits(function: RewardFunction) -> bool:
    """Whether it is called after the async functions, which run meanwhile."""
    call = function.call
    return not (inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(call.__call__))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _failed(member: Sequence[Score]) -> bool:
    return any(isinstance(score, RewardError) for score in member)


@contextmanager
def _blaming(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RewardError(
            f"reward {name!r} raised {described(error)}; fix: the function (it may return None for what it cannot score)"
        ) from error


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with numbers behind repeated ones."""
    return tuple(
        name if name not in names[:place] else f"{name}_{names[:place].count(name) + 1}"
        for place, name in enumerate(names)
    )
