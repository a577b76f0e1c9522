"""Plugins: files and modules of the user's that register what a run names. Which ones, and what to say where one lacks.

A run folder records them, so that the commands printed about it, and the error where they are missing, can name them.
Imports no torch.
"""

import importlib
import importlib.util
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from groupwise.errors import ConfigError, GroupwiseError

_loaded: list[str] = []


def load(plugins: Sequence[Path]) -> None:
    """Import what the command line named, for what it registers; ``loaded`` then tells of these.

    Raises:
        ConfigError: one is neither a Python file nor an installed module.
    """
    _loaded.clear()
    for plugin in plugins:
        _import(plugin)
        _loaded.append(str(plugin))


def loaded() -> list[str]:
    """The plugins of this command, as it named them."""
    return list(_loaded)


def options(plugins: Sequence[str]) -> str:
    """How a command names them: `` --plugin FILE.py`` for each."""
    return "".join(f" --plugin {shlex.quote(plugin)}" for plugin in plugins)


@contextmanager
def blaming_absence(where: Path, plugins: Sequence[str]) -> Iterator[None]:
    """Say on errors of ours which plugins a run had that were not named this time.

    Args:
        where: folder of the run.
        plugins: those that it was trained with.
    """
    try:
        yield
    except GroupwiseError as error:
        absent = [plugin for plugin in plugins if plugin not in _loaded]
        if not absent:
            raise
        given = options(absent).strip()
        raise ConfigError(
            f"{error}; this run, {where}, was trained with {given}; fix: give it again, as in: groupwise eval {where} "
            f"{given} (in Python: import it first)"
        ) from error


def _import(path: Path) -> None:
    if path.suffix != ".py" and not path.exists():
        _import_module(str(path))
        return
    spec = importlib.util.spec_from_file_location(f"groupwise_plugin_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise _neither(path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


def _import_module(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # its own imports are what fails
        raise _neither(name) from error


def _neither(plugin: Path | str) -> ConfigError:
    return ConfigError(
        f"--plugin {plugin}: expected an existing Python file, or a module that is installed; fix: the file's path, with "
        "its .py, or install the module"
    )
