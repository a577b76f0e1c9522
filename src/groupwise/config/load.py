"""The settings of a run, from presets, files and fields. Imports no torch.

Precedence: class defaults < preset of the environment (or of texts) < preset named by ``preset`` < fields the user set.
"""

import functools
import json
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError, create_model

from groupwise.config import presets
from groupwise.config.algorithm import AlgorithmCfg, GRPOCfg
from groupwise.config.base import Cfg, explain
from groupwise.config.choices import Choice, merge_choice
from groupwise.config.presets import Tree
from groupwise.config.registry import algorithm_entry, algorithm_names
from groupwise.config.run import DEFAULT_ALGORITHM, CommonCfg, RunCfg, TextRunCfg
from groupwise.errors import ConfigError


def resolve(
    env_id: str, algorithm: str | AlgorithmCfg | Tree | None = None, preset: str | None = None, **fields: Any
) -> RunCfg:
    """The full config of a run on an environment.

    Args:
        algorithm: a name, a config, or some of its fields. Of a config, only fields that were set count.
        preset: name in ``presets/objectives.json``; replaces credit and objective of the environment's preset.
        fields: of ``RunCfg``, as values, configs or partial dicts. None means not given.

    Raises:
        ConfigError: a setting is unknown or its value wrong.
    """
    given = _given(algorithm, fields)
    cfg = _resolve([{**given, "env": {**_table(given, "env"), "id": env_id}}], preset)
    assert isinstance(cfg, RunCfg)
    return cfg


def resolve_text(
    algorithm: str | AlgorithmCfg | Tree | None = None, preset: str | None = None, **fields: Any
) -> TextRunCfg:
    """The full config of a run on texts; see ``resolve``. ``fields`` are those of ``TextRunCfg``."""
    given = _given(algorithm, fields)
    cfg = _resolve([{"task": {}, **given}], preset)
    assert isinstance(cfg, TextRunCfg)
    return cfg


def load_config(
    path: Path | str, algorithm: str | AlgorithmCfg | Tree | None = None, preset: str | None = None, **fields: Any
) -> RunCfg | TextRunCfg:
    """The full config of a run from a JSON file; other arguments override it as in ``resolve``.

    The file has some fields of ``RunCfg`` (at least ``env.id``) or ``TextRunCfg`` (at least ``task.data`` and
    ``model.path``), and may have a ``preset``. A run folder's ``config.json`` is such a file.

    Raises:
        ConfigError: the file is missing or broken, or a setting is wrong.
    """
    tree = read_json(Path(path))
    named = tree.pop("preset", None)
    tree.pop("provenance", None)
    try:
        if "task" not in tree and "id" not in _table(tree, "env"):
            raise ConfigError(
                'no environment and no task; fix: "env": {"id": "CartPole-v1"}, or "task": {"data": "prompts.jsonl"}'
            )
        if "task" in tree and "env" in tree:
            raise ConfigError("a run has an environment or a text task; got both, fix: leave out env or task")
        return _resolve([tree, _given(algorithm, fields)], preset or named)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_json(path: Path) -> Tree:
    """The object in a JSON file, or a ``ConfigError``."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; expected a JSON file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: broken JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(tree).__name__}")
    return tree


def to_json(cfg: CommonCfg) -> str:
    """The config as JSON, which ``load_config`` reads."""
    return cfg.model_dump_json(indent=2)


def json_schema() -> Tree:
    """JSON Schema of a config file, with the settings of every registered algorithm."""
    variants: Any = functools.reduce(operator.or_, (algorithm_entry(name).cfg_type for name in algorithm_names()))
    algorithm = Field(GRPOCfg(), description=CommonCfg.model_fields["algorithm"].description)
    names: Any = Literal[tuple(presets.objective_presets())]
    preset = Field(
        None, description="Credit and objective of a paper or library, in place of the environment's preset."
    )
    more: Any = {"algorithm": (variants, algorithm), "preset": (names | None, preset)}
    files: list[Any] = [create_model(kind.__name__, __base__=kind, **more) for kind in (RunCfg, TextRunCfg)]
    return TypeAdapter(files[0] | files[1]).json_schema()


def _resolve(layers: list[Tree], preset: str | None) -> RunCfg | TextRunCfg:
    """The config from the user's settings, later layers over earlier ones, over the presets."""
    kind = TextRunCfg if "task" in layers[0] else RunCfg
    name = _algorithm_name(layers)
    cfg_type = algorithm_entry(name).cfg_type
    given = functools.reduce(lambda low, high: _merge(low, high, kind, cfg_type), layers)
    base = _base_preset(given, kind, cfg_type)
    if preset is not None:
        base = _with_objective(base, str(preset), cfg_type)
    base = _merge(base, {"algorithm": {"name": name}}, kind, cfg_type)
    tree = _merge(base, given, kind, cfg_type)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(item, base, given) for item in error.errors()]
        raise ConfigError("\n".join(lines)) from error


def _base_preset(given: Tree, kind: type[CommonCfg], cfg_type: type[AlgorithmCfg]) -> Tree:
    """The preset of the environment, or of texts with or without adapters."""
    if kind is RunCfg:
        return _preset_for(presets.env_preset(str(given["env"]["id"])), cfg_type)
    base = _preset_for(presets.text_preset(), cfg_type)
    if _table(given, "model").get("lora") is None:
        return base
    return _merge(base, _preset_for(presets.text_preset(lora=True), cfg_type), kind, cfg_type)


def _given(algorithm: str | AlgorithmCfg | Tree | None, fields: Tree) -> Tree:
    given: Tree = {key: _plain(value) for key, value in fields.items() if value is not None}
    if algorithm is not None:
        given["algorithm"] = {"name": algorithm} if isinstance(algorithm, str) else _plain(algorithm)
    return given


def _algorithm_name(layers: list[Tree]) -> str:
    """The algorithm named by the last layer that names one."""
    tables = [_table(layer, "algorithm") for layer in layers]
    first = tables[0].get("name", DEFAULT_ALGORITHM)
    chosen = next((table["name"] for table in reversed(tables) if "name" in table), first)
    if chosen != first and tables[0].keys() - {"name"}:
        raise ConfigError(f"settings of algorithm {first!r} do not fit algorithm {chosen!r}; fix: drop one of the two")
    return str(chosen)


def _preset_for(by_algorithm: dict[str, Tree], cfg_type: type[AlgorithmCfg]) -> Tree:
    """Settings for the algorithm, or for the one that its config extends, except fields that it redefines."""
    for base in (base for base in cfg_type.__mro__ if issubclass(base, AlgorithmCfg)):
        if (name := base.own_name()) in by_algorithm:
            tree = by_algorithm[name]
            kept = {k: v for k, v in _table(tree, "algorithm").items() if not _redefines(k, base, cfg_type)}
            return {**tree, "algorithm": kept}
    return {}


def _redefines(field: str, base: type[AlgorithmCfg], derived: type[AlgorithmCfg]) -> bool:
    between = derived.__mro__[: derived.__mro__.index(base)]
    return any(field in vars(cls).get("__annotations__", {}) for cls in between)


def _with_objective(tree: Tree, preset: str, cfg_type: type[AlgorithmCfg]) -> Tree:
    """The tree with the preset's credit and objective, which replace its own as a whole."""
    settings = presets.objective_preset(preset).settings
    if not issubclass(cfg_type, GRPOCfg):
        raise ConfigError(
            f"preset {preset!r} sets the credit of grpo, which algorithm {cfg_type.own_name()!r} lacks; fix: choose one of the two"
        )
    own = _table(tree, "algorithm")
    objective = _table(settings, "objective")
    if "old_log_prob" in _table(own, "objective"):  # depends on the sampler, not on the paper
        objective = {"old_log_prob": own["objective"]["old_log_prob"], **objective}
    return {**tree, "algorithm": {**own, **settings, **({"objective": objective} if objective else {})}}


def _table(tree: Tree, key: str) -> Tree:
    """The settings under a key; empty if there are none."""
    value = tree.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{key} = {value!r}: expected an object with settings by name")
    return value


def _plain(value: Any) -> Any:
    """Configs as nested dicts of the fields that were set."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if not isinstance(value, Cfg):
        return value
    return {
        key: _plain(item)
        for key, item in value
        if key in value.model_fields_set or (key == "name" and not isinstance(value, Choice))
    }


def _merge(low: Tree, high: Tree, parent: type[Cfg], algorithm_type: type[AlgorithmCfg]) -> Tree:
    """``high`` over ``low``: configs field by field, other values as a whole."""
    merged = dict(low)
    for key, value in high.items():
        child = parent.declared_type(key)
        if child is AlgorithmCfg:
            child = algorithm_type
        if child and issubclass(child, Choice) and key in low:
            merged[key] = merge_choice(low[key], value, child)
        elif child and isinstance(value, dict) and isinstance(low.get(key), dict):
            merged[key] = _merge(low[key], value, child, algorithm_type)
        else:
            merged[key] = value
    return merged


def _explain(item: Mapping[str, Any], base: Tree, given: Tree) -> str:
    """One line on one of pydantic's errors, with the settings in it that come from the preset."""
    line = explain(item)
    theirs = sorted(_at(base, item["loc"]).keys() - _at(given, item["loc"]).keys())
    named = [name for name in theirs if f"{name}=" in line]
    return f"{line} (from the preset: {', '.join(named)})" if named else line


def _at(tree: Any, loc: tuple[int | str, ...]) -> Tree:
    for key in loc:
        tree = tree.get(key, {}) if isinstance(tree, dict) else {}
    return tree if isinstance(tree, dict) else {}
