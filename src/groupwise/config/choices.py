"""Settings that are one of several by name, each with parameters of its own: ``{"name": "cispo", "high": 5.0}``, or ``"cispo"``.

Those that ship are found by the names of the files in ``recipes/``; ``register_recipe`` adds yours. Imports no torch.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from groupwise.config.base import Cfg
from groupwise.errors import ConfigError, UnknownNameError

RECIPES = "groupwise.recipes"


class Choice(Cfg):
    """One of a family. The docstring's first line says what it does, and ``source`` where it comes from."""

    name: str
    """Name in the registry."""
    source: ClassVar[str] = "groupwise"
    """URL of the paper or library; ``groupwise`` where it began here."""
    family: ClassVar[str] = ""
    """What its settings are called in messages."""
    default: ClassVar[str] = ""
    """Name of the family's member that parameters without a name are for."""
    known: ClassVar[dict[str, "type[Choice] | str"]] = {}
    """The family by name: classes, or modules that register one when they are imported."""

    def __init__(self, /, **fields: Any) -> None:
        super().__init__(**{"name": type(self).own_name()} | fields)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # as in Cfg

    @classmethod
    def named(cls, name: str) -> "type[Choice]":
        """The member of this family with that name.

        Raises:
            UnknownNameError: there is none.
        """
        found = cls.known.get(name)
        if isinstance(found, str):
            importlib.import_module(found)
            found = cls.known[name]
        if not isinstance(found, type):
            raise UnknownNameError(cls.family, name, cls.known)
        return found

    @classmethod
    def own_name(cls) -> str | None:
        """The name that it registers under; None if it gives none."""
        default = cls.model_fields["name"].default
        return default if isinstance(default, str) else None

    @classmethod
    def members(cls) -> "list[type[Choice]]":
        """Every member of this family, in the order of their names."""
        return [cls.named(name) for name in sorted(cls.known)]

    @classmethod
    def type_for(cls, value: object) -> "type[Choice]":
        """The class that reads ``value``: this one, or of a family the member that is named, if there is one."""
        name = _name_in(value) or cls.default
        return cls.named(name) if "known" in vars(cls) and name in cls.known else cls

    @classmethod
    def note(cls) -> str:
        """What it does, in a line."""
        return (cls.__doc__ or "").partition("\n")[0].rstrip(".")

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, value: object, handler: Callable[[object], Self]) -> Any:
        if "known" not in vars(cls) or isinstance(value, Choice):
            return handler(value)
        value = {"name": value} if isinstance(value, str) else value
        return cls.named(_name_in(value) or cls.default).model_validate(value)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        if "known" not in vars(cls):
            return handler(schema)
        return {"anyOf": [{"enum": sorted(cls.known)}, *(kind.model_json_schema() for kind in cls.members())]}


def merge_choice(low: object, high: object, family: type[Choice]) -> Any:
    """``high`` over ``low``: parameter by parameter where both are of the same name, else as a whole."""
    below, above = ({"name": value} if isinstance(value, str) else value for value in (low, high))
    if not isinstance(below, dict) or not isinstance(above, dict):
        return high
    name = below.get("name", family.default)
    return {**below, **above} if above.get("name", name) == name else high


def recipes_in(folder: str) -> dict[str, type[Choice] | str]:
    """The modules of a folder of recipes by their file names, which are the names of what they register."""
    files = Path(__file__).parents[1].joinpath("recipes", folder).glob("[!_]*.py")
    return {path.stem: f"{RECIPES}.{folder}.{path.stem}" for path in files}


def _name_in(value: object) -> str | None:
    """The name that a choice is given by, None if it is left out."""
    name = value.get("name") if isinstance(value, Mapping) else value
    return name if name is None else str(name)


C = TypeVar("C", bound=type[Choice])


def register_recipe(choice: C) -> C:
    """Class decorator: make a trust region or a baseline available under the default of its ``name``.

    A class of the same module and name may be registered again, as a notebook does when a cell runs twice.

    Raises:
        ConfigError: ``name`` has no default, or belongs to another class.
    """
    name = choice.own_name()
    if name is None:
        raise ConfigError(f"{choice.__name__} has no name; fix: name: Literal['my_name'] = 'my_name'")
    taken = choice.known.get(name)
    own = choice.__module__ if isinstance(taken, str) else (choice.__module__, choice.__qualname__)
    theirs = taken if taken is None or isinstance(taken, str) else (taken.__module__, taken.__qualname__)
    if theirs not in (None, own):
        raise ConfigError(f"{choice.family} {name!r} is registered already; fix: give {choice.__name__} another name")
    choice.known[name] = choice
    return choice
