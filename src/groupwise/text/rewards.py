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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from groupwise.config.algorithm import OnNonFinite
from groupwise.config.text import RewardCfg
from groupwise.errors import ConfigError, DataError, RewardError, UnknownNameError, nearest
from groupwise.plugins import register
from groupwise.text.data import Completion, Prompt
from groupwise.text.isolated import Isolated, LostCallError, described
from groupwise.text.registered import check_settings
from groupwise.text.single_rewards import SingleReward, scores_one

log = logging.getLogger(__name__)

LARGEST = 3.4e38
"""Of float32; larger scores are as good as infinite."""

Reward = Callable[..., Any]
"""Maps keywords to a sequence of numbers or None, sync or async."""
Score: TypeAlias = float | RewardError | None
"""None: the reward does not apply. An error: it failed, and the completion gets no reward."""
MOST_FAILED, FAILURE_WINDOW = 0.2, 10
"""Training stops above this part of failed scores, over this many calls."""
REWARDS: dict[str, Reward] = {}
"""Registered ones; a class is instantiated with the settings."""
ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of every function; no column may have such a name."""
NEVER_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that functions do not get."""


class RewardObject:
    """Base class of rewards that read columns named by their settings, or hold resources until the run ends."""

    columns: tuple[str, ...] = ()
    """Columns that every example must have."""
    limits_time: bool = False
    """Whether it limits the time of its calls itself, so that ``task.reward_timeout`` leaves it in this process."""

    def close(self) -> None:
        """Free its resources. Not called in a process of ``task.reward_timeout``, which is killed."""


class RewardFunction(NamedTuple):
    """A function and how it is called."""

    name: str
    call: Any
    """A ``Reward``, perhaps a ``RewardObject``."""
    weight: float = 1.0
    settings: Mapping[str, Any] = {}
    """Arguments of each call; columns of these names are not passed."""

    def arguments(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The settings, and those of the keywords that the function takes."""
        named = inspect.signature(self.call).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in named.values())
        return {name: value for name, value in keywords.items() if anything or name in named} | dict(self.settings)

    def needed_columns(self) -> list[str]:
        """Columns without which it cannot be called."""
        if isinstance(self.call, RewardObject):
            return [*self.call.columns]
        named = inspect.signature(self.call).parameters.values()
        keywords = [p for p in named if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty]
        return [p.name for p in keywords if p.name not in {*ARGUMENTS, *self.settings}]


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
        return RewardFunction(name, SingleReward(given) if scores_one(given) else given, cfg.weight)
    import groupwise.text.builtin_rewards  # noqa: F401  registers them

    if cfg.name not in REWARDS:
        raise UnknownNameError("reward", cfg.name, REWARDS)
    reward = REWARDS[cfg.name]
    is_class = inspect.isclass(reward)
    # missing arguments of a function are columns
    check_settings(f"reward {cfg.name!r}", reward, cfg.kwargs, complete=is_class)
    if is_class:
        return RewardFunction(cfg.name, reward(**cfg.kwargs), cfg.weight)
    if scores_one(reward):
        return RewardFunction(cfg.name, SingleReward(reward, cfg.kwargs), cfg.weight)
    return RewardFunction(cfg.name, reward, cfg.weight, cfg.kwargs)


class RemoteReward:
    """A reward function in a process of its own: returns its scores and what it logged."""

    def __init__(self, name: str, function: RewardFunction) -> None:
        self._name, self._function = name, function
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, keywords: Mapping[str, Any]) -> tuple[list[Score], list[tuple[str, float]]]:
        """Call the function with those of the keywords that it takes."""
        logged: list[tuple[str, float]] = []
        loggers = {"log_extra": _ignore, "log_metric": lambda name, value: logged.append((name, float(value)))}
        result = self._function.call(**self._function.arguments({**keywords, **loggers}))
        if inspect.iscoroutine(result):
            self._loop = self._loop or asyncio.new_event_loop()
            result = self._loop.run_until_complete(result)
        return numbers(self._name, result, len(keywords["prompts"])), logged


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
        self._isolated: dict[str, Isolated] = {}
        for name, function in zip(self.names, self.functions, strict=True):
            if timeout is not None and not (isinstance(function.call, RewardObject) and function.call.limits_time):
                self._isolated[name] = Isolated(RemoteReward(name, function), f"reward {name!r}", timeout)

    def check_columns(self, columns: Iterable[str], data: str = "data") -> None:
        """Refuse data that lack a column of a function, or have one with the name of an argument."""
        there = sorted(set(columns) - set(NEVER_COLUMNS))
        if taken := set(there) & set(ARGUMENTS):
            raise DataError(
                f"the {data} have a column {min(taken)!r}, which is an argument of every reward; fix: rename it"
            )
        for name, function in zip(self.names, self.functions, strict=True):
            for column in function.needed_columns():
                if column not in there:
                    raise DataError(
                        f"reward {name!r} needs the column {column!r}; the {data} have {', '.join(map(repr, there)) or 'none'} "
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
            "log_extra": _ignore,
            "log_metric": self._log_metric,
        }
        results = zip(self.names, self._results(keywords), strict=True)
        scores = [self._finite(name, numbers(name, result, len(prompts))) for name, result in results]
        self._count_failures(scores)
        reward = tuple(map(self._sum, zip(*scores, strict=True)))
        return Scores(reward, tuple(tuple(None if isinstance(s, RewardError) else s for s in part) for part in scores))

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
            if isinstance(function.call, RewardObject):
                function.call.close()
        for isolated in self._isolated.values():
            isolated.close()

    def _count_failures(self, scores: Sequence[Sequence[Score]]) -> None:
        """Warn of failures; a ``RewardError`` if a fifth of the latest scores are."""
        shares = [0.0]
        for name, part in zip(self.names, scores, strict=True):
            if failures := [score for score in part if isinstance(score, RewardError)]:
                log.warning(
                    "reward %r failed for %d of %d completions: %s", name, len(failures), len(part), failures[0]
                )
                shares.append(len(failures) / len(part))
        self._failed.append(max(shares))
        if sum(self._failed) > MOST_FAILED * FAILURE_WINDOW:
            raise RewardError(
                f"more than {MOST_FAILED:.0%} of the scores of {FAILURE_WINDOW} calls failed, the latest warnings say why; "
                "fix: the reward, or a larger task.reward_timeout"
            )

    def _call_isolated(self, name: str, isolated: Isolated, keywords: Mapping[str, Any]) -> list[Score]:
        local = {name: value for name, value in keywords.items() if name not in ("log_extra", "log_metric")}
        try:
            scores, logged = isolated(local)
        except LostCallError as error:
            return [RewardError(str(error))] * len(keywords["prompts"])
        for metric, value in logged:
            self._log_metric(metric, value)
        return list(scores)

    def _results(self, keywords: Mapping[str, Any]) -> list[Any]:
        """The result of each function; async ones run at the same time, and while the others do."""
        functions = list(zip(self.names, self.functions, strict=True))
        started = {}
        for name, function in sorted(functions, key=lambda pair: not _is_async(pair[1].call)):
            call = partial(function.call, **function.arguments(keywords))
            if isolated := self._isolated.get(name):
                call = partial(self._call_isolated, name, isolated, keywords)
            result = _result(name, call)
            if inspect.iscoroutine(result):
                result = asyncio.run_coroutine_threadsafe(result, self._running_loop())
            started[name] = result
        results = ((name, started[name]) for name in self.names)
        return [_result(name, result.result) if isinstance(result, Future) else result for name, result in results]

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """One loop for all calls, as async clients are bound to it; in a thread, as notebooks run their own loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), daemon=True, name="rewards").start()
        return self._loop

    def _finite(self, name: str, scores: list[Score]) -> list[Score]:
        bad = [number for number, score in enumerate(scores) if isinstance(score, float) and not abs(score) <= LARGEST]
        if not bad:
            return scores
        what = f"reward {name!r} is {scores[bad[0]]} for completion {bad[0]} of {len(scores)}"
        if self.on_nonfinite == "stop":
            raise RewardError(
                f"{what}; fix: a finite number, or None for what it cannot score; or algorithm.on_nonfinite='drop'"
            )
        log.warning("%s (%d in all); on_nonfinite=%r", what, len(bad), self.on_nonfinite)
        instead = 0.0 if self.on_nonfinite == "zero" else None
        return [instead if number in bad else score for number, score in enumerate(scores)]

    def _sum(self, member: Sequence[Score]) -> float | None:
        if any(isinstance(score, RewardError) for score in member):
            return None
        pairs = zip(self.weights, member, strict=True)
        weighted = [weight * value for weight, value in pairs if isinstance(value, float)]
        return sum(weighted) if weighted else None

    def _log_metric(self, name: str, value: Any) -> None:
        self._metrics.setdefault(name, []).append(float(value))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _is_async(call: Any) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(call.__call__)


def _result(name: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise RewardError(
            f"reward {name!r} raised {described(error)}; fix: the function (it may return None for what it cannot score)"
        ) from error


def numbers(name: str, result: Any, count: int) -> list[Score]:
    """The scores of a function; errors as they are.

    Raises:
        RewardError: it did not return a number, None or a ``RewardError`` for each completion.
    """
    try:
        values = [v if v is None or isinstance(v, RewardError) else float(v) for v in result]
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardError(
            f"reward {name!r} returned {result!r:.80}: {error}; expected a list of {count} numbers, one for each completion "
            "(None where it does not apply); fix: its return"
        ) from error
    if len(values) != count:
        raise RewardError(
            f"reward {name!r} returned {len(values)} scores for {count} completions; fix: one for each, None where it "
            "does not apply"
        )
    return values


def _ignore(*_: Any) -> None:
    """TRL prints the columns of ``log_extra``."""


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with numbers behind repeated ones."""
    return tuple(
        name if name not in names[:place] else f"{name}_{names[:place].count(name) + 1}"
        for place, name in enumerate(names)
    )
