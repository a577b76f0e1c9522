"""The settings of members: what may be searched, first values, and where they stand in a run's config."""

from collections.abc import Mapping
from random import Random
from typing import Any

from pydantic import ValidationError

from groupwise.config.base import explain
from groupwise.config.evolution import Choices, RangeCfg, Value
from groupwise.config.run import CommonCfg
from groupwise.errors import ConfigError, nearest
from groupwise.training.fork import is_fixed

Search = Mapping[str, RangeCfg | Choices]

_OF_ALL = (
    "seed", "run_dir", "total_steps", "total_iterations", "total_epochs", "evaluation", "logging", "stop",
    "checkpoint_interval", "keep_checkpoints", "ddp_timeout",
)  # fmt: skip
"""Settings that all members share."""


def check_search(search: Search, base: CommonCfg) -> None:
    """Refuse what cannot be searched, before anything starts.

    Raises:
        ConfigError: a path is no setting or cannot change in mid-run, or a bound or value is not allowed.
    """
    for path, space in search.items():
        setting_at(base, path)
        values = (space.min, space.max) if isinstance(space, RangeCfg) else space
        no_reference = path == "algorithm.kl_coef" and 0 in values
        if is_fixed(path) or path.split(".")[0] in _OF_ALL or no_reference:
            what = f"{path} = 0" if no_reference else path
            raise ConfigError(f"search: {what} cannot change in the middle of a run; fix: leave it out")
        if inside := [other for other in search if other.startswith(f"{path}.")]:
            raise ConfigError(f"search: {inside[0]} is a part of {path}; fix: one of the two")
        for value in values:
            with_settings(base, {path: fitted(base, path, value)})


def first_settings(search: Search, base: CommonCfg, random: Random) -> dict[str, Value]:
    """Random values of all searched settings."""
    return {path: fitted(base, path, _draw(space, random)) for path, space in search.items()}


def _draw(space: RangeCfg | Choices, random: Random) -> Value:
    return space.draw(random) if isinstance(space, RangeCfg) else random.choice(space)


def fitted(base: CommonCfg, path: str, value: Value) -> Value:
    """``value``, rounded where the setting at ``path`` is a whole number."""
    return round(value) if isinstance(value, float) and isinstance(setting_at(base, path), int) else value


def check_within(search: Search, settings: Mapping[str, Value], owner: str) -> None:
    """Refuse settings that are not those that are searched, or outside of the search space."""
    if settings.keys() != search.keys():
        raise ConfigError(f"{owner} gave settings {', '.join(settings)}; expected {', '.join(search)}")
    for path, space in search.items():
        value = settings[path]
        within = (
            isinstance(value, int | float) and space.min <= value <= space.max
            if isinstance(space, RangeCfg)
            else value in space
        )
        if not within:
            raise ConfigError(f"{owner} gave {path} = {value!r}; expected a value of the search space")


def with_settings(base: CommonCfg, settings: Mapping[str, Value], **fields: Any) -> CommonCfg:
    """``base`` with these settings, by path, and other fields.

    Raises:
        ConfigError: they are not possible.
    """
    tree = base.model_dump(mode="json") | fields
    for path, value in settings.items():
        *tables, name = path.split(".")
        table = tree
        for key in tables:
            table = table[key]
        table[name] = value
    try:
        return type(base).model_validate(tree)
    except ValidationError as error:
        shown = ", ".join(f"{path} = {value!r}" for path, value in settings.items())
        raise ConfigError(f"search: {shown} is not possible: {'; '.join(map(explain, error.errors()))}") from error


def setting_at(base: CommonCfg, path: str) -> Any:
    """The setting at a path.

    Raises:
        ConfigError: there is none.
    """
    found: Any = base.model_dump(mode="json")
    for key in path.split("."):
        if not isinstance(found, dict) or key not in found:
            known = (
                [f"{path.rpartition('.')[0]}.{name}".lstrip(".") for name in found] if isinstance(found, dict) else []
            )
            raise ConfigError(f"search: there is no setting {path!r}{nearest(path, known)}")
        found = found[key]
    return found
