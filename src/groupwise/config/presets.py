"""Presets, read from the JSON files in ``presets/``.

``<environment id>.json`` and ``default.json``: a partial ``RunCfg`` per algorithm. ``text.json``: a partial ``TextRunCfg``;
``text_lora.json`` overrides it for adapters. ``objectives.json``: credit and objective of papers and libraries.
``choices.json``: description and source of choices without a class.
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.config.choices import Choice
from groupwise.config.credit import CreditCfg
from groupwise.config.objective import ObjectiveCfg
from groupwise.errors import UnknownNameError

Tree = dict[str, Any]
"""A partial config as plain data: nested dicts keyed by field."""


class ObjectivePreset(NamedTuple):
    """Credit and objective of a paper or a library."""

    title: str
    source: str
    """URL."""
    note: str
    settings: Tree
    """Fields of ``GRPOCfg``."""


class ChoiceNote(NamedTuple):
    """Description of one value of a setting."""

    note: str
    source: str
    """URL, or ``groupwise`` where it began here."""


@functools.cache
def objective_presets() -> dict[str, ObjectivePreset]:
    """The presets that ``preset`` may name."""
    return {
        name: ObjectivePreset(data.pop("title"), data.pop("source"), data.pop("note"), data)
        for name, data in read("objectives").items()
    }


def objective_preset(name: str) -> ObjectivePreset:
    """The preset of that name.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in objective_presets():
        raise UnknownNameError("preset", name, ["auto", *objective_presets()])
    return objective_presets()[name]


@functools.cache
def choices() -> dict[str, ChoiceNote]:
    """Description of each choice, by keys like ``credit.scale.std``."""
    plain = {name: ChoiceNote(**data) for name, data in read("choices").items()}
    return plain | {
        f"{part}.{field}.{kind.own_name()}": ChoiceNote(kind.note(), kind.source)
        for part, cfg_type in (("credit", CreditCfg), ("objective", ObjectiveCfg))
        for field, info in cfg_type.model_fields.items()
        if isinstance(info.default, Choice)
        for kind in info.default.members()
    }


@functools.cache
def env_ids() -> tuple[str, ...]:
    """Environments with a preset; all others use ``default.json``."""
    return tuple(sorted(path.stem for path in Path(__file__).with_name("presets").glob("*-v*.json")))


def env_preset(env_id: str) -> dict[str, Tree]:
    """Partial ``RunCfg`` of the environment, by algorithm."""
    return read(env_id if env_id in env_ids() else "default")


def read(name: str) -> Tree:
    """The content of a file in ``presets/``."""
    tree: Tree = json.loads((Path(__file__).with_name("presets") / f"{name}.json").read_text(encoding="utf-8"))
    return tree
