"""Tools: functions of a turn's text whose answer the model reads before it writes on. None runs what a model wrote."""

import ast
import functools
import inspect
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from groupwise.config.base import GIVEN
from groupwise.config.text import TextTaskCfg
from groupwise.errors import ConfigError, ToolError, UnknownNameError, nearest
from groupwise.text.files import short

MAX_BITS = 512
"""Of numerators and denominators, results in between included."""
_CHARACTERS = re.compile(r"[0-9+\-*/%(). \t]+")
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Tool(ABC):
    """Answers what the model writes. The same text must have the same answer, or a resumed run is not the uninterrupted one."""

    stop: tuple[str, ...] = ()
    """Texts that end a call, and with it the model's turn: where these are, the answer belongs."""

    @abstractmethod
    def __call__(self, text: str) -> str | None:
        """The answer to a turn of the model's; None: it calls nothing, and the completion is over."""


TOOLS: dict[str, Callable[..., Any]] = {}
"""Registered ones; of a class, an object is made with the settings."""


def register_tool(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: make a tool available as ``TextTaskCfg(tool=name)``.

    Settings (``tool_kwargs``) are arguments of the function besides the text; of a subclass of ``Tool``, those of its
    constructor.

    Raises:
        ConfigError: the name is taken.
    """

    def register(tool: Callable[..., Any]) -> Callable[..., Any]:
        if name in TOOLS:
            raise ConfigError(f"tool {name!r} is registered already; fix: choose another name")
        TOOLS[name] = tool
        return tool

    return register


def make_tool(cfg: TextTaskCfg, given: Callable[[str], str | None] | None = None) -> Tool | None:
    """The tool that the settings describe; None if there is none.

    Args:
        given: the tool itself, which was passed in.

    Raises:
        UnknownNameError: nobody registered it.
        ConfigError: it does not take those settings, or it was passed in and now is not.
    """
    if cfg.tool is None:
        return None
    if cfg.tool == GIVEN:
        if given is None:
            raise ConfigError("the tool was given in Python; fix: give it again as tool=...")
        return given if isinstance(given, Tool) else _FunctionTool(given)
    if cfg.tool not in TOOLS:
        raise UnknownNameError("tool", cfg.tool, TOOLS)
    registered = TOOLS[cfg.tool]
    _check_settings(cfg.tool, registered, cfg.tool_kwargs)
    if not inspect.isclass(registered):
        return _FunctionTool(functools.partial(registered, **cfg.tool_kwargs))
    made: Any = registered(**cfg.tool_kwargs)
    if not isinstance(made, Tool):
        raise ConfigError(f"tool {cfg.tool!r} is a class but no gw.Tool; fix: class {type(made).__name__}(gw.Tool)")
    return made


def ask(tool: Tool, text: str) -> str | None:
    """What the tool answers.

    Raises:
        ToolError: it raised, or returned what is no text; names what it was given.
    """
    try:
        answer: Any = tool(text)
    except Exception as error:
        raise ToolError(
            f"the tool raised {type(error).__name__}: {error}\n  it was given: {short(text)}\nfix: the tool; what the model "
            "should read of its mistakes is to be returned"
        ) from error
    if answer is None or isinstance(answer, str):
        return answer
    raise ToolError(f"the tool returned {short(answer)}; expected a text, or None for no call; fix: str(...)")


@register_tool("calculator")
class Calculator(Tool):
    """Answers ``<calc>12*(3+4)</calc>`` with ``84``: numbers, parentheses and ``+ - * / // % **``, and exact up to what is printed.

    What it cannot do, it says: ``error: division by zero``.

    Args:
        tag: what stands around a call.
        max_characters: of an expression.
    """

    def __init__(self, tag: str = "calc", max_characters: int = 200) -> None:
        self.stop = (f"</{tag}>",)
        self._call = re.compile(rf"<{re.escape(tag)}>((?:(?!<{re.escape(tag)}>).)*?)</{re.escape(tag)}>", re.DOTALL)
        self._max_characters = max_characters

    def __call__(self, text: str) -> str | None:
        """Value of the turn's last call; None if there is none."""
        calls = self._call.findall(text)
        if not calls:
            return None
        expression = calls[-1].strip()
        if len(expression) > self._max_characters:
            return f"error: more than {self._max_characters} characters"
        return calculate(expression)


def calculate(expression: str) -> str:
    """Value of the arithmetic expression, or ``error: `` and why it has none; other than whole numbers to 12 digits."""
    if not _CHARACTERS.fullmatch(expression):
        return "error: expected numbers, parentheses and + - * / // % **"
    try:
        return _shown(_value(ast.parse(expression.strip(), mode="eval").body))
    except ZeroDivisionError:
        return "error: division by zero"
    except _NoValueError as error:
        return f"error: {error}"
    except OverflowError:
        return "error: too large"
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return "error: this is no arithmetic expression"


class _NoValueError(Exception):
    """Why an expression has none."""


class _FunctionTool(Tool):
    """A plain function as a tool: ``sampling.stop`` says where its calls end."""

    def __init__(self, function: Callable[[str], str | None]) -> None:
        self._function = function

    def __call__(self, text: str) -> str | None:
        return self._function(text)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            value = Fraction(repr(number))  # 0.1 is a tenth here
        case ast.UnaryOp(op=ast.UAdd() | ast.USub() as sign, operand=operand):
            value = _value(operand) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            value = _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            value = Fraction(_OPERATORS[type(sign)](_value(left), _value(right)))
        case _:
            raise _NoValueError("this is no arithmetic expression")
    if _bits(value) > MAX_BITS:
        raise _NoValueError("too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if base < 0:
            raise _NoValueError("a fractional power of a negative number")
        return Fraction(float(base) ** float(exponent))
    if abs(exponent) * (_bits(base) - 1) > MAX_BITS:  # before anything so large is computed
        raise _NoValueError("too large")
    return base ** int(exponent)


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _shown(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else format(float(value), ".12g")


def _check_settings(name: str, tool: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Refuse settings that the tool does not have, or that are missing."""
    parameters = list(inspect.signature(tool).parameters.values())
    of_text = 0 if inspect.isclass(tool) else 1
    named = [p for p in parameters[of_text:] if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in settings:
            raise ConfigError(
                f"tool {name!r} needs the setting {parameter.name!r}; fix: tool_kwargs={{{parameter.name!r}: ...}}"
            )
    known = [p.name for p in named]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    for key in settings:
        if key not in known:
            raise ConfigError(
                f"tool {name!r} has no setting {key!r}{nearest(key, known) or '; known: ' + ', '.join(known)}; fix: tool_kwargs"
            )
