"""Which runs are one method, how methods are named, and in which settings they differ. Settings are plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.config.base import flat
from groupwise.config.budget import BUDGETS

Tree = dict[str, Any]
Flat = dict[str, Any]
"""Settings by their full names, such as ``algorithm.gamma``; lists are values."""

_NO_METHOD = ("seed", "run_dir", "logging", "evaluation", "stop", *BUDGETS, "task")
"""Settings that do not make a method. ``stop`` has no effect on a run that used up its budget."""
_ABSENT = object()
_OF_ENVIRONMENT = ("id", "kwargs", "max_episode_steps")
"""Settings in ``env`` that do not make one either."""


def environment_of(config: Tree) -> tuple[str, Flat]:
    """Name and settings of the environment or task that a run was trained on."""
    if "task" in config:
        name = str(config["task"].get("data", "")).rpartition("/")[2].rpartition(":")[2]
        return name, flat({"task": config["task"]})
    env = config["env"]
    return str(env["id"]), flat({"env": {key: env.get(key) for key in _OF_ENVIRONMENT}})


def method_of(config: Tree) -> Flat:
    """The settings that make the method: runs that differ in others only are one method."""
    env = {key: value for key, value in config.get("env", {}).items() if key not in _OF_ENVIRONMENT}
    return flat({key: value for key, value in config.items() if key not in _NO_METHOD} | {"env": env})


def differing(methods: Sequence[Flat]) -> list[str]:
    """Names of settings that are not the same in all of these; one that a method lacks differs, too."""
    names = dict.fromkeys(name for method in methods for name in method)
    return [name for name in names if _num_kinds(methods, [name]) > 1]


def differences(methods: Mapping[str, Flat]) -> dict[str, dict[str, Any]]:
    """Setting -> method -> value, of settings that differ between the methods that have them."""
    found = {}
    for name in differing(list(methods.values())):
        values = {method: settings[name] for method, settings in methods.items() if name in settings}
        if len(set(map(repr, values.values()))) > 1:
            found[name] = values
    return found


def labels(methods: Sequence[Flat]) -> list[str]:
    """A different name for each method: its algorithm and, if several share it, settings that tell them apart."""
    return [
        _label(method, [other for other in methods if _algorithm(other) == _algorithm(method)]) for method in methods
    ]


def setting(value: Any) -> str:
    """A setting's value as tables and names show it."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else str(value)
    return "none" if value is None else str(value)


def _algorithm(method: Flat) -> str:
    return str(method.get("algorithm.name"))


def _label(method: Flat, same_algorithm: Sequence[Flat]) -> str:
    names = _telling_apart(same_algorithm)
    settings = ", ".join(f"{_short(name, names)}={setting(method.get(name))}" for name in names)
    return f"{_algorithm(method)} {settings}".rstrip()


def _telling_apart(methods: Sequence[Flat]) -> list[str]:
    """A few settings that tell all the methods apart, the most telling first."""
    names, chosen = differing(methods), list[str]()
    while _num_kinds(methods, chosen) < _num_kinds(methods, names):
        chosen.append(max(names, key=lambda name: _num_kinds(methods, [*chosen, name])))
    return chosen


def _num_kinds(methods: Sequence[Flat], names: Sequence[str]) -> int:
    """How many different methods there are, judged by these settings."""
    return len({tuple(repr(method.get(name, _ABSENT)) for name in names) for method in methods})


def _short(name: str, others: Sequence[str]) -> str:
    """The last part of a setting's name, or all of it where two end alike."""
    last = name.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in others].count(last) == 1 else name
