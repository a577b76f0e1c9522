"""Scores of completions: functions of TRL's signature, weighted.

One call for all completions, ``reward(prompts=..., completions=..., completion_ids=..., trainer_state=..., log_extra=...,
log_metric=..., **columns)``, returns a score for each, None where it does not apply. A function without ``**kwargs`` gets
the arguments that it names.

Source: the signature is that of TRL 1.16's ``GRPOTrainer``.
"""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from groupwise.errors import ConfigError, DataError, RewardError, nearest
from groupwise.text.data import Completion, Prompt
from groupwise.text.files import short
from groupwise.text.reward_functions import RewardFunction, RewardObject, is_async

NEVER_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that functions do not get."""


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
    """Weighted sum of the functions' scores. None: the completion is unscorable, because no function has a score."""
    parts: tuple[tuple[float | None, ...], ...]
    """Score of each function, unweighted. None: it does not apply."""


class RewardSet:
    """Functions whose weighted scores add up."""

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        if not functions:
            raise ConfigError("there is no reward; fix: reward=my_function, or a registered name")
        self.functions = tuple(functions)
        self.names = _distinct([function.name for function in functions])
        self.weights = tuple(function.weight for function in functions)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._metrics: dict[str, list[float]] = {}

    def check_columns(self, columns: Iterable[str], data: str = "data") -> None:
        """Refuse data that lack a column of a function.

        Raises:
            DataError: names the function, the column and those there are.
        """
        there = sorted(set(columns) - set(NEVER_COLUMNS))
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
            RewardError: a function raises, or does not return a number or None for each completion.
        """
        keywords = {name: list(values) for name, values in columns.items() if name not in NEVER_COLUMNS} | {
            "prompts": [p if isinstance(p, str) else [dict(message) for message in p] for p in prompts],
            "completions": list(completions),
            "completion_ids": [list(ids) for ids in completion_ids],
            "trainer_state": state or TrainingState(),
            "log_extra": _discard,  # TRL prints such columns
            "log_metric": self._log_metric,
        }
        results = self._results([partial(f.call, **f.accepted(keywords)) for f in self.functions])
        parts = [_numbers(name, result, len(prompts)) for name, result in zip(self.names, results, strict=True)]
        return Scores(tuple(map(self._sum, zip(*parts, strict=True))), tuple(map(tuple, parts)))

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

    def _results(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """The result of each call; async ones run at the same time, while the others do."""
        started = [
            asyncio.run_coroutine_threadsafe(_await(call), self._running_loop()).result if is_async(call) else call
            for call in calls
        ]
        return [_result(name, call) for name, call in zip(self.names, started, strict=True)]

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        """One loop for all calls, as async clients are bound to it; in a thread, as notebooks run their own loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), daemon=True, name="rewards").start()
        return self._loop

    def _sum(self, member: Sequence[float | None]) -> float | None:
        weighted = [weight * value for weight, value in zip(self.weights, member, strict=True) if value is not None]
        return sum(weighted) if weighted else None

    def _log_metric(self, name: str, value: Any) -> None:
        self._metrics.setdefault(name, []).append(float(value))


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


async def _await(call: Callable[[], Any]) -> Any:
    return await call()


def _result(name: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        raise RewardError(
            f"reward {name!r} raised {type(error).__name__}: {error}; fix: the function (it may return None for what it "
            "cannot score)"
        ) from error


def _numbers(name: str, result: Any, count: int) -> list[float | None]:
    """The scores of a function; None for those that are None or not finite."""
    if inspect.iscoroutine(result):
        result.close()
        raise RewardError(f"reward {name!r} returned a coroutine; fix: define it with async def")
    if not isinstance(result, Iterable):
        raise RewardError(
            f"reward {name!r} returned {short(result)}; expected a list of {count} numbers, one for each completion; fix: its return"
        )
    values = list(result)
    if len(values) != count:
        raise RewardError(
            f"reward {name!r} returned {len(values)} scores for {count} completions; fix: one for each, None where it "
            "does not apply"
        )
    return [_number(name, number, value) for number, value in enumerate(values)]


def _number(name: str, number: int, value: Any) -> float | None:
    try:
        score = math.nan if value is None else float(value)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward {name!r} returned {short(value)} for completion {number}; expected a number or None; fix: its return"
        ) from error
    return score if math.isfinite(score) else None


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with numbers behind repeated ones."""
    return tuple(
        name if name not in names[:place] else f"{name}_{names[:place].count(name) + 1}"
        for place, name in enumerate(names)
    )


def _discard(*_: object) -> None: ...
