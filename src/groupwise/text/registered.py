"""What rewards and tools have in common: functions and classes that settings name."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_type_hints

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from groupwise.errors import ConfigError, nearest


def register(kind: str, registry: dict[str, Any], name: str) -> Callable[[Any], Any]:
    """Decorator: add to the registry.

    Raises:
        ConfigError: the name is taken.
    """

    def add(made: Any) -> Any:
        if name in registry:
            raise ConfigError(f"{kind} {name!r} is registered already; fix: choose another name")
        registry[name] = made
        return made

    return add


def check_settings(
    what: str, made: Callable[..., Any], settings: Mapping[str, Any], *, others: Collection[str], complete: bool
) -> None:
    """Refuse settings that do not exist or have the wrong type.

    Args:
        others: arguments that are no settings.
        complete: refuse missing settings, too.

    Raises:
        ConfigError: names the setting.
    """
    parameters = inspect.signature(made).parameters
    known = [name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD and name not in others]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for key in settings:
        if key not in known and not anything:
            hint = nearest(key, known) or f"; known: {', '.join(known)}"
            raise ConfigError(f"{what} has no setting {key!r}{hint}")
    missing = [name for name in known if parameters[name].default is inspect.Parameter.empty and name not in settings]
    if complete and missing:
        raise ConfigError(f"{what} needs the setting {missing[0]!r}; fix: kwargs={{{missing[0]!r}: ...}}")
    hints = get_type_hints(made.__init__ if inspect.isclass(made) else made)
    for key in settings.keys() & hints.keys():
        _check_type(f"{what}: {key}", settings[key], hints[key])


def _check_type(what: str, value: object, hint: Any) -> None:
    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except PydanticSchemaGenerationError:  # a type that only its owner can check
        return
    except ValidationError as error:
        raise ConfigError(f"{what} = {value!r}: {error.errors()[0]['msg']}; fix: its value") from error
