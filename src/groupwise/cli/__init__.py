"""The command line. Imports torch only for commands that train or play, once their arguments are known to be right."""

from groupwise.cli.main import main

__all__ = ["main"]
