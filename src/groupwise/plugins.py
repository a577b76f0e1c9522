"""Plugins: the user's files and modules, which register environments, algorithms and so on. Imports no torch.

A run folder records them, so that printed commands and errors can name them.
"""

import importlib
import importlib.util
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from groupwise.errors import ConfigError, GroupwiseError, require_name

Made = TypeVar("Made")
_PREFIX = "groupwise_plugin_"
_loaded: list[str] = []


def register(kind: str, registry: dict[str, Made], name: str) -> Callable[[Made], Made]:
    """Decorator: add to the registry; a ``ConfigError`` if the name is taken, or missing."""
    require_name(kind, name)

    def add(made: Made) -> Made:
        if name in registry:
            raise ConfigError(f"{kind} {name!r} is registered already; fix: choose another name")
        registry[name] = made
        return made

    return add


TEXT_ENVS: dict[str, Callable[..., Any]] = {}
"""Registered text environments: classes or functions, called with ``task.env_kwargs``."""


def register_text_env(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: make a ``TextEnv`` available as ``TextTask(env=name)``, in files and on the command line."""
    return register("text env", TEXT_ENVS, name)


TEXT_GAMES = ("textarena", "gem", "textworld", "skyrl")
"""Families of public games, by the prefix of their names."""


def is_text_env(name: str) -> bool:
    """Whether it names a text environment: a registered one, or a public game."""
    family, colon, _ = name.partition(":")
    return name in TEXT_ENVS or (colon == ":" and family in TEXT_GAMES)


def load(plugins: Sequence[Path]) -> None:
    """Import the plugins of the command line; a ``ConfigError`` for what is neither a Python file nor a module."""
    _loaded.clear()
    for plugin in plugins:
        wrong = ConfigError(
            f"--plugin {plugin}: expected an existing Python file or an installed module; fix: its path with .py, or install it"
        )
        if plugin.suffix == ".py" or plugin.is_file():
            plugin = Path(os.path.abspath(plugin))  # so that printed commands work in any folder
            spec = importlib.util.spec_from_file_location(f"{_PREFIX}{plugin.stem}", plugin)
            if spec is None or spec.loader is None or not plugin.is_file():
                raise wrong
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            if not all(part.isidentifier() for part in str(plugin).split(".")):
                raise wrong
            try:
                importlib.import_module(str(plugin))
            except ModuleNotFoundError as error:
                if error.name is None or not f"{plugin}.".startswith(f"{error.name}."):
                    raise  # one of its own imports failed
                raise wrong from error
        _loaded.append(str(plugin))


def loaded() -> list[str]:
    """The plugins of this command."""
    return list(_loaded)


def options(plugins: Sequence[str]) -> str:
    """`` --plugin FILE.py`` for each."""
    return "".join(f" --plugin {shlex.quote(plugin)}" for plugin in plugins)


def program() -> str:
    """``groupwise``, or the path of its script where a shell would not find it."""
    script, here = Path(sys.executable).with_name("groupwise"), Path.cwd()
    if shutil.which("groupwise") or not script.is_file():
        return "groupwise"
    below = script.parent != here and script.is_relative_to(here)
    return shlex.quote(str(script.relative_to(here) if below else script))


def command(*words: object) -> str:
    """A command of groupwise with these words and the plugins of this one, for a shell."""
    return f"{program()} {shlex.join(map(str, words))}{options(_loaded)}"


def resume_command(path: Path, given: Sequence[str], plugins: Sequence[str], *, allow_programs: bool = False) -> str:
    """Command that continues a run, or a call where Python objects were ``given``."""
    if given:
        words = [f"{name}=..." for name in given] + ["allow_programs=True"] * allow_programs
        return f"gw.resume({str(path)!r}, {', '.join(words)})"
    return f"{program()} resume {shlex.quote(str(path))}{' --allow-programs' * allow_programs}{options(plugins)}"


@contextmanager
def blaming_absence(where: Path, plugins: Sequence[str]) -> Iterator[None]:
    """Add to errors which of the plugins that the run in ``where`` was trained with were not loaded."""
    try:
        yield
    except GroupwiseError as error:
        names = {Path(plugin).name for plugin in _loaded}  # the project may have moved
        absent = [plugin for plugin in plugins if Path(plugin).name not in names]
        if not absent:
            raise
        given = options(absent).strip()
        raise ConfigError(
            f"{error}; {where} was trained with {given}; fix: add {given} (in Python: import it first)"
        ) from error


def pickled(thing: object) -> bytes:
    """``thing`` for a new process; the code of plugin files, which could not be imported there, goes along."""
    with ExitStack() as stack:
        for module in [module for name, module in sys.modules.items() if name.startswith(_PREFIX)]:
            cloudpickle.register_pickle_by_value(module)
            stack.callback(cloudpickle.unregister_pickle_by_value, module)
        payload: bytes = cloudpickle.dumps(thing)
        return payload
