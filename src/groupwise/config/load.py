"""The settings of a run, from presets, files and fields. Imports no torch.

Precedence: class defaults < preset of the environment (or of texts) < preset named by ``preset`` < fields the user set. A
preset that is named with a file is the user's, too, and comes before the file.
"""

import codecs
import functools
import inspect
import json
import operator
import re
import textwrap
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import Field, TypeAdapter, ValidationError, create_model

from groupwise import system as files
from groupwise.config.algorithm import AlgorithmCfg, CreditCfg, GRPOCfg, ObjectiveCfg
from groupwise.config.base import GIVEN, Cfg, Choice, check_programs, explain, flat
from groupwise.config.policy import AnyPolicyCfg
from groupwise.config.run import BUDGETS, CommonCfg, RunCfg, TextRunCfg
from groupwise.errors import ConfigError, UnknownNameError, require_extra

# Presets: the JSON files in presets/

AnyCfg = TypeVar("AnyCfg", bound=Cfg)
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
    """URL of the source, or ``groupwise`` for values of this library."""


@functools.cache
def objective_presets() -> dict[str, ObjectivePreset]:
    """The presets that ``preset`` may name."""
    return {
        name: ObjectivePreset(data.pop("title"), data.pop("source"), data.pop("note"), data)
        for name, data in read("objectives").items()
    }


def objective_preset(name: str) -> ObjectivePreset:
    """The preset of that name; an ``UnknownNameError`` if there is none."""
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


# Files of settings; YAML follows version 1.2: 1e-4 is a number, on and off are text

SUFFIXES = (".yaml", ".yml")

_SCALARS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
}
"""Pattern and first characters of values that are no text (YAML 1.2.2, section 10.3.2). PyYAML's own are of YAML 1.1."""


def with_absolute_paths(cfg: AnyCfg) -> AnyCfg:
    """``cfg`` with absolute paths of files and folders, so that a saved run finds them from any folder."""

    def absolute(name: str, value: Any) -> Any:
        is_local = isinstance(value, str) and name in ("path", "data", "eval_data") and value and Path(value).exists()
        if isinstance(value, Path) or is_local:
            return type(value)(Path(value).absolute())
        if isinstance(value, tuple):
            return tuple(absolute("", one) for one in value)
        return with_absolute_paths(value) if isinstance(value, Cfg) else value

    found = {name: new for name, value in cfg if (new := absolute(name, value)) != value}
    return cfg.model_copy(update=found) if found else cfg


def read_file(path: Path, *, follow: bool = True) -> Tree:
    """The object in a JSON or YAML file, or a ``ConfigError``; ``follow`` as in ``files.read``."""
    language, parse = ("YAML", _parse_yaml) if path.suffix.lower() in SUFFIXES else ("JSON", files.parse_json)
    try:
        data = files.read(path, files.MAX_SETTINGS, follow=follow)
        marked = "utf-16" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"  # by PowerShell
        tree = parse(data.decode(marked).encode())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; expected a {language} file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: broken {language}: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a {language} object, found {type(tree).__name__}")
    return tree


def _parse_yaml(data: bytes) -> Any:
    """The value of a YAML text, made of what JSON has; aliases, which could stand for gigabytes, are refused."""
    require_extra("yaml", "yaml")
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: dict[str, Any] = {}  # in place of those of YAML 1.1

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                line = self.peek_event().start_mark.line + 1
                raise ValueError(f"line {line} has an alias; fix: write the value again")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            if twice := next((key for key in keys if keys.count(key) > 1), None):
                raise ValueError(f"the key {twice!r:.100} comes twice")
            return super().construct_mapping(node, deep)

    Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))
    for kind, (pattern, first) in _SCALARS.items():
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(rf"(?:{pattern})$"), list(first))
    try:
        return files.parse_json(json.dumps(yaml.load(data, Loader)).encode())  # noqa: S506  a SafeLoader
    except (yaml.YAMLError, TypeError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError("it is nested too deep") from None


ADAPTER_CONFIG = "adapter_config.json"
"""File of settings in a folder of peft's adapters."""
ADAPTER_SIZES = ("r", "alpha", "rslora", "dora")
"""Settings of adapters without which their weights are another model."""
_OF_FUNCTION = ("activation", "squash_output", "actor_keys", *(f"lora.{name}" for name in ADAPTER_SIZES))
"""Settings of a policy or model without which its weights are another one, also where all tensors fit."""
_NOT_OF_WEIGHTS = ("init_from", "normalize_reward")
"""Settings of a policy that a run which begins with its weights does not take over."""


def resolve(
    env_id: str, algorithm: str | AlgorithmCfg | Tree | None = None, preset: str | None = None, **fields: Any
) -> RunCfg:
    """The full config of a run on an environment.

    Args:
        algorithm: a name, a config, or some of its fields. Only fields of a config that were set count.
        preset: name in ``presets/objectives.json``; replaces credit and objective of the environment's preset, which
            ``auto`` and None keep.
        fields: of ``RunCfg``, as values, configs or partial dicts. None means not given.

    Raises:
        ConfigError: a setting is unknown or its value wrong.
    """
    given = _given(algorithm, fields, preset)
    cfg = _resolve([{**given, "env": {**_table(given, "env"), "id": env_id}}], preset)
    assert isinstance(cfg, RunCfg)
    return cfg


def resolve_text(
    algorithm: str | AlgorithmCfg | Tree | None = None,
    preset: str | None = None,
    *,
    adapters: bool = False,
    **fields: Any,
) -> TextRunCfg:
    """The full config of a run on texts; see ``resolve``. ``fields`` are those of ``TextRunCfg``.

    Args:
        adapters: whether a policy that was made in Python has adapters; of a folder this is known.
    """
    given = _given(algorithm, fields, preset)
    cfg = _resolve([{"task": {}, **given}], preset, adapters=adapters)
    assert isinstance(cfg, TextRunCfg)
    return cfg


def load_config(
    path: Path | str,
    algorithm: str | AlgorithmCfg | Tree | None = None,
    preset: str | None = None,
    *,
    allow_programs: bool = False,
    **fields: Any,
) -> RunCfg | TextRunCfg:
    """The full config of a run from a JSON or YAML file; other arguments override it.

    A ``preset`` replaces credit and objective of the file, ``auto`` by those of the environment's preset.

    The file has some fields of ``RunCfg`` (at least ``env.id``) or ``TextRunCfg`` (at least ``task.data`` and
    ``model.path``), and may have a ``preset``. A run folder's ``config.json`` is such a file.

    Args:
        allow_programs: whether the file may name programs, such as ``generation.python``, which training starts.

    Raises:
        ConfigError: the file is missing or broken, or a setting is wrong.
    """
    tree = read_file(Path(path))
    named = tree.pop("preset", None)
    tree.pop("provenance", None)
    if isinstance(tree.get("algorithm"), str):  # as choices, and as in Python
        tree["algorithm"] = {"name": tree["algorithm"]}
    try:
        if "task" not in tree and "id" not in _table(tree, "env"):
            raise ConfigError('no environment or task; fix: "env": {"id": "CartPole-v1"}, or "task": {"data": ...}')
        if "task" in tree and "env" in tree:
            raise ConfigError("a run has an environment or a text task; got both, fix: leave out env or task")
        if preset is not None:
            tree["algorithm"] = _under_preset(_table(tree, "algorithm"), preset)
        given = _given(algorithm, fields, preset)
        cfg = _resolve([tree, given], preset or named)
    except ConfigError as error:
        if (algorithm is not None or preset is not None or fields) and _is_right(path):
            raise  # what came besides the file is to blame
        raise ConfigError(f"{path}: {error}") from error
    if not allow_programs:
        check_programs(cfg, path, given=flat(given))
    return cfg


def _is_right(path: Path | str) -> bool:
    """Whether a file has the settings of a run without others."""
    try:
        load_config(path, allow_programs=True)
    except ConfigError:
        return False
    return True


def to_json(cfg: CommonCfg) -> str:
    """The config as JSON, which ``load_config`` reads."""
    return json.dumps(cfg.model_dump(mode="json"), indent=2)


def json_schema() -> Tree:
    """JSON Schema of a config file, with the settings of every registered algorithm."""
    variants: Any = functools.reduce(operator.or_, AlgorithmCfg.members(), Literal[tuple(sorted(AlgorithmCfg.known))])
    algorithm = Field(GRPOCfg(), description=CommonCfg.model_fields["algorithm"].description)
    names: Any = Literal[("auto", *objective_presets())]
    preset = Field(
        None,
        description="Credit and objective of a paper or library, in place of the environment's. ``auto``: the environment's.",
    )
    more: Any = {"algorithm": (variants, algorithm), "preset": (names | None, preset)}
    files: list[Any] = [create_model(kind.__name__, __base__=kind, **more) for kind in (RunCfg, TextRunCfg)]
    return TypeAdapter(files[0] | files[1]).json_schema()


def _resolve(layers: list[Tree], preset: str | None, *, adapters: bool = False) -> RunCfg | TextRunCfg:
    """The config from the user's settings, later layers over earlier ones, over the presets."""
    kind = TextRunCfg if "task" in layers[0] else RunCfg
    first = _table(layers[0], "algorithm")
    own = first.get("name", AlgorithmCfg.default)
    name = str(_table(layers[-1], "algorithm").get("name", own))
    if name != own and first.keys() - {"name"}:
        raise ConfigError(
            f"settings of algorithm {own!r} in the file do not fit {name!r}; fix: keep {own!r}, or leave them out"
        )
    if name in objective_presets() and name not in AlgorithmCfg.known:
        hint = f"it is a preset of grpo; fix: --preset {name} (in Python preset={name!r})"
        raise UnknownNameError("algorithm", name, (), hint=hint)
    cfg_type, given = AlgorithmCfg.named(name), functools.reduce(_over, layers)
    above = _table(_table(layers[-1], "algorithm"), "objective").get("trust_region")
    names = isinstance(above, str) or (isinstance(above, dict) and "name" in above)
    if names and "clip_coef" not in _table(layers[-1], "algorithm"):
        _table(given, "algorithm").pop("clip_coef", None)  # it is of the trust region that was replaced
    if kind is RunCfg:
        base = _preset_for(env_preset(str(given["env"]["id"])), cfg_type)
        base = merge({"policy": {"name": AnyPolicyCfg.default}}, base)  # its settings are not those of another policy
    else:
        base, weights = _preset_for(read("text"), cfg_type), _of_weights(given.get("model"), "model")
        base, model = merge(base, {"model": weights}), merge(weights, _table(given, "model"))
        _check_same("model", _table(given, "model"), weights)
        if model.get("lora") is not None and weights.get("path", GIVEN) != GIVEN and not _has_adapters(weights):
            raise ConfigError(
                "model.lora asks for adapters, but the weights of model.init_from were trained without; fix: leave model.lora out, or "
                "`groupwise export RUN --to transformers`, and that folder as model.path in place of model.init_from"
            )
        if adapters or _has_adapters(model):
            base = merge(base, _preset_for(read("text_lora"), cfg_type))

    if kept := _of_weights(given.get("policy"), "policy"):
        _check_same("policy", _table(given, "policy"), kept)
        base = merge(base, {"policy": {"name": AnyPolicyCfg.default, **kept}})
    if preset not in (None, "auto"):  # its credit and objective replace those of the environment as a whole
        settings = dict(objective_preset(str(preset)).settings)
        if not issubclass(cfg_type, GRPOCfg):
            raise ConfigError(
                f"preset {preset!r} sets the credit of grpo, which algorithm {cfg_type.own_name()!r} lacks; fix: choose one of the two"
            )
        table = _table(base, "algorithm")
        sampler = {key: value for key, value in _table(table, "objective").items() if key == "old_log_prob"}
        if sampler:  # depends on the sampler, not on the paper
            settings["objective"] = sampler | settings.get("objective", {})
        base = base | {"algorithm": table | settings}
    base = merge(base, {"algorithm": {"name": cfg_type.own_name()}})
    try:
        return _whole(kind.model_validate(_over(base, given)))
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error.errors()))) from None


def _has_adapters(model: Tree) -> bool:
    """Whether a model's settings ask for adapters, or its folder has some."""
    path = model.get("path")
    saved = isinstance(path, str) and (Path(path).expanduser() / ADAPTER_CONFIG).is_file()
    return saved or model.get("lora") is not None


def _of_weights(part: object, name: str) -> Tree:
    """Settings of a policy or model in the run, or the run of the checkpoint, that ``init_from`` names; empty if there is none."""
    source = part.get("init_from") if isinstance(part, dict) else None
    if not isinstance(source, str | Path) or not source:
        return {}
    configs = [folder / "config.json" for folder in (Path(source), *Path(source).parents[:2])]
    config = next(filter(Path.is_file, configs), None)
    settings = {} if config is None else _table(read_file(config, follow=False), name)
    return {key: value for key, value in settings.items() if key not in _NOT_OF_WEIGHTS}


def _check_same(part: str, given: Tree, weights: Tree) -> None:
    """Raise a ``ConfigError`` for a setting of the user's with which the weights of ``init_from`` would be another policy or model.

    Args:
        weights: the settings that they were trained with.
    """

    def unordered(value: Any) -> Any:
        return {*map(str, value)} if isinstance(value, list | tuple) else value

    ours, theirs = flat(given), flat(weights)
    for name in _OF_FUNCTION:
        if name in ours and name in theirs and unordered(ours[name]) != unordered(theirs[name]):
            raise ConfigError(
                f"{part}.{name} = {ours[name]!r:.80}, but the weights of {part}.init_from were trained with {theirs[name]!r:.80} "
                f"and would be another {part}; fix: leave it out"
            )


def _preset_for(by_algorithm: dict[str, Tree], cfg_type: type[AlgorithmCfg]) -> Tree:
    """Settings for the algorithm, or for the one that its config extends, except fields that it redefines."""
    redefined: set[str] = set()
    for base in (base for base in cfg_type.__mro__ if issubclass(base, AlgorithmCfg)):
        if tree := by_algorithm.get(base.own_name() or ""):
            settings = _table(tree, "algorithm").items()
            return {**tree, "algorithm": {key: value for key, value in settings if key not in redefined}}
        redefined |= inspect.get_annotations(base).keys()
    return {}


def _given(algorithm: str | AlgorithmCfg | Tree | None, fields: Tree, preset: str | None) -> Tree:
    given: Tree = {key: _plain(value) for key, value in fields.items() if value is not None}
    if algorithm is not None:
        given["algorithm"] = {"name": algorithm} if isinstance(algorithm, str) else _plain(algorithm)
    whole = isinstance(algorithm, AlgorithmCfg) and algorithm.model_fields_set == type(algorithm).model_fields.keys()
    if whole and preset is not None:
        given["algorithm"] = _under_preset(given["algorithm"], preset)
    return given


def _under_preset(algorithm: Tree, preset: str) -> Tree:
    """Settings of an algorithm without the credit and objective that a preset replaces."""
    own = {} if preset == "auto" else objective_preset(preset).settings
    kept = {key: value for key, value in algorithm.items() if key not in ("credit", "objective", "clip_coef")}
    merged: Tree = merge(kept, {key: value for key, value in own.items() if key in kept})
    return merged


_FIRST = {"env": "id", "model": "path"}
"""The setting that a text stands for in Python, where a file has an object."""


def _table(tree: Tree, key: str) -> Tree:
    """The settings under a key; empty if there are none."""
    value = tree.get(key, {})
    if not isinstance(value, dict):
        fix = "; fix: a path, or policy=gw.CausalLM(model, tokenizer=tokenizer)" if key == "model" else ""
        if isinstance(value, str) and key in _FIRST:
            fix = f"; fix: {json.dumps({_FIRST[key]: value})}"
        shown = textwrap.shorten(repr(value), 100, placeholder=" ...")  # networks have long ones
        raise ConfigError(f"{key} = {shown}: expected an object with settings by name{fix}")
    return value


def _plain(value: Any) -> Any:
    """Configs as nested dicts of the fields that were set."""
    if isinstance(value, Cfg):
        return {key: _plain(item) for key, item in value if key in value.model_fields_set}
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _whole(cfg: AnyCfg) -> AnyCfg:
    """``cfg`` as a file has it: every field is set, so that a run that gets ``cfg.algorithm`` takes no others from a preset."""
    values = {}
    for name, field in type(cfg).model_fields.items():
        value = field.default if field.exclude else vars(cfg)[name]
        values[name] = _whole(value) if isinstance(value, Cfg) else value
    return type(cfg).model_construct(_fields_set={*values}, **values)


def _over(low: Tree, high: Tree) -> Tree:
    """``high`` over ``low``, all settings of a run: one budget replaces another, ``clip_coef`` both sides of the clip range."""
    if any(high.get(name) is not None for name in BUDGETS):
        low = {key: value for key, value in low.items() if key not in BUDGETS}
    if _table(high, "algorithm").get("clip_coef") is not None:
        objective = _table(_table(low, "algorithm"), "objective")
        if isinstance(region := objective.get("trust_region"), dict):
            other = {name: value for name, value in region.items() if name not in ("clip_low", "clip_high")}
            low = low | {"algorithm": low["algorithm"] | {"objective": objective | {"trust_region": other}}}
    merged: Tree = merge(low, high)
    return merged


def merge(low: Any, high: Any) -> Any:
    """``high`` over ``low``: tables key by key; other values, ``kwargs`` and choices of another name as a whole."""
    if isinstance(low, str) and isinstance(high, dict):
        low = {"name": low}
    if isinstance(high, str) and isinstance(low, dict) and "name" in low:
        high = {"name": high}
    if not isinstance(low, dict) or not isinstance(high, dict):
        return high
    if low.get("name", high.get("name")) != high.get("name", low.get("name")):
        return high
    whole = {key for key in high if key not in low or key.endswith("kwargs")}
    return low | {key: value if key in whole else merge(low[key], value) for key, value in high.items()}
