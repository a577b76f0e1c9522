"""Environments made of tools: functions, classes as TRL's ``environment_factory`` takes them, and a ``Tool`` of the text."""

import copy
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import ValidationError, validate_call

from groupwise.config.base import GIVEN
from groupwise.config.run import OF_CALLS, TextTaskCfg
from groupwise.errors import ConfigError, EnvError, GroupwiseError, UnknownNameError, require_extra
from groupwise.plugins import TEXT_ENVS, TEXT_GAMES
from groupwise.text.calls import Call, Schema, read_calls
from groupwise.text.envs import Makes, Observation, TextEnv, read_observation
from groupwise.text.rewards import Message, Prompt, awaited, make_registered
from groupwise.text.task import TextTask
from groupwise.text.tools import TOOLS, AnyTool, IsolatedTool, Tool, ask, make_tool

# Tools


class Tools(ABC):
    """Tools that keep something over an episode, so that each member of a group has a copy of its own."""

    @abstractmethod
    def begin(self, seed: int) -> None:
        """Begin an episode."""

    @abstractmethod
    def tools(self) -> Sequence["BoundTool"]:
        """The tools of the episode that began."""

    def close(self) -> None:  # noqa: B027  there may be nothing to free
        """Free what they hold."""


class BoundTool(NamedTuple):
    """A tool that is ready to be called."""

    schema: Schema
    call: Callable[..., Any]
    """Takes the arguments by name; a coroutine function is awaited. ``ValidationError``: arguments that do not fit."""

    @property
    def name(self) -> str:
        """Name by which the model calls it."""
        name: str = self.schema["function"]["name"]
        return name


def bound_tool(function: Callable[..., Any]) -> BoundTool:
    """A tool from a function's name, type hints and docstring (Google's style, with ``Args:``).

    Raises:
        ConfigError: it has no docstring, or an argument no type hint.
    """
    require_extra("transformers", "text")
    from transformers.utils import get_json_schema

    name = getattr(function, "__name__", repr(function))
    try:
        schema: Schema = get_json_schema(function)
        checked: Callable[..., Any] = validate_call(config={"arbitrary_types_allowed": True})(function)
    except Exception as error:
        raise ConfigError(
            f"the tool {name} cannot be described to a model: {error}; fix: a type hint for each argument, and a docstring that "
            "describes each under Args:"
        ) from error
    return BoundTool(schema, checked)


# Environments


class ToolEnv(TextEnv):
    """An episode with tools: the model's turn calls them, and reads their results; a turn without a call ends it.

    Args:
        made: an object as TRL's ``environment_factory`` has it: ``reset(**row)`` returns a text or None, ``get_reward()`` the reward,
            and its other public methods are tools. None: there are functions only.
        tools: functions, sync or async, and ``Tools``.
        prompt_column: of the row; the observation of ``reset`` is added to its last message.
        max_parse_errors: turns in a row whose calls cannot be read or have wrong arguments, after which the episode ends.
        max_tool_calls: most calls of an episode.
        on_tool_error: ``tell`` the model the error that a tool raises, or ``raise`` it.
    """

    def __init__(
        self,
        made: Any = None,
        tools: Sequence[Any] = (),
        *,
        prompt_column: str = "prompt",
        max_parse_errors: int = 3,
        max_tool_calls: int | None = None,
        on_tool_error: Literal["tell", "raise"] = "tell",
    ) -> None:
        self.made, self._given = made, [copy.copy(tool) if isinstance(tool, Tools) else tool for tool in tools]
        self._column, self._most_errors, self._most_calls = prompt_column, max_parse_errors, max_tool_calls
        self._on_error: Literal["tell", "raise"] = on_tool_error
        self._errors = self._calls = 0
        static = [] if made is None else inspect.getmembers_static(made)  # a property may need a reset first
        names = [name for name, one in static if callable(one) or isinstance(one, classmethod)]
        methods = [one for name in names if inspect.ismethod(one := getattr(made, name))]
        if made is not None and not callable(getattr(made, "reset", None)):
            raise ConfigError(
                f"{type(made).__name__} has no method reset; fix: a gw.TextEnv, or reset(**row) as for TRL's environment_factory"
            )
        own = [one for one in methods if not one.__name__.startswith("_") and one.__name__ not in _NO_TOOLS]
        functions = [tool for tool in tools if not isinstance(tool, Tools)]
        self._fixed = [bound_tool(one) for one in (*own, *functions)]
        self._tools = _by_name(self._fixed)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ToolEnv":
        """An episode that goes on by itself: its tools are methods of the copy."""
        limits = {"max_parse_errors": self._most_errors, "max_tool_calls": self._most_calls}
        tools = [copy.deepcopy(tool, memo) if isinstance(tool, Tools) else tool for tool in self._given]
        made = copy.deepcopy(self.made, memo)
        copied = ToolEnv(made, tools, prompt_column=self._column, on_tool_error=self._on_error, **limits)  # type: ignore[arg-type]
        copied._errors, copied._calls = self._errors, self._calls
        copied._bind()
        return copied

    def _bind(self) -> None:
        several = [tool for one in self._given if isinstance(one, Tools) for tool in one.tools()]
        self._tools = _by_name([*self._fixed, *several])

    @property
    def tools(self) -> Sequence[Schema]:  # type: ignore[override]
        """Schemas of the tools."""
        return [tool.schema for tool in self._tools.values()]

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Prompt, dict[str, Any]]:
        """Begin an episode with a row of the data."""
        row, self._errors, self._calls = dict(options or {}), 0, 0
        for several in self._given:
            if isinstance(several, Tools):
                several.begin(seed or 0)
        self._bind()
        prompt, observation = row.get(self._column), None
        if prompt is not None:
            prompt = read_observation(f"the column {self._column!r}", prompt)
        if self.made is not None:
            observation = awaited(self.made.reset(**row))
        parts = observation if isinstance(observation, list) else []
        if prompt is None and parts and all(isinstance(part, Mapping) and "role" in part for part in parts):
            observation = tuple(parts)  # messages
        elif isinstance(observation, list):
            found = [part.get("text") if isinstance(part, Mapping) else None for part in observation]
            blocks = [text for text in found if isinstance(text, str)]
            if len(blocks) < len(found):
                raise EnvError(
                    f"reset() returned {observation!r:.80}; expected a text, blocks of text or None; fix: a text, without images"
                )
            observation = "".join(blocks)
        if prompt is None and observation is None:
            raise EnvError(f"no prompt: the data have no column {self._column!r}, reset() returned None; fix: give one")
        if prompt is None or observation is None:
            return (observation or "") if prompt is None else prompt, {}
        if isinstance(prompt, str):
            return f"{prompt}{observation}", {}
        *before, last = prompt
        return (*before, {**last, "content": f"{last['content']}{observation}"}), {}

    def step(self, text: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Run the calls of a turn, in their order; the observation is their results."""
        _, calls = read_calls(text)
        if not calls:
            return "", 0.0, True, False, {"ending": "no_call"}
        counts = {"tool_calls": 0, "tool_errors": 0, "parse_errors": 0}
        results, info = list[Message](), {"counts": counts}
        for call in calls:
            if self._most_calls is not None and self._calls == self._most_calls:
                return results, 0.0, False, True, info | {"ending": "max_tool_calls"}
            # templates render a name as it is, so one that the model has invented is left out
            name = call.name if isinstance(call, Call) and call.name in self._tools else ""
            result, kind = self._run(call)
            counts[kind] += 1
            counts["tool_calls"] += kind == "tool_errors"
            self._calls += kind != "parse_errors"
            results.append({"role": "tool", "name": name, "content": result})
        self._errors = self._errors + 1 if counts["parse_errors"] else 0
        if self._errors == self._most_errors:
            return results, 0.0, False, True, info | {"ending": "parse_errors"}
        return results, 0.0, False, False, info

    def _run(self, call: Call | str) -> tuple[str, str]:
        """Run a call; the text that the model reads, and the name of the count."""
        if isinstance(call, str):
            return f"error: {call}", "parse_errors"
        if call.name not in self._tools:
            return f"error: there is no tool {call.name!r:.80}; there are {', '.join(self._tools)}", "parse_errors"
        tool = self._tools[call.name].call
        try:
            result = awaited(tool(**call.arguments))
            return result if isinstance(result, str) else _written(result), "tool_calls"
        except GroupwiseError:
            raise  # nothing that the model did
        except Exception as error:
            # what a tool validates itself has another title
            if isinstance(error, ValidationError) and error.title == getattr(tool, "__qualname__", error.title):
                wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3])
                return f"error: wrong arguments of {call.name}: {wrong}", "parse_errors"
            if self._on_error == "raise":
                raise EnvError(
                    f"tool {call.name!r} raised {type(error).__name__}: {error}; fix: the tool, or on_tool_error='tell', which shows "
                    "the error to the model"
                ) from error
            return f"error: {type(error).__name__}: {error}", "tool_errors"

    @property
    def unwrapped(self) -> Any:
        """The object."""
        return self if self.made is None else self.made

    def final_reward(self) -> float:
        """The object's reward."""
        reward = getattr(self.made, "get_reward", None)
        return 0.0 if reward is None else awaited(reward())

    def sample_action(self, rng: np.random.Generator) -> str:
        """A call with arguments that the schema allows."""
        if not self._tools:
            return ""
        tool = list(self._tools.values())[rng.integers(len(self._tools))].schema["function"]
        properties = tool.get("parameters", {}).get("properties", {})
        return str(Call(tool["name"], {name: _sample(schema, rng) for name, schema in properties.items()}))

    def close(self) -> None:
        """Close the object and the tools."""
        for one in (self.made, *self._given):
            if (close := getattr(one, "_close", None) or getattr(one, "close", None)) is not None:
                close()


_NO_TOOLS = ("reset", "get_reward")


def _by_name(tools: Sequence[BoundTool]) -> dict[str, BoundTool]:
    found = {tool.name: tool for tool in tools}
    for tool in tools:
        if found[tool.name] is not tool:
            raise ConfigError(f"two tools are called {tool.name!r}; fix: other names")
    return found


def _written(result: Any) -> str:
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def _sample(schema: Mapping[str, Any], rng: np.random.Generator) -> Any:
    if "enum" in schema:
        return schema["enum"][rng.integers(len(schema["enum"]))]
    kind = schema.get("type", "string")
    match kind if isinstance(kind, str) else kind[0]:
        case "integer":
            return int(rng.integers(10))
        case "number":
            return float(rng.integers(10))
        case "boolean":
            return bool(rng.integers(2))
        case "array":
            return [_sample(schema.get("items", {}), rng) for _ in range(rng.integers(1, 4))]
        case "object":
            return {}
    return str(rng.integers(10)) if rng.integers(2) else "".join(rng.choice([*"aeioustrnl"], 5))


class OneToolEnv(ToolEnv):
    """Completions with a ``Tool``, which answers each turn in which it finds a call; a turn without one is the last.

    Args:
        asking: held while the tool answers, which all instances share.
    """

    def __init__(self, tool: AnyTool, asking: Lock, prompt_column: str = "prompt") -> None:
        super().__init__(prompt_column=prompt_column)
        self._tool, self._asking = tool, asking
        self.stop = tool.stop if isinstance(tool, Tool) else ()

    def step(self, text: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Let the tool answer."""
        with self._asking:
            answer = ask(self._tool, text)
        if answer is None:
            return "", 0.0, True, False, {"ending": "no_call"}
        return [{"role": "tool", "content": answer}], 0.0, False, False, {"counts": {"tool_calls": 1}}

    def close(self) -> None:
        """End the tool's process, if it has one; the next call starts another."""
        if isinstance(self._tool, IsolatedTool):
            with self._asking:
                self._tool.close()


# The environment of a task


def env_of(task: TextTask) -> Makes | None:
    """Makes an instance of the task's environment, if only of its tools; None if it has none. Errors as ``make_text_env``."""
    return make_text_env(task.cfg, task.given["env"], task.given["tools"], task.tool())


def make_text_env(
    cfg: TextTaskCfg, env: Any = None, tools: Sequence[Any] | None = None, tool: AnyTool | None = None
) -> Makes | None:
    """Makes an instance of the environment that the settings name, or of what was given in Python; None if there is none.

    Args:
        env: a class or function, or several by the name that the column ``environment`` has.
        tools: those given in Python, in their order.
        tool: the one that the settings describe.

    Raises:
        ConfigError: there is no such environment or tool, it does not take its settings, or it was given in Python and is missing.
    """
    if cfg.tool is not None:
        return partial(OneToolEnv, tool or make_tool(cfg), Lock(), cfg.prompt_column)
    if not cfg.has_env:
        return None
    given = [*(tools or ())]
    if cfg.tools.count(GIVEN) != len(given):
        raise ConfigError(
            f"{cfg.tools.count(GIVEN)} tool(s) were given in Python, but now {len(given)}; fix: give them again, in their order, as tools=..."
        )
    functions = [given.pop(0) if name == GIVEN else _registered_tool(name) for name in cfg.tools]
    for name, one in zip(cfg.tools, functions, strict=True):
        if isinstance(one, Tool) or not (isinstance(one, Tools) or callable(one)):
            what = repr(one) if name == GIVEN else repr(name)
            raise ConfigError(
                f"tools: {what:.80} is no function that a model calls by name; fix: tool=, for one that reads the turn's text"
            )
    settings: dict[str, Any] = {"tools": functions}
    settings |= {
        name: getattr(cfg, name) for name in ("prompt_column", "max_parse_errors", "max_tool_calls", "on_tool_error")
    }

    def whole(make: Callable[[], Any]) -> TextEnv:
        if inspect.isroutine(make) or inspect.isclass(make):
            try:
                inspect.signature(make).bind()
            except TypeError as error:
                name = make.__name__
                raise ConfigError(f"the environment {name}: {error}; fix: env=lambda: {name}(...)") from None
        one = make()
        if not isinstance(one, TextEnv):
            return ToolEnv(one, **settings)
        if functions:
            raise ConfigError(f"{type(one).__name__} is a TextEnv, which has tools of its own; fix: leave tools out")
        for name, value in cfg.changed(*OF_CALLS).items():
            raise ConfigError(f"{name}={value!r} is not read by {type(one).__name__}, a TextEnv; fix: leave it out")
        return one

    if cfg.env is None:
        return partial(ToolEnv, **settings)
    if cfg.env == GIVEN:
        if env is None:
            raise ConfigError("the environment was given in Python; fix: give it again as env=...")
        return (
            {name: partial(whole, one) for name, one in env.items()}
            if isinstance(env, Mapping)
            else partial(whole, env)
        )
    family, colon, game = cfg.env.partition(":")
    registry, kwargs = TEXT_ENVS, cfg.env_kwargs
    if colon and family in TEXT_GAMES:
        from groupwise.text.games import gem, skyrl, textarena, textworld

        games = {
            "gem": gem.Gem,
            "skyrl": skyrl.SkyRL,
            "textarena": textarena.TextArena,
            "textworld": textworld.TextWorld,
        }
        registry, kwargs = {cfg.env: games[family]}, cfg.env_kwargs | {"game": game}
    return partial(whole, partial(make_registered, "text env", registry, cfg.env, kwargs, makes=True))


def _registered_tool(name: str) -> Any:
    if name not in TOOLS:
        raise UnknownNameError("tool", name, TOOLS)
    return TOOLS[name]() if inspect.isclass(TOOLS[name]) else TOOLS[name]
