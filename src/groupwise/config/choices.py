"""Choices: settings with a name and parameters, as ``{"name": "cispo", "high": 5.0}`` or ``"cispo"``.

A member is a settings class (``register_choice``), or a function whose signature is its settings (``settings_of``): trust
regions, corrections and baselines are functions. Imports no torch.
"""

import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self, TypeVar, get_type_hints

from pydantic import Field, GetJsonSchemaHandler, create_model, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from groupwise.config.base import OTHER_NAMES, Cfg
from groupwise.errors import ConfigError, UnknownNameError, require_name


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

    def parameters(self) -> dict[str, Any]:
        """Settings other than the name."""
        return {name: value for name, value in vars(self).items() if name != "name"}

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


def register_choice(choice: C) -> C:
    """Class decorator that registers a tracker, a schedule or another choice under the default of its ``name``.

    Raises:
        ConfigError: ``name`` has no default, or belongs to another class.
    """
    name = choice.own_name()
    if not name:
        raise ConfigError(f"{choice.__name__} has no name; fix: name: Literal['my_name'] = 'my_name'")
    taken = choice.known.get(name)
    again = repr(taken) == repr(choice)  # defined anew, as when a notebook's cell runs twice
    if taken not in (None, choice.__module__) and not again:
        raise ConfigError(f"{choice.family} {name!r} is registered already; fix: another name")
    choice.known[name] = choice
    return choice


def settings_of(
    function: Callable[..., Any], name: str, family: type[Choice], check: Callable[..., None] | None, **attributes: Any
) -> None:
    """Register settings that a function's signature describes: types, bounds and defaults of all but its first parameter.

    A setting's text stands under ``Args:`` of the docstring. A parameter that the family's default member has too, such as
    ``clip_low``, takes type and text from there. ``Source:`` gives the URL. The class is the function's ``Settings``.

    Args:
        check: called with the settings; raises a ``ValueError`` where they contradict each other.
        attributes: class attributes of the settings.

    Raises:
        ConfigError: the name is taken, or a parameter has no type.
    """
    require_name(family.family, name)
    doc, hints = inspect.getdoc(function) or "", get_type_hints(function, include_extras=True)
    arguments = re.search(r"^Args:\n((?:(?: {4}.*)?\n?)*)", doc, re.MULTILINE)
    texts = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments[1] if arguments else "", re.MULTILINE))
    shared = family.named(family.default).model_fields
    fields: Any = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        key, default = parameter.name, parameter.default
        default = ... if default is parameter.empty else default
        if key in shared:
            fields[key] = shared[key].rebuild_annotation(), Field(default, description=shared[key].description)
        elif key in hints:
            fields[key] = hints[key], Field(default, description=" ".join(texts.get(key, "").split()) or None)
        else:
            raise ConfigError(f"setting {key!r} of {family.family} {name!r} has no type; fix: {key}: float")

    def checked(self: Choice) -> Choice:
        if check is not None:
            check(**self.parameters())
        return self

    source = re.search(r"^Source: .*?(https://[^\s,;]+)", doc, re.MULTILINE)
    made: dict[str, Any] = {
        "__validators__": {"checked": model_validator(mode="after")(checked)},
        "name": (Literal[name], name),
        **fields,
    }
    settings: Any = create_model(
        "Settings",
        __base__=family,
        __doc__=doc,
        __module__=function.__module__,
        __qualname__=f"{function.__qualname__}.Settings",
        **made,
    )
    for attribute, value in {"source": source[1].rstrip(".") if source else Choice.source, **attributes}.items():
        setattr(settings, attribute, value)
    register_choice(settings)
    vars(function)["Settings"] = settings
