"""What rewards and tools have in common: functions and classes that settings name."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from groupwise.errors import ConfigError, nearest


def check_settings(
    what: str, made: Callable[..., Any], settings: Mapping[str, Any], *, first: Sequence[Any] = (), complete: bool
) -> None:
    """Refuse settings that do not exist or have the wrong type.

    Args:
        first: positional arguments that precede them.
        complete: refuse missing settings, too.

    Raises:
        ConfigError: names the setting.
    """
    signature = inspect.signature(made)
    try:
        signature.bind_partial(*first, **settings)  # first of all: a typing error is no missing setting
        if complete:
            signature.bind(*first, **settings)
    except TypeError as error:
        unknown = next((key for key in settings if key not in signature.parameters), "")
        hint = nearest(unknown, signature.parameters) or f"; fix: settings that fit {signature}"
        raise ConfigError(f"{what}: {error}{hint}") from error
    hints = get_type_hints(made.__init__ if inspect.isclass(made) else made)
    for key in settings.keys() & hints.keys():
        try:
            TypeAdapter(hints[key]).validate_python(settings[key], strict=True)
        except PydanticSchemaGenerationError:  # a type that only its owner can check
            continue
        except ValidationError as error:
            raise ConfigError(
                f"{what}: {key} = {settings[key]!r}: {error.errors()[0]['msg']}; fix: its value"
            ) from error
