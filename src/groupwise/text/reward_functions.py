"""Functions of TRL's signature: where they come from, what they take and what the data must have for them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from groupwise.config.text import RewardCfg
from groupwise.errors import ConfigError, UnknownNameError, nearest

Reward = Callable[..., Any]
"""Maps keywords to a sequence of numbers or None, sync or async."""
REWARDS: dict[str, Reward] = {}
"""Registered ones; of a class, an object is made with the settings."""
ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What every function can take; no column may have such a name."""


class RewardFunction(NamedTuple):
    """A function and how it is called."""

    name: str
    call: Any
    """A ``Reward``, perhaps a ``RewardObject``."""
    weight: float = 1.0
    settings: frozenset[str] = frozenset()
    """Arguments that are bound already, whatever columns there are."""

    def accepted(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Those of the keywords that the function takes."""
        try:
            named = inspect.signature(self.call).parameters
        except ValueError:  # it is written in C and does not say
            return keywords
        anything = any(p.kind is p.VAR_KEYWORD for p in named.values())
        return {k: v for k, v in keywords.items() if k not in self.settings and (anything or k in named)}


class RewardObject:
    """Base of rewards that are objects, read columns which their settings name, or hold what ends with the run."""

    columns: tuple[str, ...] = ()
    """Those that every example must have."""

    def close(self) -> None:
        """End what it holds."""


def register_reward(name: str) -> Callable[[Reward], Reward]:
    """Decorator: make a function available as ``RewardCfg(name=name)``.

    Settings (``kwargs``) are arguments of the function. Of a class, they are those of its constructor, which is called
    once, so that mistakes in them show at the start; its objects are called.

    Raises:
        ConfigError: the name is taken.
    """

    def register(reward: Reward) -> Reward:
        if name in REWARDS:
            raise ConfigError(f"reward {name!r} is registered already; fix: choose another name")
        REWARDS[name] = reward
        return reward

    return register


def make_reward(cfg: RewardCfg, given: Reward | None = None) -> RewardFunction:
    """The function that the settings describe.

    Args:
        given: the function itself, which was passed in.

    Raises:
        UnknownNameError: nobody registered it.
        ConfigError: it does not take those settings.
    """
    if given is not None:
        return RewardFunction(_name(given), given, cfg.weight)
    import groupwise.text.builtin_rewards  # noqa: F401  registers them

    if cfg.name not in REWARDS:
        raise UnknownNameError("reward", cfg.name, REWARDS)
    reward = REWARDS[cfg.name]
    _check_settings(cfg, reward)
    if inspect.isclass(reward):
        return RewardFunction(cfg.name, reward(**cfg.kwargs), cfg.weight)
    call = functools.partial(reward, **cfg.kwargs)
    return RewardFunction(cfg.name, call, cfg.weight, frozenset(cfg.kwargs))


def is_async(function: Reward) -> bool:
    """Whether a call returns a coroutine: of functions, partial functions and objects that are called."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def needed_columns(function: RewardFunction) -> list[str]:
    """Columns without which it cannot be called."""
    if isinstance(function.call, RewardObject):
        return [*function.call.columns]
    try:
        named = inspect.signature(function.call).parameters.values()
    except ValueError:
        return []
    keywords = [p for p in named if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.default is p.empty]
    return [p.name for p in keywords if p.name not in {*ARGUMENTS, *function.settings}]


def _check_settings(cfg: RewardCfg, reward: Reward) -> None:
    """Refuse settings that it does not have, that are of a wrong type, or that are missing."""
    named = inspect.signature(reward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in named.values())
    known = [p.name for p in named.values() if p.kind is not p.VAR_KEYWORD and p.name not in ARGUMENTS]
    for key in cfg.kwargs:
        if key not in known and not anything:
            raise ConfigError(
                f"reward {cfg.name!r} has no setting {key!r}{nearest(key, known) or '; known: ' + ', '.join(known)}"
            )
    if inspect.isclass(reward):  # of a function, what is missing are columns
        missing = [name for name in known if named[name].default is inspect.Parameter.empty and name not in cfg.kwargs]
        if missing:
            raise ConfigError(
                f"reward {cfg.name!r} needs the setting {missing[0]!r}; fix: kwargs={{{missing[0]!r}: ...}}"
            )
    hints = get_type_hints(reward.__init__ if inspect.isclass(reward) else reward)
    for key in cfg.kwargs.keys() & hints.keys():
        _check_type(f"reward {cfg.name!r}: {key}", cfg.kwargs[key], hints[key])


def _check_type(what: str, value: object, hint: Any) -> None:
    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except PydanticSchemaGenerationError:  # a type that only its owner can check
        return
    except ValidationError as error:
        said = error.errors()[0]["msg"]
        raise ConfigError(f"{what} = {value!r}: {said[0].lower()}{said[1:]}; fix: kwargs") from error


def _name(function: Reward) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    named = inspect.isroutine(function) or inspect.isclass(function)
    return str(function.__name__) if named else type(function).__name__
