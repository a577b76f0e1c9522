"""Which answers to tasks of reasoning-gym are right, and which tasks cannot be scored."""

import ast
import contextlib
import functools
import io
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from copy import deepcopy
from fractions import Fraction
from typing import Any

from groupwise.config.text import GYM
from groupwise.errors import ConfigError, require_extra

_ANY = r"[\s\S]*"
_NUMBER = r"-?\d+(\.\d+)?"
_COLOR = r'"\d+"\s*:\s*\d+'
_TURN = r"[UDLRFB]'?"
_HANOI = r"Move disk \d+ from Peg \d+ to Peg \d+"
SCORED_TASKS = dict.fromkeys(
    [
        "chain_sum",
        "decimal_chain_sum",
        "group_anagrams",
        "jugs",
        "knight_swap",
        "palindrome_generation",
        "palindrome_partitioning",
        "products",
        "shortest_path",
    ],
    _ANY,
) | {
    "graph_color": rf"\{{\s*{_COLOR}(\s*,\s*{_COLOR})*\s*\}}",
    "n_queens": r"[Q_\s]+",
    "polynomial_equations": rf"{_NUMBER}(\s*,\s*{_NUMBER})*",
    "quantum_lock": r"[ABC](\s*→\s*[ABC])*",
    "rubiks_cube": rf"{_TURN}(\s+{_TURN})*",
    "sokoban": r"[UDLR]+",
    "tower_of_hanoi": rf"{_HANOI}(\s*\n\s*{_HANOI})*",
}
"""Tasks with several right answers, and the form of an answer, to which their own scorer gives full marks only if it is
right. Without the form, some would run an answer as code, or skip what they cannot read."""

COMPUTED_TASKS = ("countdown", "puzzle24")
"""Tasks whose expressions are computed here, exactly: their own scorers run them as code, and accept results that are close."""

REFUSED_TASKS = {
    "boxnet": "its scorer skips moves that are not allowed, and fails at malformed plans",
    "composite": "its scorer needs the data set that it was made from",
    "intermediate_integration": "its scorer runs the answer as code",
    "propositional_logic": "its scorer accepts malformed statements",
    "rush_hour": "its scorer skips moves that are not allowed",
    "simple_integration": "its scorer runs the answer as code",
}
"""Tasks with several right answers that cannot be distinguished from wrong ones, and why."""

_LONGEST = 10_000
_LONGEST_EXPRESSION = 200
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def is_right(task: str, given: str, answer: str | None, metadata: Mapping[str, Any]) -> bool:
    """Whether the given answer solves the task: by its text where one answer is right, else by the rules above.

    Args:
        answer: the example's own, if it has one.
        metadata: of the example; it stays as it is.

    Raises:
        ConfigError: the task is one of ``REFUSED_TASKS``.
    """
    if task in REFUSED_TASKS:
        raise ConfigError(f"{GYM}{task} has many right answers, and {REFUSED_TASKS[task]}; fix: a reward of your own")
    if answer is not None and given == answer.strip():
        return True
    if not given or len(given) > _LONGEST:
        return False
    if task in COMPUTED_TASKS:
        return computes(given, metadata["numbers"], metadata.get("target", 24))
    if task not in SCORED_TASKS or re.fullmatch(SCORED_TASKS[task], given) is None:
        return False
    entry = {"answer": answer, "metadata": deepcopy(dict(metadata))}  # some scorers write into it
    with contextlib.redirect_stdout(io.StringIO()):  # some print
        return float(_own_scorer(task)(given, entry)) >= 1


def computes(expression: str, numbers: list[int], result: int) -> bool:
    """Whether an expression of ``+ - * /`` and brackets has exactly these numbers, in any order, and this result."""
    if len(expression) > _LONGEST_EXPRESSION or re.fullmatch(r"[0-9\s()+*/-]+", expression) is None:
        return False
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        return Counter(used) == Counter(numbers) and _value(tree.body) == result
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_value(left), _value(right))
    raise ValueError("not arithmetic")


@functools.cache
def _own_scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    require_extra("reasoning_gym", "text")
    from reasoning_gym.factory import get_score_answer_fn

    scorer: Callable[[str, dict[str, Any]], float] = get_score_answer_fn(task)
    return scorer
