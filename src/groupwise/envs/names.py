"""Ids of environments: packages that register some on import, and errors about unknown ones. Imports no torch."""

from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from groupwise.errors import EnvError, MissingExtraError, UnknownNameError, installing, nearest
from groupwise.plugins import command


class _Package(NamedTuple):
    """What registers environments when it is imported."""

    module: str
    needs: tuple[str, ...]
    """Must be installed."""
    install: str


_MINIGRID = _Package("minigrid", ("minigrid",), installing("minigrid"))
_PACKAGES = {
    "ALE/": _Package("ale_py", ("ale_py",), installing("atari")),
    "BabyAI-": _MINIGRID,
    "Fetch": _Package("groupwise.embodied.fetch", ("gymnasium_robotics",), installing("robots")),
    "MetaWorld/": _Package(
        "groupwise.embodied.metaworld",
        ("metaworld", "mujoco"),
        f"{installing('robots')}, then pip install --no-deps metaworld==3.1.1 (it asks for an old MuJoCo, but runs on "
        "newer ones)",
    ),
    "MiniGrid-": _MINIGRID,
}
"""By the start of the ids."""


def import_package(env_id: str) -> None:
    """Import the package that registers environments of this kind, if one is known.

    Raises:
        MissingExtraError: it is not installed.
    """
    for prefix, package in _PACKAGES.items():
        if env_id.startswith(prefix):
            require_package(prefix)
            import_module(package.module)


def require_package(prefix: str) -> None:
    """Raise a ``MissingExtraError`` if what ids with this start need is not installed."""
    package = _PACKAGES[prefix]
    for name in package.needs:
        if find_spec(name) is None:
            raise MissingExtraError(f"{prefix}... needs {name!r}, which is not installed; fix: {package.install}")


def unknown_environment(env_id: str, known: Iterable[str]) -> UnknownNameError:
    """The error to raise: names the nearest id."""
    names = list(known)
    hint = None if nearest(env_id, names) else "no registered id is similar"
    more = "; if it is yours: --plugin FILE.py (in Python: register it first)"
    return UnknownNameError("environment", env_id, names, hint=hint, more=more)


def check_id(env_id: str) -> None:
    """Refuse ids of the form ``module:Name``, and run folders.

    Raises:
        EnvError: Gymnasium would import the module, or it is a run folder.
    """
    module, colon, name = env_id.partition(":")
    if colon:
        raise EnvError(
            f"environment {env_id!r} would import {module!r}, and a config imports nothing; fix: import it yourself (on "
            f"the command line: --plugin {module}) and name the id alone, {name!r}"
        )
    settings = Path(env_id, "config.json")
    if settings.is_file() and settings.with_name("metrics.jsonl").is_file():
        raise EnvError(
            f"{env_id} is a run folder, expected an environment; fix: {command('resume', env_id)}, or a new run with its "
            f"settings: {command('train', settings)}"
        )
