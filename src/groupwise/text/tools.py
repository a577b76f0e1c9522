"""Tools that answer the model's calls. None runs the model's text as code."""

import ast
import logging
import operator
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from groupwise.config.base import GIVEN
from groupwise.config.run import TextTaskCfg
from groupwise.errors import ConfigError, ToolError
from groupwise.plugins import register
from groupwise.system import LostChildError
from groupwise.text.rewards import Isolated, StartError, make_registered

log = logging.getLogger(__name__)

MAX_BITS = 512
"""Numbers of more bits are refused."""


class Tool(ABC):
    """Answers the model. It must be deterministic, or a resumed run differs from an uninterrupted one."""

    stop: tuple[str, ...] = ()
    """Strings that end a call, and with it the model's turn."""

    @abstractmethod
    def __call__(self, text: str) -> str | None:
        """The answer to a turn of the model; None: it has no call, and the completion is over."""


AnyTool = Callable[[str], str | None]
"""A ``Tool``, or a function like one; then ``sampling.stop`` ends its calls."""
TOOLS: dict[str, Callable[..., Any]] = {}
"""Registered ones; a class is instantiated with the settings."""


def register_tool(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: make a tool available as ``TextTaskCfg(tool=name)``.

    Settings (``tool_kwargs``) are arguments of the function besides the text, or of the class.
    """
    return register("tool", TOOLS, name)


def make_tool(cfg: TextTaskCfg, given: AnyTool | None = None) -> AnyTool:
    """The tool that the settings describe, or that was ``given`` in Python.

    Raises:
        ConfigError: there is no such tool, it does not take those settings, or it was given in Python and now is missing.
    """
    made = given if cfg.tool == GIVEN else make_registered("tool", TOOLS, cfg.tool or "", cfg.tool_kwargs, "")
    if made is None:
        raise ConfigError("the tool was given in Python; fix: give it again as tool=...")
    return made if cfg.tool_timeout is None else IsolatedTool(made, cfg.tool_timeout)


class IsolatedTool(Tool):
    """A tool in a process of its own. A call that takes too long, or ends the process, is answered by an error."""

    def __init__(self, tool: AnyTool, seconds: float) -> None:
        self.stop = tool.stop if isinstance(tool, Tool) else ()
        self._isolated = Isolated(tool, "the tool", seconds)

    def __call__(self, text: str) -> str | None:
        """The tool's answer, or ``error: `` and the reason."""
        try:
            answer: str | None = self._isolated(text)
        except LostChildError as error:
            log.warning("the tool %s, with the input %r", error, text[:80])
            return f"error: the tool {error}"
        return answer

    def close(self) -> None:
        """End the process."""
        self._isolated.close()


def encodable(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which no tokenizer takes; warns of them."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if whole != text:
        warnings.warn("a text has lone surrogates: U+FFFD takes their place", stacklevel=2)
    return whole


def ask(tool: AnyTool, text: str) -> str | None:
    """The tool's answer; a ``ToolError`` with its input if it raised, or returned no text."""
    try:
        answer: Any = tool(text)
    except StartError:
        raise
    except Exception as error:
        raise ToolError(
            f"the tool raised {type(error).__name__}: {error}\n  its input: {text!r:.80}\nfix: the tool; return errors "
            "that the model should read"
        ) from error
    if answer is None:
        return None
    if isinstance(answer, str):
        return encodable(answer)
    raise ToolError(f"the tool returned {answer!r:.80}; expected a text, or None for no call; fix: str(...)")


@register_tool("calculator")
class Calculator(Tool):
    """Answers ``<calc>12*(3+4)</calc>`` with ``84``: numbers, parentheses and ``+ - * / // % **``.

    Errors are answers, too: ``error: division by zero``.

    Args:
        tag: of a call.
    """

    def __init__(self, tag: str = "calc") -> None:
        self.stop = (f"</{tag}>",)
        name = re.escape(tag)
        self._call = re.compile(f"<{name}>((?:(?!<{name}>).)*?)</{name}>", re.DOTALL)

    def __call__(self, text: str) -> str | None:
        """Value of the turn's last call; None if there is none."""
        calls = self._call.findall(text)
        return calculate(calls[-1]) if calls else None


ARITHMETIC_ERRORS = (SyntaxError, ValueError, ZeroDivisionError, OverflowError, RecursionError, MemoryError)
"""Errors of ``value_of``."""


def calculate(expression: str) -> str:
    """Value of the arithmetic expression, to 12 digits unless it is an integer; or ``error: `` and the reason."""
    try:
        value = value_of(expression)
    except ZeroDivisionError:
        return "error: division by zero"
    except OverflowError:
        return "error: too large"
    except ARITHMETIC_ERRORS:
        return "error: expected numbers, parentheses and + - * / // % **"
    return str(value) if isinstance(value, int) else format(value, ".12g")


def value_of(expression: str, number: Callable[[Any], Any] = lambda constant: constant) -> Any:
    """Value of the arithmetic expression, whose constants are made by ``number``; one of ``ARITHMETIC_ERRORS`` if it has none."""

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() as constant) if not isinstance(constant, bool):
                found = number(constant)
            case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
                found = _OPERATORS[type(sign)](value(operand))
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                found = _OPERATORS[type(sign)](value(left), value(right))
            case _:
                raise ValueError
        if isinstance(found, complex):
            raise ValueError
        if abs(found) >= 2**MAX_BITS:
            raise OverflowError
        return found

    return value(ast.parse(expression.strip(), mode="eval").body)


def _power(base: int | float, exponent: int | float) -> Any:
    if isinstance(base, int) and (base.bit_length() - 1) * abs(exponent) > MAX_BITS:  # before it is computed
        raise OverflowError
    return base**exponent


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
