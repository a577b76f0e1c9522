"""``RunCfg``, the whole of a run as one validated tree, and how it comes about from presets, files and fields.

Precedence: class defaults < preset of the environment < preset named by ``preset`` < fields the user set. Presets are
JSON data under ``presets/``: one file per environment, and ``objectives.json`` with the combinations of credit and
objective that papers and libraries use. Imports no torch, so that the command line answers at once.
"""

import functools
import importlib
import json
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from annotated_types import Ge, Gt
from pydantic import (
    AfterValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)

from groupwise import presets
from groupwise.algorithms.configs import AlgorithmCfg, GRPOCfg, PPOCfg
from groupwise.cfg import Cfg, PositiveInt, complaints, explain
from groupwise.envs.configs import EnvCfg
from groupwise.errors import ConfigError, UnknownNameError
from groupwise.policies.configs import PolicyCfg
from groupwise.presets import Tree
from groupwise.run_checks import check_together

DEFAULT_ALGORITHM = "grpo"


class AlgorithmEntry(NamedTuple):
    """What the registry knows of an algorithm."""

    cfg_type: type[AlgorithmCfg]
    target: type[Any] | str
    """The ``BaseAlgorithm`` subclass, or ``module:Class`` where importing it costs (torch)."""

    def load(self) -> type[Any]:
        """The class, imported now if it was given by name."""
        if not isinstance(self.target, str):
            return self.target
        module, _, name = self.target.partition(":")
        loaded: type[Any] = vars(importlib.import_module(module))[name]
        return loaded


_ALGORITHMS = {
    "grpo": AlgorithmEntry(GRPOCfg, "groupwise.algorithms.grpo:GRPO"),
    "ppo": AlgorithmEntry(PPOCfg, "groupwise.algorithms.ppo:PPO"),
}

T = TypeVar("T", bound=type[Any])


def register_algorithm(cfg_type: type[AlgorithmCfg]) -> Callable[[T], T]:
    """Class decorator that makes a ``BaseAlgorithm`` known under the default of its config's ``name``.

    A config class of the same module and name may be registered again, as a notebook does when a cell runs twice.

    Raises:
        ConfigError: the config gives ``name`` no default, or the name belongs to another config class.
    """
    name = _default_name(cfg_type)
    if name is None:
        raise ConfigError(f"{cfg_type.__name__} has no name; mend: name: Literal['my_name'] = 'my_name'")
    taken = _ALGORITHMS.get(name)
    if taken and (taken.cfg_type.__module__, taken.cfg_type.__qualname__) != (
        cfg_type.__module__,
        cfg_type.__qualname__,
    ):
        raise ConfigError(
            f"algorithm {name!r} is registered for {taken.cfg_type.__name__}; mend: give {cfg_type.__name__} another name"
        )

    def register(target: T) -> T:
        _ALGORITHMS[name] = AlgorithmEntry(cfg_type, target)
        return target

    return register


def algorithm_entry(name: str) -> AlgorithmEntry:
    """Config class and target of an algorithm.

    Raises:
        UnknownNameError: nobody registered ``name``.
    """
    if name not in _ALGORITHMS:
        raise UnknownNameError("algorithm", name, _ALGORITHMS)
    return _ALGORITHMS[name]


def algorithm_names() -> list[str]:
    """Names of all registered algorithms."""
    return sorted(_ALGORITHMS)


def algorithms_with(field: str) -> list[str]:
    """Names of the algorithms that have a setting of this name."""
    return [name for name in algorithm_names() if field in _ALGORITHMS[name].cfg_type.model_fields]


def explain_other_algorithm(field: str, algorithm: str) -> str:
    """What to say where a setting is given to an algorithm that has none of this name, while others do."""
    owners = algorithms_with(field)
    return (
        f"{field!r} is a setting of {' and '.join(owners)}, not of {algorithm}; "
        f"mend: leave it out, or choose algorithm {' or '.join(map(repr, owners))}"
    )


def _default_name(cfg_type: type[AlgorithmCfg]) -> str | None:
    default = cfg_type.model_fields["name"].default
    return default if isinstance(default, str) else None


class EvaluationCfg(Cfg):
    """When and how the policy is evaluated, in environments of its own."""

    interval: PositiveInt | None = None
    """Environment steps between two evaluations, rounded up to whole iterations; None: a tenth of ``total_steps``. The last iteration is always evaluated."""
    episodes: PositiveInt = 20
    """Episodes per evaluation."""
    deterministic: bool = True
    """Take the most likely action; False samples."""


class StopCfg(Cfg):
    """When training ends before ``total_steps``."""

    return_threshold: float | None = None
    """Stops when the mean return of an evaluation reaches it. None: never."""
    time_limit: Annotated[float, Gt(0)] | None = None
    """Seconds of training after which the current iteration is the last. None: no limit."""


class LoggingCfg(Cfg):
    """Where metrics go besides ``metrics.jsonl``, and what the terminal shows."""

    tensorboard: bool = False
    """Also write TensorBoard events (extra ``track``)."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Also send metrics to Weights & Biases, or keep them for ``wandb sync`` (extra ``track``)."""
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    """``bar``: live; ``lines``: a plain line each ``interval``; ``auto``: a bar on a terminal, else lines."""
    interval: Annotated[float, Gt(0)] = 5.0
    """Seconds between two plain lines."""


def _check_device(device: str) -> str:
    if not re.fullmatch(r"cpu|auto|cuda(:\d+)?", device):
        raise ValueError(f"expected 'cpu', 'cuda', 'cuda:<index>' or 'auto', got {device!r}")
    return device


class RunCfg(Cfg):
    """Everything a run depends on."""

    env: EnvCfg = EnvCfg()
    """Environment."""
    algorithm: SerializeAsAny[AlgorithmCfg] = GRPOCfg()
    """Algorithm; loaded through the registry by its ``name``."""
    policy: PolicyCfg = PolicyCfg()
    """Networks and normalisers."""
    total_steps: PositiveInt = 100_000
    """Environment steps; training stops at the end of the first iteration that reaches them."""
    seed: Annotated[int, Ge(0)] = 0
    """Of everything random: weights, actions, environments, order of minibatches."""
    device: Annotated[str, AfterValidator(_check_device)] = "cpu"
    """Where the policy lives: ``cpu``, ``cuda``, ``cuda:1``, or ``auto`` (a GPU if there is one)."""
    evaluation: EvaluationCfg = EvaluationCfg()
    """Evaluation during and after training."""
    checkpoint_interval: PositiveInt | None = None
    """Environment steps between checkpoints; None: a tenth of ``total_steps``. PPO's running episodes are cut there, as truncations, so that a resumed run equals an uninterrupted one bit for bit; changing the interval therefore changes the run."""
    stop: StopCfg = StopCfg()
    """Ends training early."""
    logging: LoggingCfg = LoggingCfg()
    """Metrics and progress."""
    run_dir: Path | None = None
    """Folder of the run, new or empty. None: a fresh one under ``runs/``."""

    @classmethod
    def child_type(cls, key: str, fields: Mapping[str, Any]) -> type[Cfg] | None:
        """Config class of a field; that of the algorithm follows from its name."""
        if key != "algorithm" or not isinstance(fields.get(key), dict):
            return super().child_type(key, fields)
        return algorithm_entry(str(fields[key].get("name", DEFAULT_ALGORITHM))).cfg_type

    @field_validator("algorithm", mode="before")
    @classmethod
    def _load_by_name(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return algorithm_entry(str(value.get("name", DEFAULT_ALGORITHM))).cfg_type.model_validate(value)

    @model_validator(mode="after")
    def _check(self) -> "RunCfg":
        expected = algorithm_entry(self.algorithm.name).cfg_type
        if type(self.algorithm) is not expected:
            got = type(self.algorithm).__name__
            raise ValueError(
                f"algorithm {self.algorithm.name!r} is registered for {expected.__name__}, got {got}; mend: register_algorithm({got})"
            )
        if isinstance(self.algorithm, GRPOCfg) and self.env.autoreset != "disabled":
            raise ValueError(
                f"{self.algorithm.name} resets its environments itself; got env.autoreset={self.env.autoreset!r}, mend: 'disabled'"
            )
        if isinstance(self.algorithm, GRPOCfg):
            self.algorithm.credit.check_steps()
        check_together(self.algorithm, self.env)
        return self


def resolve(
    env_id: str, algorithm: str | AlgorithmCfg | Tree | None = None, preset: str | None = None, **fields: Any
) -> RunCfg:
    """The full config of a run: class defaults < environment preset < objective preset < what the user set.

    Args:
        algorithm: a name, a config, or its fields; of a config only the fields that were set count.
        preset: name in ``presets/objectives.json``; replaces credit and objective of the environment's preset.
        fields: of ``RunCfg``, as values, configs or partial dicts. None means not given.

    Raises:
        ConfigError: names the key, the value and what was expected.
    """
    given = _given(algorithm, fields)
    return _resolve([{**given, "env": {**_table(given, "env"), "id": env_id}}], preset)


def load_config(
    path: Path | str, algorithm: str | AlgorithmCfg | Tree | None = None, preset: str | None = None, **fields: Any
) -> RunCfg:
    """The full config of a run from a JSON file, which may be partial; other arguments go over it as in ``resolve``.

    The file holds fields of ``RunCfg``, ``env.id`` at least, and may name a ``preset``; a run folder's ``config.json``
    is such a file, its ``provenance`` does not count.

    Raises:
        ConfigError: the file is missing or broken (says where), or a setting is wrong.
    """
    tree = _read_json(Path(path))
    named = tree.pop("preset", None)
    tree.pop("provenance", None)
    try:
        if "id" not in _table(tree, "env"):
            raise ConfigError('no environment; mend: "env": {"id": "CartPole-v1"}')
        return _resolve([tree, _given(algorithm, fields)], preset or named)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def to_json(cfg: RunCfg) -> str:
    """The config as JSON text that ``load_config`` reads back."""
    return cfg.model_dump_json(indent=2)


def json_schema() -> Tree:
    """JSON Schema of a config file, with the settings of every registered algorithm."""
    variants: Any = functools.reduce(operator.or_, (entry.cfg_type for entry in _ALGORITHMS.values()))
    algorithm = Field(GRPOCfg(), description=RunCfg.model_fields["algorithm"].description)
    names: Any = Literal[tuple(presets.objective_presets())]
    preset = Field(
        None, description="Credit and objective of a paper or library, in place of the environment's preset."
    )
    file = create_model("RunCfg", __base__=RunCfg, algorithm=(variants, algorithm), preset=(names | None, preset))
    return file.model_json_schema()


def _resolve(layers: list[Tree], preset: str | None) -> RunCfg:
    """The config from what the user set, later layers over earlier ones, over the presets."""
    name = _algorithm_name(layers)
    cfg_type = algorithm_entry(name).cfg_type
    given = functools.reduce(lambda low, high: _merge(low, high, RunCfg, cfg_type), layers)
    base = _env_preset(str(given["env"]["id"]), cfg_type)
    if preset is not None:
        base = _with_objective(base, str(preset), cfg_type)
    base = _merge(base, {"algorithm": {"name": name}}, RunCfg, cfg_type)
    tree = _merge(base, given, RunCfg, cfg_type)
    try:
        return RunCfg.model_validate(tree)
    except ValidationError as error:
        lines = [_complaint(item, tree, base, given) for item in complaints(error)]
        raise ConfigError("\n".join(lines)) from error


def _given(algorithm: str | AlgorithmCfg | Tree | None, fields: Tree) -> Tree:
    given: Tree = {key: _plain(value) for key, value in fields.items() if value is not None}
    if algorithm is not None:
        given["algorithm"] = {"name": algorithm} if isinstance(algorithm, str) else _plain(algorithm)
    return given


def _algorithm_name(layers: list[Tree]) -> str:
    """The algorithm that the last layer to name one names; settings of another below it would not fit."""
    tables = [_table(layer, "algorithm") for layer in layers]
    first = tables[0].get("name", DEFAULT_ALGORITHM)
    chosen = next((table["name"] for table in reversed(tables) if "name" in table), first)
    if chosen != first and tables[0].keys() - {"name"}:
        raise ConfigError(f"settings of algorithm {first!r} do not fit algorithm {chosen!r}; mend: drop one of the two")
    return str(chosen)


def _env_preset(env_id: str, cfg_type: type[AlgorithmCfg]) -> Tree:
    """Settings for the environment under the algorithm, or under the nearest one whose config it extends.

    Where the extending config has a default of its own, that one holds.
    """
    by_algorithm = presets.env_preset(env_id)
    for base in (base for base in cfg_type.__mro__ if issubclass(base, AlgorithmCfg)):
        if (name := _default_name(base)) in by_algorithm:
            tree = by_algorithm[name]
            kept = {k: v for k, v in _table(tree, "algorithm").items() if not _redefines(k, base, cfg_type)}
            return {**tree, "algorithm": kept}
    return {}


def _redefines(field: str, base: type[AlgorithmCfg], derived: type[AlgorithmCfg]) -> bool:
    between = derived.__mro__[: derived.__mro__.index(base)]
    return any(field in vars(cls).get("__annotations__", {}) for cls in between)


def _with_objective(tree: Tree, preset: str, cfg_type: type[AlgorithmCfg]) -> Tree:
    """The tree with the preset's credit and objective in place of its own, as a whole: halves of two make neither."""
    settings = presets.objective_preset(preset).settings
    if not issubclass(cfg_type, GRPOCfg):
        raise ConfigError(
            f"preset {preset!r} sets the credit of grpo, which algorithm {_default_name(cfg_type)!r} lacks; mend: choose one of the two"
        )
    return {**tree, "algorithm": {**tree.get("algorithm", {}), **settings}}


def _read_json(path: Path) -> Tree:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; expected a JSON file") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {error.lineno}, column {error.colno}: broken JSON: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not text in UTF-8; expected a JSON file") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected an object with settings by name, found {type(tree).__name__}")
    return tree


def _table(tree: Tree, key: str) -> Tree:
    """The settings under a key, empty if it is absent."""
    value = tree.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(f"{key} = {value!r}: expected an object with settings by name")
    return value


def _plain(value: Any) -> Any:
    """Configs as dicts of the fields that were set, all the way down."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if not isinstance(value, Cfg):
        return value
    tree = {key: _plain(item) for key, item in value if key in value.model_fields_set}
    return {**tree, "name": value.name} if isinstance(value, AlgorithmCfg) else tree


def _merge(low: Tree, high: Tree, parent: type[Cfg], algorithm_type: type[AlgorithmCfg]) -> Tree:
    """``high`` over ``low``: configs field by field, everything else (numbers, lists, keyword arguments) as a whole."""
    merged = dict(low)
    for key, value in high.items():
        child = algorithm_type if (parent, key) == (RunCfg, "algorithm") else parent.child_type(key, high)
        both = isinstance(value, dict) and isinstance(low.get(key), dict)
        merged[key] = _merge(low[key], value, child, algorithm_type) if child and both else value
    return merged


def _complaint(item: Tree, tree: Tree, base: Tree, given: Tree) -> str:
    """One line on one of pydantic's complaints about the settings in ``tree``, which are ``given`` over ``base``."""
    loc = tuple(map(str, item["loc"]))
    name = str(tree["algorithm"]["name"])
    if item["type"] == "extra_forbidden" and len(loc) == 2 and loc[0] == "algorithm" and algorithms_with(loc[1]):
        return f"{'.'.join(loc)}: {explain_other_algorithm(loc[1], name)}"
    said = explain(item, RunCfg, tree)
    theirs = sorted(_at(base, loc).keys() - _at(given, loc).keys())
    from_preset = item["type"] == "value_error" and theirs and len(loc) > 1
    return f"{said} (from the preset: {', '.join(theirs)})" if from_preset else said


def _at(tree: Any, loc: tuple[str, ...]) -> Tree:
    for key in loc:
        tree = tree.get(key, {}) if isinstance(tree, dict) else {}
    return tree if isinstance(tree, dict) else {}
