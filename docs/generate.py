"""Writes the pages that are made from the code: every setting, every preset, the defaults.

    python docs/generate.py             # or: --out FOLDER, in place of docs/generated

A test compares them with what this script would write, so they cannot go stale.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from groupwise.config import load as presets
from groupwise.config import resolve, resolve_text
from groupwise.config.algorithm import AlgorithmCfg, BCCfg, GRPOCfg, PPOCfg
from groupwise.config.base import OTHER_NAMES, Cfg, Choice
from groupwise.config.evolution import EvolutionCfg
from groupwise.config.run import RunCfg, TextRunCfg

FOLDER = Path(__file__).parent / "generated"

SHOWN_DEFAULTS = ("total_steps", "env.num_envs", "num_prompts", "algorithm.", "policy.", "sampling.", "model.precision")
"""Beginnings of the paths of the settings that decide what is learned."""
NOTE = "<!-- Written by docs/generate.py. Change the code or the preset files, then run it again. -->"


def pages(folder: Path = FOLDER) -> dict[Path, str]:
    """Text of each generated page by its path."""
    return {
        folder / "settings.md": settings_page(),
        folder / "presets.md": presets_page(),
        folder / "defaults.md": defaults_table(),
        folder / "names.md": names_table(),
    }


def settings_page() -> str:
    """Every config class with its fields: type, default, docstring."""
    sections = [
        "# Settings",
        NOTE,
        "The path of a setting names it: `algorithm.credit.scale`. In a JSON file these are nested objects. On the command "
        "line it is `--algorithm.credit.scale`, with `-` in place of `_`. `null` is `None` in Python and on the command "
        "line. The defaults are those of the classes; the "
        "[preset of the environment](presets.md#settings-per-environment) overrides them.",
        *(_class_section(cls) for cls in config_classes()),
        *(_choice_section(name, members) for name, members in families().items()),
    ]
    return "\n\n".join(sections) + "\n"


def names_table() -> str:
    """Names of other libraries, by the name here that an error message answers with."""
    theirs: dict[str, list[str]] = {}
    for name, ours in sorted(OTHER_NAMES.items(), key=lambda pair: (pair[1].lower(), pair[0])):
        theirs.setdefault(ours, []).append(f"`{name}`")
    rows = [(", ".join(names), f"`{ours}`" if " " not in ours else ours) for ours, names in theirs.items()]
    return f"{NOTE}\n\n{_table(('elsewhere', 'groupwise'), rows)}\n"


def config_classes() -> list[type[Cfg]]:
    """Every class of settings that a run or a search can hold, except the members of a choice."""
    found: list[type[Cfg]] = []

    def visit(cls: type[Cfg]) -> None:
        if cls in (*found, Cfg, Choice):
            return
        for base in cls.__bases__:
            if issubclass(base, Cfg):
                visit(base)
        found.append(cls)
        for field in cls.model_fields.values():
            if not _members(field.annotation):
                for part in _config_types(field.annotation):
                    visit(part)

    for cls in (RunCfg, GRPOCfg, PPOCfg, BCCfg, TextRunCfg, EvolutionCfg):
        visit(cls)
    return found


def families() -> dict[str, list[type[Cfg]]]:
    """The members of each choice, a setting that carries parameters of its own, by the name of its field."""
    fields = {name: field for cls in config_classes() for name, field in cls.model_fields.items()}
    return {name: _members(field.annotation) for name, field in fields.items() if _members(field.annotation)}


def _members(kind: Any) -> list[type[Cfg]]:
    """The classes of a choice or a list of choices: a registered family, or a union of classes with a name. Empty if it is none."""
    if get_origin(kind) is tuple:
        kind = next(_config_types(kind), None)
    if isinstance(kind, type) and issubclass(kind, Choice) and not issubclass(kind, AlgorithmCfg):
        return list(kind.members())
    parts = list(_config_types(kind))
    return parts if len(parts) > 1 and all("name" in part.model_fields for part in parts) else []


def classes_of(kind: Any) -> list[type[Cfg]]:
    """The settings classes that a field of this type can hold, the members of a choice included."""
    return _members(kind) or list(_config_types(kind))


def _config_types(kind: Any) -> Iterator[type[Cfg]]:
    """The settings classes in a type, such as those of a union."""
    if isinstance(kind, type) and issubclass(kind, Cfg):
        yield kind
    for part in get_args(kind):
        yield from _config_types(part)


def _class_section(cls: type[Cfg]) -> str:
    base = cls.__bases__[0]
    own = {"name"} | vars(cls).get("__annotations__", {}).keys()
    inherited = set(base.model_fields) - own if issubclass(base, Cfg) else set()
    rows = [
        (f"`{name}`", _choice_type(name, field), _default(field), field.description or "")
        for name, field in cls.model_fields.items()
        if name not in inherited
    ]
    more = f" It also has the fields of [`{base.__name__}`](#{base.__name__.lower()})." if inherited else ""
    return "\n\n".join(
        [f"## {cls.__name__}", _summary(cls) + more, _table(("field", "type", "default", "meaning"), rows)]
    )


def _choice_type(name: str, field: FieldInfo) -> str:
    """The type of a field; a link to its choices where it has parameters of its own."""
    if not _members(field.annotation):
        return _type(_annotation(field))
    number = "list" if get_origin(field.annotation) is tuple else "one"
    return f"{number} of [{name}](#choices-of-{_anchor(name)})"


def _choice_section(name: str, members: list[type[Cfg]]) -> str:
    """Each member of a choice with its parameters."""
    rows = []
    for cls in members:
        fields = {key: field for key, field in cls.model_fields.items() if key != "name"}
        parameters = [
            f"`{key}` ({_type(_annotation(field))}; default {_default(field)}): {field.description or ''}"
            for key, field in fields.items()
        ]
        rows.append((f"`{cls.own_name()}`", _summary(cls), "<br>".join(parameters) or "none"))
    first = f'"{members[0].own_name()}"'
    example = f"`{name}: {f'[{first}]' if name == 'report_to' else first}`"
    text = f"Give a name, such as {example}, or an object of a name and parameters."
    return "\n\n".join([f"## Choices of {name}", text, _table(("name", "what it does", "parameters"), rows)])


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def _summary(cls: type[Cfg]) -> str:
    """The first paragraph of the docstring."""
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


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
    if isinstance(value, Cfg) and _members(field.annotation):
        return f"`{json.dumps(value.own_name())}`"
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
            _settings({key: value for key, value in p.settings.items() if key not in ("credit", "objective")}),
            p.source,
        )
        for name, p in presets.objective_presets().items()
    ]
    return _table(("preset", "what it is", "`credit`", "`objective`", "more", "source"), map(_linked, rows))


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


def defaults_table() -> str:
    """What a run has when nothing is set: GRPO and PPO on an environment without settings of its own, and GRPO on text."""
    texts = {"data": "prompts.jsonl", "rewards": [{"name": "exact"}]}
    columns = {
        "GRPO": resolve("Mine-v0", "grpo"),
        "PPO": resolve("Mine-v0", "ppo"),
        "GRPO, text": resolve_text("grpo", task=texts, model={"path": "my_model"}),
    }
    flat = {name: _flat(cfg.model_dump(mode="json", exclude={"algorithm": {"name"}})) for name, cfg in columns.items()}
    keys = dict.fromkeys(key for values in flat.values() for key in values)
    rows = [
        (
            f"`{key.removesuffix('.name')}`",
            *(f"`{json.dumps(values[key])}`" if key in values else "" for values in flat.values()),
        )
        for part in SHOWN_DEFAULTS
        for key in keys
        if key.startswith(part)
    ]
    return _table(("setting", *columns), rows) + "\n"


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    folder = parser.parse_args().out
    folder.mkdir(exist_ok=True)
    for path, text in pages(folder).items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
