"""The base of every config class: frozen, no unknown keys, documented fields, clear complaints. Imports no torch."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, get_args

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from groupwise.errors import ConfigError, nearest

PositiveInt = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]


def choice(default: str) -> BeforeValidator:
    """Lets a field of several config classes, told apart by ``name``, be given by a bare name, or without one.

    ``schedule: Annotated[Constant | Linear, Field(discriminator="name"), choice("none")] = Constant()`` takes
    ``"linear"``, ``{"name": "linear", "final": 0.1}`` and ``Linear(final=0.1)``. The default's class comes first.
    """

    def named(value: object) -> object:
        if isinstance(value, str):
            return {"name": value}
        return {"name": default, **value} if isinstance(value, dict) else value

    return BeforeValidator(named)


GIVEN = "<given in Python>"
"""Stands in a config for an object that was passed in."""


class Cfg(BaseModel):
    """A frozen group of settings. Each field's docstring gives meaning, unit, range and where its default comes from.

    Raises:
        ConfigError: a field is unknown or its value impossible.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            said = [explain(item, type(self), fields) for item in complaints(error)]
            raise ConfigError("\n".join(f"{type(self).__name__}: {line}" for line in said)) from error

    # So marked, as pydantic marks its own, it is run for what a user builds, and not for each config inside another, whose
    # complaints then keep their place in the whole. There is no public way: what a validator raises becomes a ValidationError,
    # which a ConfigError, being a ValueError, cannot escape, and the metaclass, whose __call__ could catch that, is private too.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def child_type(cls, key: str, fields: Mapping[str, Any]) -> "type[Cfg] | None":
        """Config class of a field; None where it holds plain data or does not exist.

        Args:
            fields: what the config is made of, where the class depends on that.
        """
        kinds = cls.kinds(key)
        value = fields.get(key)
        name = value.get("name") if isinstance(value, Mapping) else value if isinstance(value, str) else None
        named = [kind for kind in kinds if "name" in kind.model_fields and kind.model_fields["name"].default == name]
        found = next(iter([*named, *kinds]), None)
        return found and found.type_for(value)

    @classmethod
    def kinds(cls, key: str) -> "list[type[Cfg]]":
        """Config classes that a field may hold: none for plain data, several for a choice by ``name``."""
        annotation = cls.model_fields[key].annotation if key in cls.model_fields else None
        found = [annotation, *get_args(annotation)]  # of ``LoRACfg | None``, too
        return [kind for kind in found if isinstance(kind, type) and issubclass(kind, Cfg)]

    @classmethod
    def type_for(cls, value: object) -> "type[Cfg]":
        """The class that reads ``value`` where this one is asked for."""
        return cls


def complaints(error: ValidationError) -> list[dict[str, Any]]:
    """Pydantic's complaints, one per wrong setting."""
    return [{**item} for item in error.errors(include_url=False)]


def explain(item: Mapping[str, Any], root: type[Cfg], fields: Mapping[str, Any]) -> str:
    """One line on a complaint: key path, value, what was expected, the nearest name.

    Args:
        root: the config that was to be made, of ``fields``.
    """
    loc = _without_tags(tuple(map(str, item["loc"])), root, fields)
    path = ".".join(loc)
    match item["type"]:
        case "extra_forbidden":
            return _explain_unknown_key(loc, root, fields)
        case "literal_error":
            return _expected_one_of(path, item["input"], item["ctx"]["expected"])
        case "union_tag_invalid":
            return _expected_one_of(path, item["ctx"]["tag"], item["ctx"]["expected_tags"])
        case "value_error":
            return f"{path}: {item['ctx']['error']}" if path else str(item["ctx"]["error"])
        case _:
            return f"{path} = {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _expected_one_of(path: str, found: object, expected: str) -> str:
    choices = re.findall(r"[^\s',]+(?=')|\b\d+\b", expected)
    return f"{path} = {found!r}: expected one of {', '.join(choices)}{nearest(str(found), choices)}"


def _without_tags(loc: tuple[str, ...], root: type[Cfg], fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The path of a complaint without the names of choices, which pydantic puts behind the field's."""
    path: list[str] = []
    parent: type[Cfg] | None = root
    keys = iter(loc)
    for key in keys:
        path.append(key)
        if parent is None:
            continue
        if len(parent.kinds(key)) > 1:
            next(keys, None)
        parent = parent.child_type(key, fields)
        inside = fields.get(key)
        fields = inside if isinstance(inside, Mapping) else {}
    return tuple(path)


def _explain_unknown_key(loc: tuple[str, ...], root: type[Cfg], fields: Mapping[str, Any]) -> str:
    parent: type[Cfg] | None = root
    for key in loc[:-1]:
        parent = parent.child_type(key, fields) if parent else None
        inside = fields.get(key)
        fields = inside if isinstance(inside, Mapping) else {}
    known = sorted(parent.model_fields) if parent else []
    where = f" in {'.'.join(loc[:-1])}" if len(loc) > 1 else ""
    return f"unknown key {loc[-1]!r}{where}{nearest(loc[-1], known) or '; known: ' + ', '.join(known)}"
