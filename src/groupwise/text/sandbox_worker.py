"""The process that ``sandbox`` asks: a line of JSON in, a line of JSON out. Imports the standard library alone at first."""

import json
import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Any

_MEMORY = 4 * 2**30
"""Bytes that the process may have; ``9**9**9`` wants more."""


def matches(pattern: str, where: str, text: str) -> bool:
    """Whether the pattern is found in the text (``search``), or is all of it (``full``)."""
    compiled = re.compile(pattern)
    return (compiled.fullmatch(text) if where == "full" else compiled.search(text)) is not None


def same_mathematics(gold: str, answer: str) -> bool:
    """Whether both are the same number, set or expression, read as LaTeX."""
    from math_verify import LatexExtractionConfig, parse, verify

    # the other way to read expressions hands them to sympy's parse_expr, which is eval
    wanted, given = (
        parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None, fallback_mode="no_fallback")
        for text in (gold, answer)
    )
    return bool(wanted and given and verify(wanted, given, timeout_seconds=None))


_CALLS: dict[str, Callable[..., Any]] = {"matches": matches, "same_mathematics": same_mathematics}


def _main() -> None:
    _limit_memory()
    logging.disable()  # it would say of every call that nobody limits its time, which the other process does
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"value": _CALLS[name](*arguments)}
        except Exception as error:  # told to whoever asks
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _limit_memory() -> None:
    if sys.platform == "win32":
        return
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))


if __name__ == "__main__":
    _main()
