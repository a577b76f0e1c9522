"""Writes the pages that are made from the code: every setting, every preset.

    python docs/generate.py

A test compares them with what this script would write, so they cannot go stale.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from groupwise.algorithms.configs import (
    AlgorithmCfg,
    BranchCfg,
    CollectionCfg,
    CreditCfg,
    GRPOCfg,
    ObjectiveCfg,
    OptimizerCfg,
    PPOCfg,
    ReferenceCfg,
    ScheduleCfg,
)
from groupwise.algorithms.objective_configs import (
    CispoCfg,
    CorrectionCfg,
    CovarianceCfg,
    DppoCfg,
    EntropyCfg,
    SapoCfg,
    VespoCfg,
)
from groupwise.cfg import Cfg
from groupwise.config import presets
from groupwise.envs.configs import EnvCfg
from groupwise.policies.configs import EvalSamplingCfg, LoRACfg, ModelCfg, PolicyCfg, SamplingCfg
from groupwise.settings import (
    AgreementCfg,
    CommonCfg,
    EvaluationCfg,
    LoggingCfg,
    OverlongCfg,
    RunCfg,
    StopCfg,
    TextEvaluationCfg,
    TextRunCfg,
)
from groupwise.text.configs import RewardCfg, TextTaskCfg

FOLDER = Path(__file__).parent / "generated"

CLASSES: tuple[type[Cfg], ...] = (
    CommonCfg, RunCfg, TextRunCfg, EnvCfg, AlgorithmCfg, GRPOCfg, PPOCfg, CollectionCfg, BranchCfg, CreditCfg, ObjectiveCfg, CorrectionCfg, CispoCfg, SapoCfg, VespoCfg, DppoCfg,
    CovarianceCfg, EntropyCfg, ReferenceCfg, OptimizerCfg, ScheduleCfg,
    PolicyCfg, TextTaskCfg, RewardCfg, ModelCfg, LoRACfg, SamplingCfg, EvalSamplingCfg, OverlongCfg, AgreementCfg, EvaluationCfg, TextEvaluationCfg,
    StopCfg, LoggingCfg,
)  # fmt: skip

NOTE = "<!-- Written by docs/generate.py. Change the code or the preset files, then run it again. -->"


def pages() -> dict[Path, str]:
    """Text of each generated page by its path."""
    return {FOLDER / "settings.md": settings_page(), FOLDER / "presets.md": presets_page()}


def settings_page() -> str:
    """Every config class with its fields: type, default, docstring."""
    sections = [
        "# Every setting",
        NOTE,
        "A setting is named by the fields that lead to it: `algorithm.credit.scale`. In a JSON file they are nested "
        "objects; on the command line it is `--algorithm.credit.scale`, with `-` in place of `_`. `null` is `None` in "
        "Python and on the command line. The defaults are those of the classes; the "
        "[preset of the environment](presets.md#settings-per-environment) goes over them.",
        *(_class_section(cls) for cls in CLASSES),
    ]
    return "\n\n".join(sections) + "\n"


def _class_section(cls: type[Cfg]) -> str:
    base = cls.__bases__[0]
    inherited = set(base.model_fields) - {"name"} if issubclass(base, Cfg) else set()
    rows = [
        (f"`{name}`", _type(_annotation(field)), _default(field), field.description or "")
        for name, field in cls.model_fields.items()
        if name not in inherited
    ]
    more = f" It also has every field of [`{base.__name__}`](#{base.__name__.lower()})." if inherited else ""
    summary = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
    return "\n\n".join([f"## {cls.__name__}", summary + more, _table(("field", "type", "default", "meaning"), rows)])


def _annotation(field: FieldInfo) -> Any:
    """The type as it was written: pydantic keeps the bounds of a bare ``Annotated`` apart."""
    bounds = tuple(item for item in field.metadata if isinstance(item, Ge | Gt | Le))
    return Annotated[(field.annotation, *bounds)] if bounds else field.annotation


def _type(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return " ".join([_type(args[0]), ", ".join(filter(None, map(_bound, args[1:])))]).strip()
    if origin is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in args)
    if origin in (Union, UnionType):
        return " or ".join("`null`" if part is type(None) else _type(part) for part in args)
    if origin is tuple:
        return f"list of {_type(args[0])}" if args[1] is Ellipsis else f"[{', '.join(map(_type, args))}]"
    if origin is dict:
        return "object"
    if isinstance(kind, type) and issubclass(kind, Cfg):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    return {"bool": "`true`, `false`", "str": "text", "Path": "path"}.get(kind.__name__, kind.__name__)


def _bound(item: Any) -> str:
    match item:
        case Ge(value):
            return f"≥ {value}"
        case Gt(value):
            return f"> {value}"
        case Le(value):
            return f"≤ {value}"
    return ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if isinstance(value, Cfg):
        return f"`{type(value).__name__}()`"
    return f"`{json.dumps(value)}`"


def presets_page() -> str:
    """Objective presets and single choices with their sources, and the settings of each environment."""
    sections = [
        "# Presets and choices",
        NOTE,
        "## Credit and objective of papers and libraries",
        "`groupwise train ENV --preset NAME`, or `gw.train(env, preset=NAME)`. A preset replaces credit and objective as a "
        "whole; settings of yours go over it. Everything else (group size, learning rate, ...) stays the environment's.",
        "<!-- objectives -->",
        _objectives(),
        "<!-- end -->",
        "## Every choice of credit and objective",
        _choices(),
        "## Settings per environment",
        "What differs from the defaults of the classes. Environments without a table of their own take that of "
        "`default`.",
        *(_environment(name) for name in (*presets.env_ids(), "default")),
    ]
    return "\n\n".join(sections) + "\n"


def _objectives() -> str:
    rows = [
        (
            f"`{name}`",
            f"{p.title}. {p.note}",
            _settings(p.settings["credit"]),
            _settings(p.settings["objective"]),
            p.source,
        )
        for name, p in presets.objective_presets().items()
    ]
    return _table(("preset", "what it is", "`credit`", "`objective`", "source"), map(_linked, rows))


def _choices() -> str:
    rows = []
    for key, choice in presets.choices().items():
        setting, value = key.rsplit(".", 1)
        rows.append((f"`{setting}`", f"`{value}`", choice.note, choice.source))
    return _table(("setting", "value", "meaning", "source"), map(_linked, rows))


def _linked(row: tuple[str, ...]) -> tuple[str, ...]:
    *cells, source = row
    return *cells, f"[{source.split('://')[1]}]({source})" if "://" in source else source


def _environment(name: str) -> str:
    columns = {algorithm: _flat(tree) for algorithm, tree in presets.env_preset(name).items()}
    keys = dict.fromkeys(key for column in columns.values() for key in column)
    rows = [
        (f"`{key}`", *(f"`{json.dumps(column[key])}`" if key in column else "" for column in columns.values()))
        for key in keys
    ]
    return f"### {name}\n\n" + _table(("setting", *(f"`{algorithm}`" for algorithm in columns)), rows)


def _flat(tree: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Values by their full key, such as ``algorithm.credit.scale``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{path}{key}.") if isinstance(value, dict) else {path + key: value}
    return flat


def _settings(tree: dict[str, Any]) -> str:
    return ", ".join(f"{key} `{json.dumps(value) if value is None else value}`" for key, value in _flat(tree).items())


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = tuple(header)
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
