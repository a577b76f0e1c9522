"""What is said about an option that does not exist: whose it is, or which one was meant. Imports no torch."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from groupwise.config.base import Cfg
from groupwise.config.registry import algorithms_with, explain_other_algorithm
from groupwise.config.run import CommonCfg
from groupwise.errors import ConfigError

Names: TypeAlias = dict[str, Any]
"""Options by the parts of their names: nested, and None where one ends."""
Hidden: TypeAlias = Callable[[type[Cfg]], tuple[str, ...]]


def check_names(options: Sequence[str], default: Cfg, hidden: Hidden) -> None:
    """Refuse the first option that ``default`` has no setting for.

    Args:
        hidden: which fields of a config class are no options.

    Raises:
        ConfigError: names whose it is, or the nearest: within the same prefix, if there is one.
    """
    names = _names_of(default, hidden)
    for option in (word.partition("=")[0] for word in options if word.startswith("--") and word != "--help"):
        path = option.removeprefix("--").replace("-", "_").split(".")
        if not _is_option(path, names):
            raise ConfigError(f"unknown option {option}{_hint(path, names, default)}")


def _names_of(config: Cfg, hidden: Hidden) -> Names:
    names: Names = {}
    for name, value in config:
        if name not in hidden(type(config)) and not is_absent(type(config), name, dict(config)):
            names[name] = _names_of(value, hidden) if isinstance(value, Cfg) else None
            if isinstance(value, bool):
                names[f"no_{name}"] = None
    return names


def is_absent(config: type[Cfg], name: str, fields: Mapping[str, Any]) -> bool:
    """Whether a field could be a config and is None: its settings are no options then."""
    return fields[name] is None and config.child_type(name, fields) is not None


def _is_option(path: Sequence[str], names: Names | None) -> bool:
    if names is None or not path:
        return names is None and not path
    return path[0] in names and _is_option(path[1:], names[path[0]])


def _hint(path: list[str], names: Names, default: Cfg) -> str:
    if path == ["env", "id"]:
        return ": the environment is the first argument"
    if isinstance(default, CommonCfg) and path[0] == "algorithm" and (field := _foreign(path[1:], names["algorithm"])):
        return f": {explain_other_algorithm(field, default.algorithm.name)}"
    if inside := _inside(path, names):
        return f": it holds several, {', '.join(_spell([*path, name]) for name in inside)}"
    near = _nearest_path(path, names)
    meant = [near] if near else _same_last_part(path[-1], names)
    return f"; did you mean {' or '.join(map(_spell, meant))}?" if meant else "; --help shows them all"


def _foreign(path: Sequence[str], own: Names) -> str | None:
    """The setting that other algorithms have and this one has not."""
    return path[0] if path and path[0] not in own and algorithms_with(path[0]) else None


def _inside(path: Sequence[str], names: Names) -> list[str]:
    """What the group of settings at ``path`` holds; empty if there is none."""
    found: Names | None = names
    for part in path:
        found = (found or {}).get(part)
    return list(found or {})


def _nearest_path(path: Sequence[str], names: Names | None) -> list[str] | None:
    """The option whose name is nearest part by part, the first parts before the later ones."""
    if names is None or not path:
        return None if path or names else []
    for part in difflib.get_close_matches(path[0], names, n=3, cutoff=0.6):
        rest = _nearest_path(path[1:], names[part])
        if rest is not None:
            return [part, *rest]
    return None


def _same_last_part(name: str, names: Names) -> list[list[str]]:
    """Options elsewhere that end in this name, or in the one nearest to it."""
    paths = _paths(names)
    near = difflib.get_close_matches(name, sorted({path[-1] for path in paths}), n=1, cutoff=0.7)
    return [path for path in paths if [path[-1]] == near][:3]


def _paths(names: Names) -> list[list[str]]:
    return [
        [name, *rest] for name, inside in names.items() for rest in (_paths(inside) if inside is not None else [[]])
    ]


def _spell(path: Sequence[str]) -> str:
    return "--" + ".".join(path).replace("_", "-")
