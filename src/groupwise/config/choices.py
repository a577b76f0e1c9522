"""Choices: settings with a name and parameters, as ``{"name": "cispo", "high": 5.0}`` or ``"cispo"``.

``recipes/`` has those of papers; ``register_recipe`` adds yours. Imports no torch.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from groupwise.config.base import OTHER_NAMES, Cfg
from groupwise.errors import ConfigError, UnknownNameError


class Choice(Cfg):
    """A member of a family of choices, described by the first line of its docstring."""

    name: str
    """Name in the registry."""
    source: ClassVar[str] = "groupwise"
    """URL of the paper or library; ``groupwise`` if it was developed here."""
    family: ClassVar[str] = ""
    """Name of the family in messages."""
    default: ClassVar[str] = ""
    """The member that parameters without a name belong to."""
    known: ClassVar[dict[str, type[Any] | str]] = {}
    """Members by name: classes, or modules that register them on import."""

    def __init__(self, /, **fields: Any) -> None:
        super().__init__(**{"name": type(self).own_name()} | fields)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # as in Cfg

    @classmethod
    def own_name(cls) -> str | None:
        """The default of the field ``name``, if it has one."""
        default = cls.model_fields["name"].default
        return default if isinstance(default, str) else None

    @classmethod
    def title(cls) -> str:
        """``schedule 'linear'``."""
        return f"{cls.family} {cls.own_name()!r}" if cls.own_name() else super().title()

    @classmethod
    def named(cls, name: str) -> type[Any]:
        """The member of this family with that name, or an ``UnknownNameError``."""
        found = cls.known.get(name)
        if isinstance(found, str):
            importlib.import_module(found)
            found = cls.known[name]
        if not isinstance(found, type):
            near = OTHER_NAMES.get(name)
            raise UnknownNameError(
                cls.family, name, cls.known, hint=f"did you mean {near!r}?" if near in cls.known else None
            )
        return found

    @classmethod
    def members(cls) -> list[type[Any]]:
        """All members of this family, sorted by name."""
        return [cls.named(name) for name in sorted(cls.known)]

    @classmethod
    def example(cls) -> str:
        """A name, as JSON."""
        return json.dumps(cls.default or min(cls.known))

    @classmethod
    def note(cls) -> str:
        """One-line description."""
        return (cls.__doc__ or "").partition("\n")[0].rstrip(".")

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: object, handler: Callable[[object], Self]) -> Any:
        if "known" not in vars(cls) or isinstance(value, Choice):
            return handler(value)
        if isinstance(value, str):
            value = {"name": value}
        if not isinstance(value, Mapping):
            return handler(value)
        return cls.named(str(value.get("name", cls.default))).model_validate(value)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        if "known" not in vars(cls):
            return handler(schema)
        return {
            "anyOf": [{"enum": sorted(cls.known)}, *(handler(kind.__pydantic_core_schema__) for kind in cls.members())]
        }


C = TypeVar("C", bound=type[Choice])


def register_recipe(choice: C) -> C:
    """Class decorator that registers a trust region, a baseline or another choice under the default of its ``name``.

    Raises:
        ConfigError: ``name`` has no default, or belongs to another class.
    """
    name = choice.own_name()
    if not name:
        raise ConfigError(f"{choice.__name__} has no name; fix: name: Literal['my_name'] = 'my_name'")
    taken = choice.known.get(name)
    again = repr(taken) == repr(choice)  # defined anew, as when a notebook's cell runs twice
    if taken not in (None, choice.__module__) and not again:
        raise ConfigError(f"{choice.family} {name!r} is registered already; fix: give {choice.__name__} another name")
    choice.known[name] = choice
    return choice
