"""The base of all config classes: frozen, no unknown keys, documented fields, clear errors. Imports no torch."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, get_args

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict, ValidationError

from groupwise.errors import ConfigError, nearest

PositiveInt = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]

GIVEN = "<given in Python>"
"""Placeholder in a config for an object passed in Python."""


class Cfg(BaseModel):
    """A frozen group of settings. The docstring of a field gives its meaning, unit, range and the source of its default.

    Raises:
        ConfigError: a field is unknown, or its value is wrong.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    def __init__(self, /, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            lines = [explain(item, type(self), fields) for item in complaints(error)]
            raise ConfigError("\n".join(f"{type(self).__name__}: {line}" for line in lines)) from error

    # Marked as pydantic marks its own __init__: then pydantic calls it only for the outermost config, and errors inside
    # keep their full path. There is no public way: an error raised by a validator becomes a ValidationError.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def own_name(cls) -> str | None:
        """The default of the field ``name``, if it has one."""
        default = cls.model_fields["name"].default
        return default if isinstance(default, str) else None

    @classmethod
    def child_type(cls, key: str, fields: Mapping[str, Any]) -> "type[Cfg] | None":
        """Config class of a field; None where it holds plain data or does not exist.

        Args:
            fields: values of the config's fields, on which the class may depend.
        """
        declared = cls.declared_type(key)
        return declared and declared.type_for(fields.get(key))

    @classmethod
    def declared_type(cls, key: str) -> "type[Cfg] | None":
        """Config class in a field's annotation, also of ``LoRACfg | None``; None for plain data."""
        annotation = cls.model_fields[key].annotation if key in cls.model_fields else None
        kinds = (kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type))
        return next((kind for kind in kinds if issubclass(kind, Cfg)), None)

    @classmethod
    def type_for(cls, value: object) -> "type[Cfg]":
        """The class that reads ``value``, for a field of this class."""
        return cls


def complaints(error: ValidationError) -> list[dict[str, Any]]:
    """Pydantic's errors, one per wrong setting."""
    return [{**item} for item in error.errors(include_url=False)]


def explain(item: Mapping[str, Any], root: type[Cfg], fields: Mapping[str, Any]) -> str:
    """One line on an error: key path, value, what was expected, the nearest name.

    Args:
        root: the class of the whole config.
        fields: its values.
    """
    loc = tuple(map(str, item["loc"]))
    path = ".".join(loc)
    match item["type"]:
        case "extra_forbidden":
            return _explain_unknown_key(loc, root, fields)
        case "literal_error":
            choices = re.findall(r"[^\s',]+(?=')|\b\d+\b", item["ctx"]["expected"])
            hint = nearest(str(item["input"]), choices)
            return f"{path} = {item['input']!r}: expected one of {', '.join(choices)}{hint}"
        case "value_error":
            return f"{path}: {item['ctx']['error']}" if path else str(item["ctx"]["error"])
        case _:
            return f"{path} = {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _explain_unknown_key(loc: tuple[str, ...], root: type[Cfg], fields: Mapping[str, Any]) -> str:
    parent: type[Cfg] | None = root
    for key in loc[:-1]:
        parent = parent.child_type(key, fields) if parent else None
        inside = fields.get(key)
        fields = inside if isinstance(inside, Mapping) else {}
    known = sorted(parent.model_fields) if parent else []
    where = f" in {'.'.join(loc[:-1])}" if len(loc) > 1 else ""
    return f"unknown key {loc[-1]!r}{where}{nearest(loc[-1], known) or '; known: ' + ', '.join(known)}"
