"""Errors about unknown environment ids. Imports no torch and no simulator."""

from collections.abc import Iterable
from importlib.util import find_spec

from groupwise.errors import EnvError, MissingExtraError, UnknownNameError, installing, nearest

_PACKAGES = {"ALE/": ("ale_py", "atari"), "MiniGrid-": ("minigrid", "minigrid"), "BabyAI-": ("minigrid", "minigrid")}
"""The module that registers environments when it is imported, and the extra that brings it, by the start of their ids."""


def unknown_environment(env_id: str, known: Iterable[str]) -> UnknownNameError | MissingExtraError:
    """The error to raise: names the nearest id, or the package that registers environments of this kind."""
    names = list(known)
    hint = "no registered id is similar; fix: --plugin FILE.py if it is yours (in Python: register it first)"
    for prefix, (module, extra) in _PACKAGES.items():
        if not env_id.startswith(prefix) or any(name.startswith(prefix) for name in names):
            continue
        registering = f"import {module} (command line: --plugin {module})"
        if find_spec(module) is None:
            return MissingExtraError(
                f"environment {env_id!r} needs {module!r}, which is not installed; fix: {installing(extra)}, "
                f"then {registering}"
            )
        hint = f"{module} (extra {extra!r}) registers it when it is imported; fix: {registering}"
        return UnknownNameError("environment", env_id, (), hint=hint)
    return UnknownNameError("environment", env_id, names, hint=None if nearest(env_id, names) else hint)


def refuse_module(env_id: str) -> None:
    """Refuse ids of the form ``module:Name``.

    Raises:
        EnvError: Gymnasium would import the module.
    """
    module, colon, name = env_id.partition(":")
    if colon:
        raise EnvError(
            f"environment {env_id!r} would import {module!r}, and a config imports nothing; fix: import it yourself (on "
            f"the command line: --plugin {module}) and name the id alone, {name!r}"
        )
