"""Clip ranges: a number, or a schedule over training. Imports no torch."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, SerializeAsAny, TypeAdapter, WrapValidator

from groupwise.config.base import NonNegative, Positive
from groupwise.config.choices import Choice, register_recipe


class RangeScheduleCfg(Choice):
    """How a clip range changes over training. Subclass it with an ``at``, and ``@register_recipe`` it."""

    family: ClassVar = "schedule of a clip range"
    default: ClassVar = "linear"
    known: ClassVar = {}

    def at(self, progress: float) -> float:
        """The range at a share ``progress`` of training, in [0, 1]."""
        raise NotImplementedError(f"{type(self).__name__} has no at()")


@register_recipe
class LinearRangeCfg(RangeScheduleCfg):
    """In a straight line from ``start`` to ``end``."""

    name: Literal["linear"] = "linear"
    start: Positive
    """Range at the beginning of training."""
    end: NonNegative = 0.0
    """Range at its end."""

    def at(self, progress: float) -> float:
        """``start + progress * (end - start)``."""
        return self.start + progress * (self.end - self.start)


_NUMBER: TypeAdapter[float] = TypeAdapter(Positive, config=ConfigDict(allow_inf_nan=False))


def _number_or_schedule(value: object, handler: Callable[[object], Any]) -> float | RangeScheduleCfg:
    """Check the one that was meant: the errors of a union name both."""
    if isinstance(value, Mapping | RangeScheduleCfg):
        return RangeScheduleCfg.model_validate(value)
    return _NUMBER.validate_python(value)


ClipRange: TypeAlias = Annotated[Positive | SerializeAsAny[RangeScheduleCfg], WrapValidator(_number_or_schedule)]
"""A number, or ``{"name": "linear", "start": 0.2, "end": 0.05}``."""


def range_at(value: float | RangeScheduleCfg, progress: float = 0.0) -> float:
    """The number at a share ``progress`` of training."""
    return value.at(progress) if isinstance(value, RangeScheduleCfg) else value
