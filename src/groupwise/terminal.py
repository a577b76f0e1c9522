"""Text for the terminal. Imports no torch."""

import re
import sys
from typing import Literal

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    r"""The text with its control characters shown, such as ``\x1b``; lines and tabs stay.

    Ids, errors and completions may be a stranger's, and a terminal obeys control characters: it moves the cursor, hides
    text or sets the title. So are marks that turn the direction of text, and halves of characters, which cannot be printed.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def show(*lines: object, to: Literal["stdout", "stderr"] = "stdout") -> None:
    """Print lines in their printable form."""
    print(*map(printable, lines), sep="\n", file=sys.stderr if to == "stderr" else sys.stdout, flush=True)
