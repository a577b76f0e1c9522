"""Ids of environments: packages that register some on import, and errors about unknown ones. Imports no torch."""

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from groupwise.errors import EnvError, MissingExtraError, UnknownNameError, installing, nearest
from groupwise.plugins import command

_MINIGRID = ("minigrid",), installing("minigrid")
_PACKAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "ALE/": (("ale_py",), installing("atari")),
    "BabyAI-": _MINIGRID,
    "Fetch": (("gymnasium_robotics",), installing("robots")),
    "MetaWorld/": (
        ("metaworld", "mujoco"),
        f"{installing('robots')}, then pip install --no-deps metaworld==3.1.1 (it asks for an old MuJoCo, but runs on "
        "newer ones)",
    ),
    "MiniGrid-": _MINIGRID,
}
"""Packages that ids with this start need, and how to install them."""


def import_package(env_id: str) -> None:
    """Import the package that registers environments of this kind; a ``MissingExtraError`` if it is not installed."""
    prefix = next((prefix for prefix in _PACKAGES if env_id.startswith(prefix)), None)
    if prefix is not None:
        require_package(prefix)
    match prefix:
        case "ALE/":
            import ale_py  # noqa: F401
        case "BabyAI-" | "MiniGrid-":
            import minigrid  # noqa: F401
        case "Fetch":
            import groupwise.embodied.fetch
        case "MetaWorld/":
            import groupwise.embodied.metaworld  # noqa: F401


def require_package(prefix: str) -> None:
    """Raise a ``MissingExtraError`` if the package for ids with this prefix is not installed."""
    needs, install = _PACKAGES[prefix]
    for name in needs:
        if find_spec(name) is None:
            raise MissingExtraError(f"{prefix}... needs {name!r}, which is not installed; fix: {install}")


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
