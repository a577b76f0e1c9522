"""Scores of completions: functions of TRL's signature, weighted.

One call for all completions, ``reward(prompts=..., completions=..., completion_ids=..., trainer_state=..., log_extra=...,
log_metric=..., **columns)``, returns a score for each, None where it does not apply. A function without ``**kwargs`` gets
the arguments that it names. A function with a parameter ``completion`` scores one completion at a time.

Source: the signature is that of TRL 1.16's ``GRPOTrainer``.
"""

import asyncio
import copy
import functools
import inspect
import json
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn, SupportsFloat, TypeAlias, cast, get_type_hints

import cloudpickle
import numpy as np
from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from groupwise import plugins
from groupwise import system as processes
from groupwise.config.algorithm import OnNonFinite
from groupwise.config.run import RewardCfg
from groupwise.errors import ConfigError, DataError, EnvError, RewardError, UnknownNameError, nearest
from groupwise.plugins import register

Message = dict[str, Any]
"""The texts ``role`` and ``content``; other entries, such as ``tool_calls``, are for the chat template."""
Prompt = str | tuple[Message, ...]
Completion = str | Sequence[Message]
"""A completion as rewards read it: a text; after a prompt of messages, messages."""

log = logging.getLogger(__name__)

# Functions and classes that settings name, for rewards and tools


def make_registered(
    kind: str,
    registry: Mapping[str, Callable[..., Any]],
    name: str,
    settings: Mapping[str, Any],
    *first: Any,
    makes: bool = False,
) -> Any:
    """An object of a registered class, made with the settings, or a registered function with the settings bound.

    A function that ``makes`` the object is called with the settings, as a class is.

    Arguments that a function is called with are in ``first``, if they are known. A ``ConfigError`` if there is none of that name,
    or a setting does not exist, is missing or has the wrong type.
    """
    if name not in registry:
        raise UnknownNameError(kind, name, registry, more="; one of yours: register it, and name its file by --plugin")
    made, what = registry[name], f"{kind} {name!r}"
    is_class, signature = inspect.isclass(made), inspect.signature(made)
    makes = makes or is_class
    try:
        if makes:
            signature.bind(**settings)
        else:
            (signature.bind if first else signature.bind_partial)(*first, **settings)
    except TypeError as error:
        unknown = next((key for key in settings if key not in signature.parameters), "")
        hint = nearest(unknown, signature.parameters) or f"; fix: settings that fit {signature}"
        raise ConfigError(f"{what}: {error}{hint}") from error
    hints = get_type_hints(made.__init__ if is_class else made)
    for key in settings.keys() & hints.keys():
        with suppress(PydanticSchemaGenerationError):  # a type that only its owner can check
            try:
                value = TypeAdapter(hints[key]).validate_json(json.dumps(settings[key]), strict=True)
            except ValidationError as error:
                raise ConfigError(
                    f"{what}: {key} = {settings[key]!r}: {error.errors()[0]['msg']}; fix: its value"
                ) from error
            settings = {**settings, key: value}  # as files have it, where a tuple is a list
    return made(**settings) if makes else partial(made, **settings)


# Functions in a separate process, which is killed with its children when a call takes too long


class RemoteError(Exception):
    """The function raised an error: its type and message, with its traceback as a note."""


class StartError(ConfigError):
    """The process of a function does not start: nothing that the function did."""


class Isolated:
    """Calls ``function`` in another process, whose limit holds also where a call sleeps, forks or holds the interpreter.

    The process starts with the first call, and again with the next one after it was killed. A ``ConfigError`` if the function
    cannot be sent there.
    """

    def __init__(self, function: Callable[[Any], Any], name: str, seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._child: processes.Child | None = None
        try:
            self._payload = plugins.pickled(function)
        except Exception as error:
            raise ConfigError(
                f"{name} cannot be sent to another process: {error!r}; fix: make locks, files and models inside the "
                "function, or no timeout"
            ) from error

    def __call__(self, argument: Any) -> Any:
        """The function's result; a ``RemoteError`` if it raised, a ``LostChildError`` if it took longer or its process died."""
        if self._child is None or not self._child.process.is_alive():
            self.close()
            self._child = processes.Child(_serve, self._payload, name=self._name)
            try:
                self._answer(self._child, processes.SECONDS_TO_IMPORT)
            except (RemoteError, processes.LostChildError) as error:
                self.close()
                raise StartError(
                    f"the process of {self._name} does not start: {error}; fix: a script needs `if __name__ == '__main__':` "
                    "around what it runs"
                ) from error
        return self._answer(self._child, self._seconds, argument)

    def close(self, seconds: float = processes.SECONDS_TO_CLOSE) -> None:
        """End the process and its children."""
        child, self._child = self._child, None
        if child is not None:
            child.close(seconds)

    def _answer(self, child: processes.Child, seconds: float, *messages: Any) -> Any:
        """The answer to a message; without one, that to the start."""
        try:
            for message in messages:
                child.send(message)
            result, error = child.answer(seconds, time.monotonic())
        except BaseException:  # also of an interrupted call: its answer would be taken for that to the next message
            self.close(0.0)
            raise
        if error is not None:
            raised = RemoteError(error[0])
            raised.add_note(error[1])
            raise raised
        return result


def _serve(connection: Connection, payload: bytes) -> None:
    @contextmanager
    def calls() -> Iterator[Callable[[Any], Any]]:
        yield cloudpickle.loads(payload)

    processes.serve(connection, calls())


# Async functions, for rewards and tools


def awaited(result: Any) -> Any:
    """The result, awaited if it is a coroutine."""
    return in_loop(result).result() if inspect.iscoroutine(result) else result


def in_loop(coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Its result, from one loop for all calls, as async clients are bound to it; in a thread, as notebooks run their own loop."""

    async def run() -> Any:
        try:
            return await coroutine
        except SystemExit as error:  # which would end the loop
            raise EnvError(f"an async function raised SystemExit: {error}; fix: another error") from error

    with _MAKING_LOOP:
        loop = _loop(os.getpid())
    return asyncio.run_coroutine_threadsafe(run(), loop)


_MAKING_LOOP = threading.Lock()  # threads may ask for the first time together


@functools.cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """The loop of this process; a forked one has its parent's without the thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True, name="async calls").start()
    return loop


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
    """A function and how it is called. Arguments that a ``partial`` has are not passed, whatever the columns are."""

    def __init__(self, name: str, call: Reward, weight: float = 1.0) -> None:
        self.name, self.weight = name, weight
        self.call: Any = call
        self._bound = call.keywords if isinstance(call, partial) else {}
        parameters = inspect.signature(call).parameters
        self.names = parameters.keys() - self._bound
        """Arguments that it may get."""
        several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        self.required = [name for name, p in parameters.items() if p.default is p.empty and p.kind not in several]
        """Arguments without a default."""
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.scores_one = "completion" in parameters and "completions" not in parameters
        self.is_async = any(inspect.iscoroutinefunction(one) for one in (call, cast(Any, call).__call__))
        """Whether its calls run while other functions are called."""
        self.isolated: Isolated | None = None
        """The process that it runs in, if it has one of its own."""
        self._unlogged: set[str] = set()
        """Columns of texts that it gave to ``log_extra``."""

    def close(self) -> None:
        """Free its resources."""
        if isinstance(self.call, RewardObject):
            self.call.close()
        if self.isolated is not None:
            self.isolated.close()

    def __call__(self, keywords: Mapping[str, Any], log_metric: LogMetric) -> Any:
        """Call it with the keywords that it takes; returns its result, or an error for each completion if its process was lost."""
        if self.isolated is not None:
            return self._call_isolated(self.isolated, keywords, log_metric)
        if self.scores_one:
            return self._one_by_one(keywords)
        keywords = {**keywords, "log_extra": partial(self._log_extra, log_metric), "log_metric": log_metric}
        taken = keywords.keys() - self._bound if self._takes_all else keywords.keys() & self.names
        return self.call(**{name: keywords[name] for name in taken})

    def _log_extra(self, log_metric: LogMetric, column: str, values: Iterable[Any]) -> None:
        """Log the mean of a column's numbers. TRL prints its texts in a table with the completions; texts are not kept here."""
        found = [float(value) for value in values if isinstance(value, SupportsFloat)]
        if found:
            log_metric(column, sum(found) / len(found))
        elif column not in self._unlogged:
            self._unlogged.add(column)
            log.warning(
                "reward %r: log_extra(%r, ...) has no numbers, and texts are not kept; fix: numbers, or a file of your own",
                self.name, column,
            )  # fmt: skip

    def _call_isolated(self, isolated: Isolated, keywords: Mapping[str, Any], log_metric: LogMetric) -> list[Score]:
        try:
            scores, logged = isolated({name: values for name, values in keywords.items() if name != "environments"})
        except processes.LostChildError as error:
            return [RewardError(f"reward {self.name!r} {error}")] * len(keywords["prompts"])
        for name, value in logged:
            log_metric(name, value)
        return list(scores)

    def call_here(self, keywords: Mapping[str, Any]) -> tuple[list[Score], list[tuple[str, float]]]:
        """Scores and logged metrics, in the process of its own."""
        logged: list[tuple[str, float]] = []
        result = self(keywords, lambda name, value: logged.append((name, float(value))))
        return numbers(self.name, awaited(result), len(keywords["prompts"])), logged

    def _one_by_one(self, keywords: Mapping[str, Any]) -> Any:
        """The score of each completion, from a function of one."""
        prompts = keywords["prompts"]
        columns = {key: values for key, values in keywords.items() if key not in ARGUMENTS or key == "completion_ids"}
        texts = [
            text if isinstance(text, str) else "".join(m["content"] for m in text if m["role"] == "assistant")
            for text in keywords["completions"]
        ]
        given = {"question": prompts} | columns | {"completion": texts, "prompt": prompts}
        names = [name for name in given if name in self.names or (self._takes_all and name not in self._bound)]
        rows = zip(*(given[name] for name in names), strict=True)
        scores = [self.call(**dict(zip(names, row, strict=True))) for row in rows]
        return _gather(scores) if self.is_async else scores


async def _gather(scores: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*scores)


def numbers(name: str, result: Any, count: int) -> list[Score]:
    """The scores of a function; a ``RewardError`` if there is not a number, None or a ``RewardError`` for each completion."""
    wrong = None
    try:
        values = [v if v is None or isinstance(v, RewardError) else float(v) for v in result]
        if len(values) == count and not isinstance(result, Mapping | Set | str | bytes):  # of keys or letters
            return values
    except (TypeError, ValueError, OverflowError) as error:
        wrong = error
    raise RewardError(
        f"reward {name!r} returned {result!r:.80}: {wrong or 'no list, or another number of scores'}; expected a list of {count} numbers, "
        "one for each completion (None where it does not apply); fix: its return"
    ) from wrong


LARGEST = 3.4e38
"""Largest number in float32; larger scores are as good as infinite."""
MAX_LOGGED = 100
"""Most metrics that reward functions log in an iteration, and most characters of a name."""
REWARDS: dict[str, Reward] = {}
"""Registered ones; a class is instantiated with the settings."""
_NESTED = {list, dict, set, tuple, np.ndarray}
"""Types of values that a function may change."""
NEVER_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that functions do not get."""


def register_reward(name: str) -> Callable[[Reward], Reward]:
    """Decorator: make a function available as ``RewardCfg(name=name)``.

    Settings (``kwargs``) are arguments of the function. A class is instantiated with them once; its objects are called.
    """
    return register("reward", REWARDS, name)


def make_reward(cfg: RewardCfg, given: Reward | None = None) -> RewardFunction:
    """The function that the settings describe, or that was ``given`` in Python.

    Raises:
        ConfigError: there is no such reward, or it does not take those settings.
    """
    if given is not None:
        function = given.func if isinstance(given, partial) else given
        name = function.__name__ if inspect.isroutine(function) else type(function).__name__
        return RewardFunction(name, given, cfg.weight)
    import groupwise.text.builtin_rewards  # noqa: F401  registers them

    return RewardFunction(cfg.name, make_registered("reward", REWARDS, cfg.name, cfg.kwargs), cfg.weight)


class TrainingState(NamedTuple):
    """Progress of training; functions get it as ``trainer_state``."""

    global_step: int = 0
    """Iterations so far."""
    max_steps: int = 0
    """Always 0, unlike in TRL."""
    epoch: float = 0.0


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
        self._metrics: dict[str, list[float]] = defaultdict(list)
        for name, function in zip(self.names, self.functions, strict=True):
            function.name = name
            if timeout is not None and not isinstance(function.call, RewardObject):  # which limits its time itself
                if "environments" in function.names:
                    raise ConfigError(f"reward {name!r} reads environments, which stay here; fix: no reward_timeout")
                function.isolated = Isolated(function.call_here, f"reward {name!r}", timeout)

    def check_columns(self, columns: Iterable[str], data: str = "data") -> None:
        """Refuse data that lack a column of a function, or have one with the name of an argument."""
        there = sorted(set(columns) - set(NEVER_COLUMNS))
        if taken := set(there) & set(ARGUMENTS):
            raise DataError(f"the {data} have a column {min(taken)!r}, an argument of every reward; fix: rename it")
        for function in self.functions:
            arguments = (*ARGUMENTS_OF_ONE, "completion_ids") if function.scores_one else ARGUMENTS
            needed = function.call.columns if isinstance(function.call, RewardObject) else function.required
            for column in needed:
                if column not in (*arguments, *there):
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
            RewardError: a function raises, does not return a number or None for each completion, or returns one that is not
                finite (``on_nonfinite``).
        """
        shared = {name: values for name, values in columns.items() if name not in NEVER_COLUMNS}
        lists = [p if isinstance(p, str) else [*p] for p in prompts]
        shared |= {"prompts": lists, "completions": completions, "completion_ids": completion_ids}
        results: dict[RewardFunction, Any] = {}
        try:
            for function in sorted(self.functions, key=lambda function: not function.is_async):
                # copies: what one function changes, others must not see
                own = {k: copy.deepcopy([*v]) if {*map(type, v)} & _NESTED else [*v] for k, v in shared.items()}
                with _blaming(function.name, completions):
                    result = function(own | {"trainer_state": state or TrainingState()}, self._log)
                    results[function] = in_loop(result) if inspect.iscoroutine(result) else result
            scores = [self._finish(function.name, results[function], completions) for function in self.functions]
        except BaseException:
            _cancel(results.values())
            raise
        rewards: list[float | None] = []
        for member in zip(*scores, strict=True):
            weighted = [w * value for w, value in zip(self.weights, member, strict=True) if isinstance(value, float)]
            failed = any(isinstance(score, RewardError) for score in member)
            rewards.append(sum(weighted) if weighted and not failed else None)
        parts = tuple(tuple(score if isinstance(score, float) else None for score in part) for part in scores)
        return Scores(tuple(rewards), parts)

    def _log(self, name: str, value: Any) -> None:
        if (name not in self._metrics and len(self._metrics) == MAX_LOGGED) or len(name) > MAX_LOGGED:
            raise ValueError(
                f"log_metric and log_extra take at most {MAX_LOGGED} names, of at most {MAX_LOGGED} characters; got {name!r:.100}, "
                f"of {len(name):,} characters, after {len(self._metrics)} others; write more to a file of your own"
            )
        self._metrics[name].append(float(value))

    def _finish(self, name: str, result: Any, completions: Sequence[Completion]) -> list[Score]:
        """The scores of a function. Failed ones are logged, those that are not finite replaced."""
        with _blaming(name, completions):
            result = result.result() if isinstance(result, Future) else result
        scores = numbers(name, result, len(completions))
        if failures := [score for score in scores if isinstance(score, RewardError)]:
            log.warning("reward %r failed for %d of %d completions: %s", name, len(failures), len(scores), failures[0])
        if bad := [place for place, one in enumerate(scores) if isinstance(one, float) and not abs(one) <= LARGEST]:
            self._replace_nonfinite(name, scores, bad)
        return scores

    def _replace_nonfinite(self, name: str, scores: list[Score], bad: Sequence[int]) -> None:
        """Replace the scores at these places, as ``on_nonfinite`` says."""
        what = f"reward {name!r} is {scores[bad[0]]} for completion {bad[0]} of {len(scores)}"
        if self.on_nonfinite == "stop":
            raise RewardError(
                f"{what}; fix: a finite number, or None for what it cannot score; or algorithm.on_nonfinite='drop'"
            )
        log.warning("%s (%d in all); on_nonfinite=%r", what, len(bad), self.on_nonfinite)
        for place in bad:
            scores[place] = 0.0 if self.on_nonfinite == "zero" else None

    def take_logged(self) -> dict[str, float]:
        """Means of the values that functions logged with ``log_metric(name, value)`` since the last call."""
        logged = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics.clear()
        return logged

    def close(self) -> None:
        """Close the reward objects, and end the processes."""
        for function in self.functions:
            function.close()


@contextmanager
def _blaming(name: str, completions: Sequence[Completion]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _blame(name, error, completions)


def _blame(name: str, error: Exception, completions: Sequence[Completion]) -> NoReturn:
    """Raise the error with the function's name, unless it is a ``ConfigError`` or its process did not start."""
    if isinstance(error, ConfigError):
        raise error
    raise RewardError(
        f"reward {name!r} raised {type(error).__name__}: {error}; fix: {_fix(error, completions)}"
    ) from error


def _cancel(results: Iterable[Any]) -> None:
    """End async calls: a judge is not paid for answers that nobody reads."""
    for result in results:
        if isinstance(result, Future):
            result.cancel()


def _fix(error: Exception, completions: Sequence[Completion]) -> str:
    if isinstance(error, AttributeError | TypeError) and not isinstance(completions[0], str):
        return "read completion[0]['content'], as after prompts of messages a completion is a list of messages"
    return "the function (it may return None for what it cannot score)"
