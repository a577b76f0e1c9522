"""The answer in a completion, and numbers in texts. Nothing here runs the model's text as code."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Literal

Where = Literal["auto", "tag", "boxed", "whole"]
"""The part of a completion that is its answer: the last ``<answer>...</answer>``; the last ``\\boxed{...}``; all of it,
stripped; ``auto``: the first of these that exists."""

_TAG = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_NUMBER = r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?(?<=[0-9])(?:[eE][+-]?[0-9]{1,3})?"
_WHOLE_NUMBER = re.compile(rf"[$€£]?\s*({_NUMBER})(?:\s*/\s*({_NUMBER}))?\s*%?\.?")
_NUMBER_INSIDE = re.compile(rf"(?<![\w.,/])(?:{_NUMBER})(?:/{_NUMBER})?(?![\w/]|[.,][0-9])")
_LONGEST_NUMBER = 100


def final_answer(
    completion: str, where: Where = "auto", otherwise: Callable[[str], str | None] = str.strip
) -> str | None:
    """The answer of the completion; None if it has none.

    Args:
        otherwise: finds it for ``where="auto"`` without tag and box.
    """
    finders: dict[str, Callable[[str], str | None]] = {"tag": _tagged, "boxed": _boxed, "whole": str.strip}
    if where != "auto":
        return finders[where](completion)
    marked = (find(completion) for find in (_tagged, _boxed))
    return next((answer for answer in marked if answer is not None), otherwise(completion))


def gold_answer(column: object) -> str:
    """The right answer: the column's text, or its part after ``####``, as in GSM8K."""
    return str(column).rpartition("####")[2].strip()


def last_number(text: str) -> str | None:
    """The last number of a text that stands alone; None if there is none."""
    found = _NUMBER_INSIDE.findall(text)
    return found[-1] if found else None


def as_number(text: str) -> Fraction | None:
    """The exact number that the whole text is, such as ``-5``, ``$1,234.5``, ``18%``, ``1/3`` or ``2e-3``; None otherwise."""
    found = _WHOLE_NUMBER.fullmatch(text.strip())
    if found is None or len(text) > _LONGEST_NUMBER:
        return None
    over, under = (Fraction(part.replace(",", "")) for part in (found[1], found[2] or "1"))
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
