"""Clip ranges: a number, or a schedule over training. Imports no torch."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, TypeAdapter, WrapValidator

from groupwise.config.base import Cfg, NonNegative, Positive


class LinearRangeCfg(Cfg):
    """In a straight line from ``start`` to ``end``."""

    name: Literal["linear"] = "linear"
    """The only schedule."""
    start: Positive
    """Range at the beginning of training."""
    end: NonNegative = 0.0
    """Range at its end."""


_NUMBER: TypeAdapter[float] = TypeAdapter(Positive, config=ConfigDict(allow_inf_nan=False))


def _number_or_schedule(value: object, handler: Callable[[object], Any]) -> float | LinearRangeCfg:
    """Check the one that was meant: the errors of a union name both."""
    if isinstance(value, Mapping | LinearRangeCfg):
        return LinearRangeCfg.model_validate(value)
    return _NUMBER.validate_python(value)


ClipRange: TypeAlias = Annotated[Positive | LinearRangeCfg, WrapValidator(_number_or_schedule)]
"""A number, or ``{"name": "linear", "start": 0.2, "end": 0.05}``."""


def range_at(value: float | LinearRangeCfg, progress: float = 0.0) -> float:
    """The number at a share ``progress`` of training."""
    return value.start + progress * (value.end - value.start) if isinstance(value, LinearRangeCfg) else value
