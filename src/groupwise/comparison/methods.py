"""Which runs are of one method, what methods are called, and in which settings they differ: from settings as plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.config import presets
from groupwise.config.algorithm import GRPOCfg

Tree = dict[str, Any]
Flat = dict[str, Any]
"""Settings by their full names, such as ``algorithm.gamma``; lists are values."""

_NO_METHOD = ("seed", "run_dir", "logging", "evaluation", "stop", "total_steps", "task")
"""What says how a run was named, watched and measured, on what and how long. ``stop`` has had no effect on a run that took all its steps."""
_ABSENT = object()
_OF_ENVIRONMENT = ("env.id", "env.kwargs", "env.max_episode_steps")


def environment_of(config: Tree) -> tuple[str, Flat]:
    """What a run was trained on: its name, and all that makes it what it is."""
    if "task" in config:
        name = str(config["task"].get("data", "")).rpartition("/")[2].rpartition(":")[2]
        return name, flat({"task": config["task"]})
    env = config["env"]
    settings = {"env": {key.removeprefix("env."): env.get(key.removeprefix("env.")) for key in _OF_ENVIRONMENT}}
    return str(env["id"]), flat(settings)


def method_of(config: Tree) -> Flat:
    """The settings that make the method: runs that differ in others only are one method."""
    found = flat({key: value for key, value in config.items() if key not in _NO_METHOD})
    return {key: value for key, value in found.items() if not key.startswith(_OF_ENVIRONMENT)}


def flat(tree: Tree, prefix: str = "") -> Flat:
    """Nested settings by their full names."""
    found: Flat = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def differing(methods: Sequence[Flat]) -> list[str]:
    """Names of settings that are not the same in all of these; one that a method lacks differs, too."""
    return [name for name in _names(methods) if _kinds(methods, [name]) > 1]


def differences(methods: Mapping[str, Flat]) -> dict[str, dict[str, Any]]:
    """Setting -> method -> value, of settings that differ between methods that have them; other algorithms' are left out."""
    found = {}
    for name in _names(list(methods.values())):
        values = {method: settings[name] for method, settings in methods.items() if name in settings}
        if len(set(map(repr, values.values()))) > 1:
            found[name] = values
    return found


def _names(methods: Sequence[Flat]) -> list[str]:
    return list(dict.fromkeys(name for method in methods for name in method))


def labels(methods: Sequence[Flat]) -> list[str]:
    """A name for each method, all different: the algorithm's; if several have it, with what tells them apart.

    That is their one differing setting, else the presets that they follow (none for who follows none), else a few settings.
    """
    algorithms = [str(method.get("algorithm.name")) for method in methods]
    found = list(algorithms)
    for algorithm in dict.fromkeys(algorithms):
        places = [place for place, name in enumerate(algorithms) if name == algorithm]
        if len(places) > 1:
            for place, more in zip(places, _told_apart([methods[place] for place in places]), strict=True):
                found[place] = f"{algorithm} {more}".rstrip()
    return found


def _told_apart(methods: Sequence[Flat]) -> list[str]:
    """What to add to the algorithm's name of each of its methods."""
    names = differing(methods)
    if len(names) > 1:
        followed = [preset_of(method) for method in methods]
        if len(set(followed)) == len(methods):
            return [f"preset={name}" if name else "" for name in followed]
    chosen = _fewest(methods, names)
    return [", ".join(f"{_short(name, chosen)}={setting(method.get(name))}" for name in chosen) for method in methods]


def _fewest(methods: Sequence[Flat], names: Sequence[str]) -> list[str]:
    """Few of these settings that tell all the methods apart: each next one is what tells most of them."""
    chosen: list[str] = []
    while _kinds(methods, chosen) < _kinds(methods, names):
        chosen.append(max(names, key=lambda name: _kinds(methods, [*chosen, name])))
    return chosen


def _kinds(methods: Sequence[Flat], names: Sequence[str]) -> int:
    """How many of the methods these settings tell apart."""
    return len({tuple(repr(method.get(name, _ABSENT)) for name in names) for method in methods})


def _short(name: str, others: Sequence[str]) -> str:
    """The last part of a setting's name, or all of it where two end alike."""
    last = name.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in others].count(last) == 1 else name


def setting(value: Any) -> str:
    """A setting's value as tables and names show it."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else str(value)
    return "none" if value is None else str(value)


def preset_of(method: Flat) -> str | None:
    """The preset of a paper or library whose credit and objective these settings are; None if there is none.

    What the preset leaves at None may have been found out when the run began, as ``objective.max_length`` is.
    """
    for name, preset in presets.objective_presets().items():
        said = flat({"algorithm": preset.settings})
        wanted = flat({"algorithm": _complete(preset.settings)})
        if all(method.get(key, _ABSENT) == value for key, value in wanted.items() if key in said or value is not None):
            return name
    return None


def _complete(settings: Mapping[str, Any]) -> Tree:
    """The parts that a preset sets, with the defaults of what it leaves open in them."""
    whole: Tree = GRPOCfg.model_validate(dict(settings)).model_dump(mode="json")
    return {key: whole[key] for key in settings}
