"""Scores of completions: functions of TRL's signature, weighted, with a time limit each.

A function is called with keywords, ``reward(prompts=..., completions=..., completion_ids=..., trainer_state=...,
log_extra=..., log_metric=..., **columns)``, once for all completions, and returns a score for each; None where it does
not apply. One without ``**kwargs`` gets what it names.

Source: the signature is that of TRL 1.16's ``GRPOTrainer``.
"""

import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from groupwise.errors import ConfigError, DataError, RewardError, nearest
from groupwise.text.calls import Calls, CallTimeoutError, Function
from groupwise.text.data import Completion, Prompt
from groupwise.text.files import short
from groupwise.text.reward_functions import RewardFunction, RewardObject, needed_columns, parameters

NEVER_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that functions do not get."""
OnError = Literal["fail", "skip", "zero"]
_Said = tuple[list[float | None], set[int]]
"""Scores of one function, and which completions it failed on."""


class TrainingState(NamedTuple):
    """How far training is; functions get it as ``trainer_state``."""

    global_step: int = 0
    """Iterations so far."""
    max_steps: int = 0
    """As in TRL; always 0, because a run's length is counted in tokens."""
    epoch: float = 0.0
    """Of the data."""


class Scores(NamedTuple):
    """Of each completion."""

    reward: tuple[float | None, ...]
    """Weighted sum of what the functions say. None: none of them says anything, so that the completion is unscorable."""
    parts: tuple[tuple[float | None, ...], ...]
    """What each function says, unweighted. None: it does not apply."""


class RewardSet:
    """Functions whose weighted scores add up.

    Args:
        on_error: what follows when a function raises or takes too long: an error; its completions have no reward; or
            it says 0 of them. Those are the completions on which alone it raises, else all.
    """

    def __init__(self, functions: Sequence[RewardFunction], on_error: OnError = "fail") -> None:
        if not functions:
            raise ConfigError(
                "no reward says what a completion is worth; fix: reward=my_function, or a registered name"
            )
        self.functions = tuple(functions)
        self.names = _distinct([function.name for function in functions])
        self.weights = tuple(function.weight for function in functions)
        self._on_error = on_error
        self._calls = Calls()
        self._metrics: dict[str, list[float]] = {}

    def check_columns(self, columns: Iterable[str], data: str = "data") -> None:
        """Refuse data that lack what a function needs.

        Raises:
            DataError: names the function, the column and those there are.
        """
        there = sorted(set(columns) - set(NEVER_COLUMNS))
        for name, function in zip(self.names, self.functions, strict=True):
            for column in needed_columns(function):
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
        """What the completions are worth.

        Args:
            prompts: of each completion, as the data have it; where it is messages, functions get the completion as
                ``[{"role": "assistant", "content": ...}]``.
            completions: texts; of a prompt of messages, a text is made a message, and several turns are messages already.
            columns: by name, a value for each completion.

        Raises:
            RewardError: a function raises or takes too long and ``on_error="fail"``, or does not return a number or
                None for each completion. Names function, prompt and completion.
        """
        batch = _Batch(prompts, completions, completion_ids, columns, state or TrainingState())
        waiting = [self._start(function, batch) for function in self.functions]
        said = [
            self._finish(name, function, batch, wait)
            for name, function, wait in zip(self.names, self.functions, waiting, strict=True)
        ]
        lost = {number for _, failed in said for number in failed} if self._on_error == "skip" else set()
        parts = tuple(tuple(values) for values, _ in said)
        members = zip(*parts, strict=True)
        sums = tuple(None if number in lost else self._sum(member) for number, member in enumerate(members))
        return Scores(sums, parts)

    def take_logged(self) -> dict[str, float]:
        """Averages of what functions gave ``log_metric(name, value)`` since the last time."""
        logged = {name: sum(values) / len(values) for name, values in self._metrics.items()}
        self._metrics.clear()
        return logged

    def close(self) -> None:
        """End what functions run in, and those that are objects with something to end."""
        self._calls.close()
        for function in self.functions:
            if isinstance(function.call, RewardObject):
                function.call.close()

    def _start(self, function: RewardFunction, batch: "_Batch") -> Callable[[], Any]:
        arguments = batch.arguments(function, self._log_metric)
        return self._calls.start(function.call, arguments, function.timeout)

    def _again(self, function: RewardFunction, batch: "_Batch", limit: float | None) -> Any:
        """What the function returns when it is asked about fewer completions; what it logs then is lost."""
        return self._calls.start(function.call, batch.arguments(function, _discard), limit)()

    def _finish(self, name: str, function: RewardFunction, batch: "_Batch", wait: Callable[[], Any]) -> _Said:
        try:
            result = wait()
        except CallTimeoutError as error:
            if self._on_error == "fail":
                raise _too_slow(name, function, batch) from error
            return self._failed(name, batch, range(len(batch)), f"took more than {function.timeout:g} s")
        except Exception as error:
            return self._without_culprits(name, function, batch, error)
        return _numbers(name, result, len(batch)), set()

    def _without_culprits(self, name: str, function: RewardFunction, batch: "_Batch", error: Exception) -> _Said:
        """Scores of the completions on which the function does not fail when it gets them alone, scored together."""
        culprits = {0: error} if len(batch) == 1 else self._culprits(function, batch)
        if self._on_error == "fail":
            number, cause = next(iter(culprits.items()), (0, error))
            raise _raised(name, batch, number, cause) from cause
        good = [number for number in range(len(batch)) if number not in culprits]
        try:
            result = self._again(function, batch.rows(good), function.timeout) if good else []
        except Exception:  # it fails on whatever it gets: a failure on all of them, which is reported below
            good, result = [], []
        values = dict(zip(good, _numbers(name, result, len(good)), strict=True))
        lost = [number for number in range(len(batch)) if number not in values]
        said, failed = self._failed(name, batch, lost, f"raised {type(error).__name__}: {error}")
        return [values.get(number, said[number]) for number in range(len(batch))], failed

    def _culprits(self, function: RewardFunction, batch: "_Batch") -> dict[int, Exception]:
        """Completions on which alone the function raises, within its limit for all; the first only, if that ends the run."""
        culprits: dict[int, Exception] = {}
        ends = math.inf if function.timeout is None else time.monotonic() + function.timeout
        for number in range(len(batch)):
            if time.monotonic() >= ends:
                return culprits | {late: CallTimeoutError() for late in range(number, len(batch))}
            try:
                left = None if function.timeout is None else ends - time.monotonic()
                self._again(function, batch.rows([number]), left)
            except Exception as error:
                culprits[number] = error
                if self._on_error == "fail":
                    break
        return culprits

    def _failed(self, name: str, batch: "_Batch", numbers: Iterable[int], why: str) -> _Said:
        failed = set(numbers)
        value = 0.0 if self._on_error == "zero" else None
        if failed:
            effect = "score 0" if self._on_error == "zero" else "have no reward"
            warnings.warn(f"reward {name!r} {why}; {len(failed)} of {len(batch)} completions {effect}", stacklevel=2)
        return [value] * len(batch), failed

    def _sum(self, member: Sequence[float | None]) -> float | None:
        said = [weight * value for weight, value in zip(self.weights, member, strict=True) if value is not None]
        return sum(said) if said else None

    def _log_metric(self, name: str, value: Any) -> None:
        self._metrics.setdefault(name, []).append(float(value))


@dataclass(frozen=True)
class _Batch:
    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    completion_ids: Sequence[Sequence[int]]
    columns: Mapping[str, Sequence[Any]]
    state: TrainingState

    def __len__(self) -> int:
        return len(self.prompts)

    def arguments(self, function: RewardFunction, log_metric: Function) -> dict[str, Any]:
        """Those that the function takes; lists of its own, which it may change."""
        arguments: dict[str, Any] = {
            "prompts": [p if isinstance(p, str) else [dict(message) for message in p] for p in self.prompts],
            "completions": [self._completion(number) for number in range(len(self.completions))],
            "completion_ids": [list(ids) for ids in self.completion_ids],
            "trainer_state": self.state,
            "log_extra": _discard,  # TRL prints such columns
            "log_metric": log_metric,
        }
        columns = {name: list(values) for name, values in self.columns.items() if name not in NEVER_COLUMNS}
        named = parameters(function)
        return {
            name: value
            for name, value in (columns | arguments).items()
            if name not in function.settings and (named is None or name in named)
        }

    def rows(self, numbers: Sequence[int]) -> "_Batch":
        def pick(values: Sequence[Any]) -> list[Any]:
            return [values[number] for number in numbers]

        columns = {name: pick(values) for name, values in self.columns.items()}
        return _Batch(pick(self.prompts), pick(self.completions), pick(self.completion_ids), columns, self.state)

    def _completion(self, number: int) -> Completion:
        said = self.completions[number]
        if not isinstance(said, str):
            return [dict(message) for message in said]
        return said if isinstance(self.prompts[number], str) else [{"role": "assistant", "content": said}]


def _numbers(name: str, result: Any, count: int) -> list[float | None]:
    """The scores as numbers; None for those that are none or not finite."""
    if inspect.iscoroutine(result):
        result.close()
        raise RewardError(f"reward {name!r} returned a coroutine; fix: define it with async def")
    if isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable):
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
    if value is None:
        return None
    try:
        score = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError):
        score = None
    if score is None or isinstance(value, (str, bytes)):
        raise RewardError(
            f"reward {name!r} returned {short(value)} for completion {number}; expected a number or None; fix: its return"
        )
    return score if math.isfinite(score) else None


def _raised(name: str, batch: _Batch, number: int, error: Exception) -> RewardError:
    fix = "on_reward_error='skip', which leaves such completions out"
    if "main thread" in str(error):
        fix = "timeout=None for it, so that it runs in the main thread, which it asks for"
    said = "took too long" if isinstance(error, CallTimeoutError) else f"raised {type(error).__name__}: {error}"
    return RewardError(
        f"reward {name!r} {said}\n  prompt: {_beginning(batch.prompts[number])}\n  completion: "
        f"{_beginning(batch.completions[number])}\nfix: the function, or {fix}"
    )


def _too_slow(name: str, function: RewardFunction, batch: _Batch) -> RewardError:
    return RewardError(
        f"reward {name!r} took more than its limit of {function.timeout:g} s for {len(batch)} completions\n  the first prompt: "
        f"{_beginning(batch.prompts[0])}\n  its completion: {_beginning(batch.completions[0])}\nfix: the function, "
        "a larger timeout, or on_reward_error='skip', which leaves them out"
    )


def _beginning(text: object) -> str:
    said = repr(text)
    return said if len(said) <= 500 else f"{said[:500]}... ({len(said)} characters)"


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Names with a number where one comes again."""
    return tuple(
        name if name not in names[:place] else f"{name}_{names[:place].count(name) + 1}"
        for place, name in enumerate(names)
    )


def _discard(*_: object) -> None: ...
