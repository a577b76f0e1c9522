"""Text for the terminal. Imports no torch."""

import io
import logging
import os
import re
import sys
import warnings
from contextlib import suppress
from typing import Any, Literal

_LIBRARY = "groupwise"
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object) -> str:
    r"""The text with its control characters shown, such as ``\x1b``; lines and tabs stay.

    Ids, errors and completions may be a stranger's, and a terminal obeys control characters: it moves the cursor, hides
    text or sets the title. So are marks that turn the direction of text, and halves of characters, which cannot be printed.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), str(text))


def show(*lines: object, to: Literal["stdout", "stderr"] = "stdout") -> None:
    """Print lines in their printable form. A message to ``stderr`` that cannot be written is lost, and no error."""
    stream = SafeStream(sys.stderr) if to == "stderr" else sys.stdout
    print(*map(printable, lines), sep="\n", file=stream, flush=True)


class SafeStream(io.TextIOBase):
    """A stream that may fail, such as stderr on a full disk or of a closed terminal: what cannot be written is lost."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream or io.StringIO()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream."""
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Of the stream."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write if that is possible."""
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if that is possible."""
        with suppress(OSError, ValueError):
            self._stream.flush()


def prepare() -> None:
    """What the command line prints, and what it warns and logs, is printable, also in ASCII and where a library says it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.setLogRecordFactory(_PrintableRecord)
    warnings.formatwarning = _format_warning


def show_errors_only() -> None:
    """No warnings, and no bars of libraries that are not yet imported."""
    logging.getLogger(_LIBRARY).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    os.environ["TQDM_DISABLE"] = "1"


def show_everything() -> None:
    """Also what this library logs for its developers."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger(_LIBRARY).setLevel(logging.DEBUG)


class _PrintableRecord(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802  of the base class
        return printable(super().getMessage())


_format = warnings.formatwarning


def _format_warning(*args: Any, **options: Any) -> str:
    return printable(_format(*args, **options))
