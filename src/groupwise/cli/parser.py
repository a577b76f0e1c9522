"""Arguments of the commands. A mistake is one line, with the nearest name."""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from groupwise.errors import ConfigError, nearest

SHARED = ("--plugin", "--debug", "--help")
"""Options of every command."""


class Parser(ArgumentParser):
    """Raises instead of exiting, and takes no abbreviations, which would swallow settings."""

    def __init__(self, **options: Any) -> None:
        self.flags = [*SHARED]
        super().__init__(allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter, **options)

    def add_argument(self, *names: Any, **options: Any) -> Any:
        """Remember the names of options."""
        self.flags += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **options)

    def add_choice(self, name: str, known: Sequence[str], **options: Any) -> None:
        """An option that takes one of these words."""

        def check(word: str) -> str:
            if word not in known:
                raise ArgumentTypeError(f"expected {' or '.join(known)}, got {word!r}{nearest(word, known)}")
            return word

        self.add_argument(name, type=check, metavar="|".join(known), **options)

    def read(self, argv: Sequence[str]) -> Namespace:
        """The arguments; a ``ConfigError`` names the option that is nearest to an unknown one."""
        found, rest = self.parse_known_args(argv)
        if rest:
            word = next((word for word in rest if word.startswith("-")), rest[0]).partition("=")[0]
            near = get_close_matches(word.replace("_", "-"), self.flags, n=1, cutoff=0.7)
            hint = f"; did you mean {near[0]}?" if near else f"; fix: see {self.prog} --help"
            raise ConfigError(f"unknown option {word}{hint}" if word.startswith("-") else f"unexpected {word!r}{hint}")
        return found

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message."""
        raise ConfigError(message if "did you mean" in message else f"{message}; fix: see {self.prog} --help")


def count(word: str) -> int:
    """A whole number of at least 1, also in the forms 1e5 and 12,345."""
    word = word.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", word) else word
    if not re.fullmatch(r"\d+(\.\d+)?([eE]\+?\d+)?", word) or float(word) < 1 or float(word) % 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, such as 100 or 1e5, got {word!r}")
    return int(float(word))
