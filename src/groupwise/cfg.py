"""The base of every config class: frozen, no unknown keys, documented fields. Imports no torch."""

from pydantic import BaseModel, ConfigDict


class Cfg(BaseModel):
    """A frozen group of settings. Each field's docstring gives meaning, unit, range and where its default comes from."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
