"""Choices: settings with a name and parameters, as ``{"name": "cispo", "high": 5.0}`` or ``"cispo"``.

``recipes/`` has those of papers; ``register_recipe`` adds yours. Imports no torch.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from groupwise.config.base import Cfg
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
    known: ClassVar[dict[str, "type[Choice] | str"]] = {}
    """Members by name: classes, or modules that register them on import."""

    def __init__(self, /, **fields: Any) -> None:
        super().__init__(**{"name": type(self).own_name()} | fields)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # as in Cfg

    @classmethod
    def named(cls, name: str) -> "type[Choice]":
        """The member of this family with that name, or an ``UnknownNameError``."""
        found = cls.known.get(name)
        if isinstance(found, str):
            importlib.import_module(found)
            found = cls.known[name]
        if not isinstance(found, type):
            raise UnknownNameError(cls.family, name, cls.known)
        return found

    @classmethod
    def members(cls) -> "list[type[Choice]]":
        """All members of this family, sorted by name."""
        return [cls.named(name) for name in sorted(cls.known)]

    @classmethod
    def note(cls) -> str:
        """One-line description."""
        return (cls.__doc__ or "").partition("\n")[0].rstrip(".")

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: object, handler: Callable[[object], Self]) -> Any:
        if "known" not in vars(cls) or isinstance(value, Choice):
            return handler(value)
        value = {"name": value} if isinstance(value, str) else value
        name = value.get("name") or cls.default if isinstance(value, Mapping) else value
        return cls.named(str(name)).model_validate(value)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        if "known" not in vars(cls):
            return handler(schema)
        return {"anyOf": [{"enum": sorted(cls.known)}, *(kind.model_json_schema() for kind in cls.members())]}


def merge_choice(low: object, high: object, family: type[Choice]) -> Any:
    """``high`` over ``low``: parameter by parameter if both have the same name, otherwise as a whole."""
    below, above = ({"name": value} if isinstance(value, str) else value for value in (low, high))
    if not isinstance(below, dict) or not isinstance(above, dict):
        return high
    name = below.get("name", family.default)
    return {**below, **above} if above.get("name", name) == name else high


C = TypeVar("C", bound=type[Choice])


def register_recipe(choice: C) -> C:
    """Class decorator that registers a trust region, a baseline or another choice under the default of its ``name``.

    Raises:
        ConfigError: ``name`` has no default, or belongs to another class.
    """
    name = choice.own_name()
    if name is None:
        raise ConfigError(f"{choice.__name__} has no name; fix: name: Literal['my_name'] = 'my_name'")
    taken = choice.known.get(name)
    if taken is not None and not (taken == choice.__module__ or same_definition(taken, choice)):
        raise ConfigError(f"{choice.family} {name!r} is registered already; fix: give {choice.__name__} another name")
    choice.known[name] = choice
    return choice


def same_definition(one: object, other: type) -> bool:
    """Whether two classes come from the same line of code, as when a notebook cell runs twice."""
    return isinstance(one, type) and (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)
