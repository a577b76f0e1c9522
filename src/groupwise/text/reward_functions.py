"""Functions of TRL's signature: their registry, their arguments, and the columns that they need."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from groupwise.config.text import RewardCfg
from groupwise.errors import UnknownNameError
from groupwise.text.registered import check_settings, register

Reward = Callable[..., Any]
"""Maps keywords to a sequence of numbers or None, sync or async."""
REWARDS: dict[str, Reward] = {}
"""Registered ones; a class is instantiated with the settings."""
ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Arguments of every function; no column may have such a name."""


class RewardFunction(NamedTuple):
    """A function and how it is called."""

    name: str
    call: Any
    """A ``Reward``, perhaps a ``RewardObject``."""
    weight: float = 1.0
    settings: frozenset[str] = frozenset()
    """Arguments that are bound already; columns of these names are not passed."""

    def accepted(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """The keywords that the function takes."""
        named = inspect.signature(self.call).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in named.values())
        return {k: v for k, v in keywords.items() if k not in self.settings and (anything or k in named)}

    def needed_columns(self) -> list[str]:
        """Columns without which it cannot be called."""
        if isinstance(self.call, RewardObject):
            return [*self.call.columns]
        named = inspect.signature(self.call).parameters.values()
        keywords = [p for p in named if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty]
        return [p.name for p in keywords if p.name not in {*ARGUMENTS, *self.settings}]


class RewardObject:
    """Base class of rewards that read columns named by their settings, or hold resources until the run ends."""

    columns: tuple[str, ...] = ()
    """Columns that every example must have."""

    def close(self) -> None:
        """Free its resources."""


def register_reward(name: str) -> Callable[[Reward], Reward]:
    """Decorator: make a function available as ``RewardCfg(name=name)``.

    Settings (``kwargs``) are arguments of the function. A class is instantiated with them once; its objects are called.

    Raises:
        ConfigError: the name is taken.
    """
    return register("reward", REWARDS, name)


def make_reward(cfg: RewardCfg, given: Reward | None = None) -> RewardFunction:
    """The function that the settings describe.

    Args:
        given: the function itself, if it was given in Python.

    Raises:
        UnknownNameError: no such reward.
        ConfigError: it does not take those settings.
    """
    if given is not None:
        function = _unwrapped(given)
        named = inspect.isroutine(function) or inspect.isclass(function)
        return RewardFunction(function.__name__ if named else type(function).__name__, given, cfg.weight)
    import groupwise.text.builtin_rewards  # noqa: F401  registers them

    if cfg.name not in REWARDS:
        raise UnknownNameError("reward", cfg.name, REWARDS)
    reward = REWARDS[cfg.name]
    is_class = inspect.isclass(reward)
    # missing arguments of a function are columns
    check_settings(f"reward {cfg.name!r}", reward, cfg.kwargs, others=ARGUMENTS, complete=is_class)
    if is_class:
        return RewardFunction(cfg.name, reward(**cfg.kwargs), cfg.weight)
    return RewardFunction(cfg.name, functools.partial(reward, **cfg.kwargs), cfg.weight, frozenset(cfg.kwargs))


def is_async(function: Reward) -> bool:
    """Whether a call returns a coroutine: of functions, partial functions and callable objects."""
    function = _unwrapped(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function
