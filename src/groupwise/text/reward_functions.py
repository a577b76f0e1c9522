"""One reward function: its arguments, the columns that it needs, and the process that it may run in."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from groupwise.errors import RewardError
from groupwise.text.data import Completion
from groupwise.text.isolated import Isolated, LostCallError

Reward = Callable[..., Any]
"""Maps keywords to a sequence of numbers or None, sync or async."""
Score: TypeAlias = float | RewardError | None
"""None: the reward does not apply. An error: it failed, and the completion gets no reward."""
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
        """What it returns for those of the keywords that it takes; an error for each completion if its process was lost."""
        if self.isolated is not None:
            return self._from_process(self.isolated, keywords, log_metric)
        if self._scores_one:
            return self._one_by_one(keywords)
        keywords = {**keywords, "log_extra": _ignore, "log_metric": log_metric}
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

    def _from_process(self, isolated: Isolated, keywords: Mapping[str, Any], log_metric: LogMetric) -> Any:
        try:
            scores, logged = isolated(keywords)
        except LostCallError as error:
            return [RewardError(str(error))] * len(keywords["prompts"])
        for name, value in logged:
            log_metric(name, value)
        return scores


async def _awaited(scores: Sequence[Any]) -> list[Any]:
    """The scores, some of which are coroutines that run at the same time."""
    results = iter(await asyncio.gather(*filter(inspect.isawaitable, scores)))
    return [next(results) if inspect.isawaitable(score) else score for score in scores]


class RemoteReward:
    """A reward function in the process of its own: returns its scores and what it logged."""

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
    """A completion as a text; of several messages, what the model wrote."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion if message["role"] == "assistant")


def _ignore(*_: Any) -> None:
    """TRL prints the columns of ``log_extra``."""
