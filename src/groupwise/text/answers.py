"""The answer that a completion gives, and when two answers are the same. Nothing here runs what a model wrote."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

Where = Literal["auto", "tag", "boxed", "whole"]
"""Which part of a completion is its answer: the last ``<answer>...</answer>``; the last ``\\boxed{...}``; all of it, white
space at its ends aside; ``auto``: the first of these that there is."""

_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_NUMBER = r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?(?<=[0-9])(?:[eE][+-]?[0-9]{1,3})?"
_WHOLE_NUMBER = re.compile(rf"[$€£]?\s*({_NUMBER})(?:\s*/\s*({_NUMBER}))?\s*%?\.?")
_NUMBER_INSIDE = re.compile(rf"(?<![\w.,/])(?:{_NUMBER})(?:/{_NUMBER})?(?![\w/]|[.,][0-9])")
_LONGEST_NUMBER = 100


def final_answer(
    completion: str, where: Where = "auto", otherwise: Callable[[str], str | None] = str.strip
) -> str | None:
    """The part of the completion that is its answer; None if it has no such part.

    Args:
        otherwise: what is the answer with ``where="auto"`` where there is neither tag nor box.
    """
    match where:
        case "tag":
            return _tagged(completion)
        case "boxed":
            return _boxed(completion)
        case "whole":
            return completion.strip()
    marked = (part(completion) for part in (_tagged, _boxed))
    return next((part for part in marked if part is not None), otherwise(completion))


def gold_answer(column: object) -> str:
    """The right answer, of a column that may explain it first and give it after ``####``, as GSM8K does."""
    return str(column).rpartition("####")[2].strip()


def last_number(text: str) -> str | None:
    """The last number of a text that stands alone; None if there is none."""
    found = _NUMBER_INSIDE.findall(text)
    return found[-1] if found else None


def as_number(text: str) -> Fraction | None:
    """The number that the text is, exactly; None if it is none.

    Thousands may be separated by commas; a currency sign before, and a percent sign or a full stop after it, make no
    difference. ``1/3`` and ``2e-3`` are numbers; words, units and a second number make it none.
    """
    said = _WHOLE_NUMBER.fullmatch(text.strip())
    if said is None or len(text) > _LONGEST_NUMBER:
        return None
    over, under = (Fraction(part.replace(",", "")) for part in (said[1], said[2] or "1"))
    return over / under if under else None


def _tagged(text: str) -> str | None:
    found = _TAG.findall(text)
    return found[-1].strip() if found else None


def _boxed(text: str) -> str | None:
    r"""What the last ``\boxed{`` encloses, up to the brace that closes it."""
    _, opened, rest = text.rpartition("\\boxed{")
    if not opened:
        return None
    depth = 1
    for place, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[:place].strip()
    return None
