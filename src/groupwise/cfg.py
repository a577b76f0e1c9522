"""The base of every config class: frozen, no unknown keys, documented fields. Imports no torch."""

from typing import Annotated

from annotated_types import Ge, Gt, Le
from pydantic import BaseModel, ConfigDict

PositiveInt = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]


class Cfg(BaseModel):
    """A frozen group of settings. Each field's docstring gives meaning, unit, range and where its default comes from."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
