"""From the options of ``train`` and ``config``, which are the fields of ``RunCfg``, to a ``RunCfg``.

tyro parses and documents them; ``groupwise.config`` judges the values, so that a wrong one reads the same from a file,
from Python and from the command line. Imports no torch.
"""

import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from itertools import dropwhile, takewhile
from typing import Any, Literal, get_args, get_origin

import tyro
from pydantic import create_model
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from groupwise.cli.option_names import check_names, is_absent
from groupwise.config import load_config, presets, resolve
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.config.base import Cfg
from groupwise.config.env import EnvCfg
from groupwise.config.run import RunCfg, TextRunCfg
from groupwise.config.text import TextTaskCfg
from groupwise.envs.names import refuse_module, unknown_environment
from groupwise.errors import ConfigError


def parse_options(
    target: str, algorithm: str | None, preset: str | None, options: Sequence[str], *, prog: str, description: str
) -> RunCfg | TextRunCfg:
    """The config of a target (environment id or JSON file) with ``--any.field VALUE`` options over it.

    Resolves twice: without the options, for the defaults that the help shows, then with those that differ from them.

    Raises:
        ConfigError: a setting is wrong, or cannot be read.
        SystemExit: help was asked for.
    """
    default = _resolve(target, algorithm, preset, {})
    check_names(options, default, _hidden)
    with _in_a_line():
        changed: Any = tyro.cli(
            type(default),
            prog=f"{prog} {target}",
            description=description,
            args=options,
            default=default,
            config=(tyro.conf.AvoidSubcommands,),
            registry=_RULES,
        )
    return _resolve(target, algorithm, preset, changed) if changed else default


def parse_env_options(
    target: str, names: Sequence[str], options: Sequence[str], *, prog: str, description: str
) -> EnvCfg:
    """The environment of a target with ``--env.field VALUE`` options over it.

    Args:
        names: the fields that are options.

    Raises:
        ConfigError: a setting is wrong, cannot be read, or is no option here.
        SystemExit: help was asked for.
    """
    known = [f"--env.{name.replace('_', '-')}" for name in names]
    for option in (word.partition("=")[0] for word in options if word.startswith("--") and word != "--help"):
        if option.replace("_", "-") not in known:
            raise ConfigError(f"{prog} takes no {option}; it takes {', '.join(known)}")
    default = _resolve_env(target, {})
    fields: dict[str, Any] = {
        name: (info.annotation, info) for name, info in EnvCfg.model_fields.items() if name in names
    }
    shown = create_model("Environment", __base__=Cfg, __doc__="Environment.", **fields)
    around = create_model("Trial", __base__=Cfg, env=(shown, ...))
    with _in_a_line():
        changed: Any = tyro.cli(
            around,
            prog=f"{prog} {target}",
            description=description,
            args=options,
            default=around(env=shown(**{name: vars(default.env)[name] for name in names})),
            registry=_RULES,
        )
    return (_resolve_env(target, changed) if changed else default).env


def _resolve_env(target: str, changed: dict[str, Any]) -> RunCfg:
    cfg = _resolve(target, None, None, changed)
    if not isinstance(cfg, RunCfg):
        raise ConfigError(f"{target} is about a text task, which has no environment; fix: an environment's id or file")
    return cfg


@contextmanager
def _in_a_line() -> Iterator[None]:
    """Turn the box that tyro draws around a complaint into an error like any other."""
    box = io.StringIO()
    try:
        with redirect_stderr(box):
            yield
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        inside = [line.strip("│| ") for line in box.getvalue().splitlines()[1:]]  # the first has the title
        said = takewhile(_has_words, dropwhile(lambda line: not _has_words(line), inside))
        raise ConfigError(_plainly(" ".join(said))) from stop


def _has_words(line: str) -> bool:
    return re.search(r"\w", line) is not None


def _plainly(said: str) -> str:
    """What tyro says in our words, with what is to be done."""
    if match := re.fullmatch(r"Error parsing (\S+): (.*)", said):
        option, why = match.groups()
        why = re.sub(r"no type matching (.*) could be instantiated from (.*)\.", r"expected \1, got \2", why)
        return f"{option}: {why}; fix: a value as --help shows it"
    if match := re.fullmatch(r"Unrecognized options: (.*)", said):
        return f"{match[1]!r} belongs to no option; fix: leave it out, or name its option (--help shows them all)"
    return f"{said.rstrip('.')}; fix: see --help"


def _resolve(target: str, algorithm: str | None, preset: str | None, changed: dict[str, Any]) -> RunCfg | TextRunCfg:
    fields = {key: value for key, value in changed.items() if key != "algorithm"}
    settings = changed.get("algorithm", {}) | ({"name": algorithm} if algorithm else {})
    if target.endswith(".json"):
        return load_config(target, settings or None, preset, **fields)
    _check_env_id(target)
    return resolve(target, settings or None, preset, **fields)


def _check_env_id(env_id: str) -> None:
    """Catch a typo before anything slow is imported."""
    refuse_module(env_id)
    if env_id in presets.env_ids():
        return
    from gymnasium.envs.registration import registry

    if env_id not in registry:
        raise unknown_environment(env_id, registry)


def _hidden(config: type[Cfg]) -> tuple[str, ...]:
    """Fields that are no options, since the target or ``--algorithm`` says them, or a file must: a list of functions."""
    if issubclass(config, AlgorithmCfg):
        return ("name",)
    return {EnvCfg: ("id",), TextTaskCfg: ("rewards",)}.get(config, ())


_RULES = ConstructorRegistry()
"""How tyro turns options into a nested dict of the fields that differ from their defaults."""


@_RULES.struct_rule
def _fields_of_config(info: StructTypeInfo) -> StructConstructorSpec | None:
    if not (isinstance(info.type, type) and issubclass(info.type, Cfg)):
        return None
    defaults = dict(info.default)
    fields = [
        StructFieldSpec(name, _type_of(field.annotation, defaults[name]), defaults[name], field.description)
        for name, field in info.type.model_fields.items()
        if name not in _hidden(info.type) and not is_absent(info.type, name, defaults)
    ]

    def changed(**options: Any) -> dict[str, Any]:
        return {
            name: v for name, v in options.items() if v != ({} if isinstance(defaults[name], Cfg) else defaults[name])
        }

    return StructConstructorSpec(changed, tuple(fields))


def _type_of(annotation: Any, default: object) -> Any:
    return type(default) if isinstance(default, Cfg) else annotation


@_RULES.primitive_rule
def _text_of_choice(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[str] | None:
    if get_origin(info.type) is not Literal:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{" + ",".join(get_args(info.type)) + "}",
        instance_from_str=lambda args: args[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    )


@_RULES.primitive_rule
def _whole_number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
    if info.type is not int:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda args: whole_number(args[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )


def whole_number(text: str) -> int:
    """A whole number; also as people write large ones, 1e5."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError(f"expected a whole number such as 100000 or 1e5, got {text!r}")
    return int(number)


@_RULES.primitive_rule
def _dict_from_json(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[dict[str, Any]] | None:
    if get_origin(info.type) is not dict:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda args: _read_object(args[0]),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    )


def _read_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{text!r} is broken JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{text!r}: expected a JSON object like '{{\"continuous\": true}}'")
    return value
