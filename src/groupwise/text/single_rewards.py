"""Rewards of one completion at a time, such as AgileRL's ``reward(completion, answer, question) -> float``."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from groupwise.text.data import Completion

_OWN = ("completion", "prompt", "question")
"""Parameters that are no columns, or need not be."""


def scores_one(reward: Callable[..., Any]) -> bool:
    """Whether the function scores one completion: it has a parameter ``completion``, and none named ``completions``."""
    named = inspect.signature(reward).parameters
    return "completion" in named and "completions" not in named


class SingleReward:
    """A reward of all completions from a function of one.

    The function gets by name: ``completion``, the text; ``prompt``; ``question``, the column or else the prompt; columns.

    Args:
        settings: further arguments of the function; columns of these names are not passed.
    """

    def __init__(self, function: Callable[..., Any], settings: Mapping[str, Any] | None = None) -> None:
        self.function, self.settings = function, dict(settings or {})
        self._named = dict(inspect.signature(function).parameters)
        keyword = inspect.Parameter.KEYWORD_ONLY
        given = [inspect.Parameter(name, keyword) for name in ("prompts", "completions")]
        columns = [p.replace(kind=keyword) for name, p in self._named.items() if self._is_column(name)]
        question = [inspect.Parameter("question", keyword, default=None)] if "question" in self._named else []
        self.__signature__ = inspect.Signature([*given, *columns, *question])

    def __call__(
        self, *, prompts: Sequence[Completion], completions: Sequence[Completion], **columns: Sequence[Any] | None
    ) -> "list[Any] | Awaitable[list[Any]]":
        """The score of each completion."""
        values = {name: value for name, value in columns.items() if value is not None}
        texts = {"completion": list(map(_text, completions)), "prompt": prompts, "question": prompts}
        given = {name: value for name, value in (texts | values).items() if name in self._named}
        rows = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
        scores = [self.function(**row, **self.settings) for row in rows]
        return _all(scores) if any(map(inspect.iscoroutine, scores)) else scores

    def _is_column(self, name: str) -> bool:
        variable = self._named[name].kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        return not variable and name not in _OWN and name not in self.settings


async def _all(scores: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*map(_value, scores))


async def _value(score: Any) -> Any:
    return await score if inspect.isawaitable(score) else score


def _text(completion: Completion) -> str:
    """The completion as text: of messages, what the model wrote."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion if message["role"] == "assistant")
