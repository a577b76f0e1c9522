"""How the words of a command are read."""

import argparse
from typing import Any, NoReturn

from groupwise.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises instead of exiting, and takes no abbreviations, which would swallow settings."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse has to say."""
        raise ConfigError(f"{message}; fix: see {self.prog} --help")
