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
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, TypeAlias, get_type_hints

import cloudpickle
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from groupwise import plugins
from groupwise import system as processes
from groupwise.config.algorithm import OnNonFinite
from groupwise.config.run import RewardCfg
from groupwise.errors import ConfigError, DataError, RewardError, UnknownNameError, nearest
from groupwise.plugins import register
from groupwise.text.data import Completion, Prompt

# Functions and classes that settings name, for rewards and tools


def check_settings(
    what: str, made: Callable[..., Any], settings: Mapping[str, Any], *, first: Sequence[Any] = (), complete: bool
) -> None:
    """Refuse settings that do not exist or have the wrong type.

    Args:
        first: positional arguments that precede them.
        complete: refuse missing settings, too.

    Raises:
        ConfigError: names the setting.
    """
    signature = inspect.signature(made)
    try:
        signature.bind_partial(*first, **settings)  # first of all: a typing error is no missing setting
        if complete:
            signature.bind(*first, **settings)
    except TypeError as error:
        unknown = next((key for key in settings if key not in signature.parameters), "")
        hint = nearest(unknown, signature.parameters) or f"; fix: settings that fit {signature}"
        raise ConfigError(f"{what}: {error}{hint}") from error
    hints = get_type_hints(made.__init__ if inspect.isclass(made) else made)
    for key in settings.keys() & hints.keys():
        try:
            TypeAdapter(hints[key]).validate_python(settings[key], strict=True)
        except PydanticSchemaGenerationError:  # a type that only its owner can check
            continue
        except ValidationError as error:
            raise ConfigError(
                f"{what}: {key} = {settings[key]!r}: {error.errors()[0]['msg']}; fix: its value"
            ) from error


# Functions in a separate process, which is killed with its children when a call takes too long


class RemoteError(Exception):
    """The function raised an error: its type and message, with its traceback as a note."""


def described(error: Exception) -> str:
    """Type and message of an error, also of one in another process."""
    return str(error) if isinstance(error, RemoteError) else f"{type(error).__name__}: {error}"


class LostCallError(Exception):
    """The call took too long, or its process died."""


class Isolated:
    """Calls ``function`` in another process, whose limit holds also where a call sleeps, forks or holds the interpreter.

    The process starts with the first call, and again with the next one after it was killed.

    Args:
        name: for messages.
        seconds: limit of each call.

    Raises:
        ConfigError: the function cannot be sent to another process.
    """

    def __init__(self, function: Callable[..., Any], name: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        try:
            self._payload = plugins.pickled(function)
        except Exception as error:
            raise ConfigError(
                f"{name} cannot be sent to another process: {error!r}; fix: make locks, files and models inside the "
                "function, or no timeout"
            ) from error
        self._child: processes.Child | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; returns its result.

        Raises:
            RemoteError: the function raised an error.
            LostCallError: it took longer than ``seconds``, or its process died.
            ConfigError: its process does not start.
        """
        if self._child is not None and not self._child.process.is_alive():
            self.close()
        child = self._child or self._start()
        result, error = self._answer(child, self._seconds, (args, kwargs))
        if error is None:
            return result
        message, trace = error
        raised = RemoteError(message)
        raised.add_note(trace)
        raise raised

    def close(self, seconds: float = processes.SECONDS_TO_CLOSE) -> None:
        """End the process and its children."""
        child, self._child = self._child, None
        if child is not None:
            child.close(seconds)

    def _start(self) -> processes.Child:
        self._child = child = processes.Child(_serve, self._payload, name=self._name)
        try:
            _, error = self._answer(child, processes.SECONDS_TO_IMPORT)
            failure = error and error[1]
        except LostCallError as lost:
            failure = str(lost)
        if failure is not None:
            self.close()
            raise ConfigError(
                f"the process of {self._name} does not start: {failure}\nfix: a script needs `if __name__ == '__main__':` around "
                "what it runs"
            )
        return child

    def _answer(self, child: processes.Child, seconds: float, message: Any = None) -> Any:
        """The answer to a message; without one, that to the start."""
        try:
            if message is not None:
                child.send(message)
            return child.answer(seconds, time.monotonic())
        except processes.LostChildError as error:
            self.close(0.0)
            raise LostCallError(f"{self._name} {error}") from None
        except BaseException:  # interrupted: an unread answer would be taken for that to the next message
            self.close(0.0)
            raise


def _serve(connection: Connection, payload: bytes) -> None:
    @contextmanager
    def calls() -> Iterator[Callable[[Any], Any]]:
        function = cloudpickle.loads(payload)
        yield lambda call: function(*call[0], **call[1])

    processes.serve(connection, calls())


# Reward functions: arguments, columns of the data, process

Reward = Callable[..., Any]
"""Maps keywords to a sequence of numbers or None, sync or async."""
Score: TypeAlias = float | RewardError | None
"""Score of a completion. None: the reward does not apply. An error: it failed, and the completion gets no reward."""
LogMetric = Callable[[str, float], None]
ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of every function; no column may have such a name."""
ARGUMENTS_OF_ONE = ("completion", "prompt", "question")
"""Arguments of a function that scores one completion: ``question`` is the column of that name, or else the prompt."""


class RewardObject:
    """Base class of rewards that limit the time of their calls themselves, so that ``task.reward_timeout`` leaves them here.

    They may read columns named by their settings, and hold resources until the run ends.
    """

    columns: tuple[str, ...] = ()
    """Columns that every example must have."""

    def close(self) -> None:
        """Free its resources."""


class RewardFunction:
    """A function and how it is called.

    Args:
        call: a ``Reward``, perhaps a ``RewardObject``.
        settings: arguments of each call; columns of these names are not passed.
    """

    def __init__(self, name: str, call: Reward, weight: float = 1.0, settings: Mapping[str, Any] | None = None) -> None:
        self.name, self.weight, self.settings = name, weight, dict(settings or {})
        self.call: Any = call  # or a RewardObject, which is a function, too
        parameters = inspect.signature(call).parameters
        self._names = [*parameters]
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._scores_one = "completion" in parameters and "completions" not in parameters
        self.isolated: Isolated | None = None
        """The process that it runs in, if it has one of its own."""

    @property
    def is_async(self) -> bool:
        """Whether its calls run while other functions are called."""
        call = self.call
        return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(call.__call__)

    def isolate(self, seconds: float) -> None:
        """Run it in a process of its own, with this limit of each call; not if it limits its time itself.

        Raises:
            ConfigError: it cannot be sent to a process.
        """
        if not isinstance(self.call, RewardObject):
            self.isolated = Isolated(RemoteReward(self), f"reward {self.name!r}", seconds)

    def close(self) -> None:
        """Free its resources."""
        if isinstance(self.call, RewardObject):
            self.call.close()
        if self.isolated is not None:
            self.isolated.close()

    def needed_columns(self) -> list[str]:
        """Columns without which it cannot be called."""
        if isinstance(self.call, RewardObject):
            return [*self.call.columns]
        named = inspect.signature(self.call).parameters.values()
        needed = [p.name for p in named if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        return [name for name in needed if name not in {*ARGUMENTS, *ARGUMENTS_OF_ONE, *self.settings}]

    def __call__(self, keywords: Mapping[str, Any], log_metric: LogMetric) -> Any:
        """Call it with the keywords that it takes; returns its result, or an error for each completion if its process was lost."""
        if self.isolated is not None:
            try:
                scores, logged = self.isolated(keywords)
            except LostCallError as error:
                return [RewardError(str(error))] * len(keywords["prompts"])
            for name, value in logged:
                log_metric(name, value)
            return scores
        if self._scores_one:
            return self._one_by_one(keywords)
        keywords = {**keywords, "log_extra": lambda *_: None, "log_metric": log_metric}  # TRL prints these columns
        taken = {name: value for name, value in keywords.items() if self._takes_all or name in self._names}
        return self.call(**taken | self.settings)

    def _one_by_one(self, keywords: Mapping[str, Any]) -> Any:
        """The score of each completion, from a function of one."""
        prompts = keywords["prompts"]
        columns = {
            name: values for name, values in keywords.items() if name not in ARGUMENTS or name == "completion_ids"
        }
        texts = {"completion": [written_text(completion) for completion in keywords["completions"]], "prompt": prompts}
        given = {"question": prompts} | columns | texts
        names = [name for name in self._names if name in given and name not in self.settings]
        rows = zip(*(given[name] for name in names), strict=True)
        scores = [self.call(**dict(zip(names, row, strict=True)), **self.settings) for row in rows]
        return _awaited(scores) if any(map(inspect.iscoroutine, scores)) else scores


async def _awaited(scores: Sequence[Any]) -> list[Any]:
    """The scores, some of which are coroutines that run at the same time."""
    results = iter(await asyncio.gather(*filter(inspect.isawaitable, scores)))
    return [next(results) if inspect.isawaitable(score) else score for score in scores]


class RemoteReward:
    """Runs a reward function in its own process: returns its scores and logged metrics."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, keywords: Mapping[str, Any]) -> tuple[list[Score], list[tuple[str, float]]]:
        """Call the function."""
        logged: list[tuple[str, float]] = []
        result = self._function(keywords, lambda name, value: logged.append((name, float(value))))
        if inspect.iscoroutine(result):
            self._loop = self._loop or asyncio.new_event_loop()
            result = self._loop.run_until_complete(result)
        return numbers(self._function.name, result, len(keywords["prompts"])), logged


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


def written_text(completion: Completion) -> str:
    """A completion as a text; for several messages, the model's turns."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion if message["role"] == "assistant")


log = logging.getLogger(__name__)

LARGEST = 3.4e38
"""Largest number in float32; larger scores are as good as infinite."""

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
    """Always 0, unlike in TRL, because a run's length is counted in tokens."""
    epoch: float = 0.0
    """Passes over the data."""


class Scores(NamedTuple):
    """Scores of each completion."""

    reward: tuple[float | None, ...]
    """Weighted sum of the functions' scores. None: the completion is unscorable, because no function has a score, or one failed."""
    parts: tuple[tuple[float | None, ...], ...]
    """Score of each function, unweighted. None: it does not apply, or failed."""


class RewardSet:
    """Functions whose weighted scores add up.

    Args:
        on_nonfinite: handling of scores that are NaN, infinite or beyond float32. ``stop``: an error; ``drop``: no
            score; ``zero``: it is 0.
        timeout: seconds that a call of a function may take, which then runs in a process of its own. None: no limit.

    Raises:
        ConfigError: there is none, or one cannot be sent to a process.
    """

    def __init__(
        self, functions: Sequence[RewardFunction], on_nonfinite: OnNonFinite = "stop", timeout: float | None = None
    ) -> None:
        if not functions:
            raise ConfigError("there is no reward; fix: reward=my_function, or a registered name")
        self.functions = tuple(functions)
        self.on_nonfinite = on_nonfinite
        names = [function.name for function in functions]
        counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
        self.names = tuple(f"{name}_{count}" if count > 1 else name for name, count in zip(names, counts, strict=True))
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
        started: dict[RewardFunction, Any] = {}
        for function in sorted(self.functions, key=lambda function: not function.is_async):
            # the async ones run while the others are called
            with _blaming(function.name):
                result = function(keywords, self._log_metric)
                if inspect.iscoroutine(result):
                    result = asyncio.run_coroutine_threadsafe(result, self._running_loop())
                started[function] = result
        scores: list[list[Score]] = []
        for function in self.functions:
            name, result = function.name, started[function]
            with _blaming(name):
                result = result.result() if isinstance(result, Future) else result
            found = numbers(name, result, len(prompts))
            if failures := [score for score in found if isinstance(score, RewardError)]:
                log.warning(
                    "reward %r failed for %d of %d completions: %s", name, len(failures), len(found), failures[0]
                )
            bad = [place for place, score in enumerate(found) if isinstance(score, float) and not abs(score) <= LARGEST]
            if bad:
                what = f"reward {name!r} is {found[bad[0]]} for completion {bad[0]} of {len(found)}"
                if self.on_nonfinite == "stop":
                    raise RewardError(
                        f"{what}; fix: a finite number, or None for what it cannot score; or algorithm.on_nonfinite='drop'"
                    )
                log.warning("%s (%d in all); on_nonfinite=%r", what, len(bad), self.on_nonfinite)
                for place in bad:
                    found[place] = 0.0 if self.on_nonfinite == "zero" else None
            scores.append(found)
        members = list(zip(*scores, strict=True))
        failed = [any(isinstance(score, RewardError) for score in member) for member in members]
        self._failed.append(sum(failed) / max(len(failed), 1))
        if sum(self._failed) > MOST_FAILED * FAILURE_WINDOW:
            raise RewardError(
                f"more than {MOST_FAILED:.0%} of the scores of {FAILURE_WINDOW} calls failed, the latest warnings say why; "
                "fix: the reward, or a larger task.reward_timeout"
            )
        rewards: list[float | None] = []
        for member, is_lost in zip(members, failed, strict=True):
            pairs = zip(self.weights, member, strict=True)
            weighted = [weight * value for weight, value in pairs if isinstance(value, float)]
            rewards.append(sum(weighted) if weighted and not is_lost else None)
        parts = tuple(tuple(score if isinstance(score, float) else None for score in part) for part in scores)
        return Scores(tuple(rewards), parts)

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

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """One loop for all calls, as async clients are bound to it; in a thread, as notebooks run their own loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), daemon=True, name="rewards").start()
        return self._loop

    def _log_metric(self, name: str, value: Any) -> None:
        self._metrics.setdefault(name, []).append(float(value))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


@contextmanager
def _blaming(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RewardError(
            f"reward {name!r} raised {described(error)}; fix: the function (it may return None for what it cannot score)"
        ) from error
