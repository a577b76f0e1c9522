"""Options of ``train``, ``config`` and ``check-env``: the fields of the settings, as ``--any.field VALUE``.

argparse reads the words; ``groupwise.config`` checks the values, so errors are the same as in files and in Python.
Imports no torch.
"""

import argparse
import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from groupwise.cli.parser import Parser
from groupwise.config import load_config, presets, resolve
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.config.base import Cfg
from groupwise.config.choices import Choice
from groupwise.config.env import EnvCfg
from groupwise.config.registry import explain_other_algorithm
from groupwise.config.run import CommonCfg, RunCfg, TextRunCfg
from groupwise.config.text import TextTaskCfg
from groupwise.envs.names import refuse_module, unknown_environment
from groupwise.errors import ConfigError

COMMON = {
    "task.data": "file of prompts",
    "model.path": "folder or hub id",
    "seed": "of all randomness",
    "total_steps": "environment steps, or tokens for text",
    "run_dir": "new folder; none: one under runs/",
    "device": "cpu, cuda, cuda:1 or auto",
    "env.num_envs": "environments stepped together",
    "num_prompts": "prompts in one iteration",
    "sampling.max_new_tokens": "longest completion",
    "algorithm.group_size": "members of a group, which share their start",
    "algorithm.learning_rate": "before its schedule",
    "algorithm.num_steps": "per environment in one iteration",
    "algorithm.num_epochs": "passes over each rollout",
    "algorithm.minibatch_size": "steps in one optimiser step",
    "algorithm.gamma": "discount",
    "algorithm.ent_coef": "weight of the entropy bonus",
    "algorithm.kl_coef": "weight of the KL to a reference policy",
    "policy.hidden_sizes": "width of each hidden layer",
    "evaluation.interval": "steps between evaluations; none: a tenth of all",
    "stop.return_threshold": "stop at this evaluation score",
}
"""What ``--help`` shows, in this order; ``--help-all`` shows all settings."""

_FEW = 20
"""Fewer options than this are all shown."""


class Option(NamedTuple):
    """A setting on the command line."""

    path: str
    """Path of the field, with dots."""
    annotation: Any
    default: Any
    text: str
    """Description."""
    choice: bool = False
    """Whether it names a choice with parameters."""

    @property
    def flag(self) -> str:
        """``--algorithm.clip-coef``."""
        return f"--{self.path.replace('_', '-')}"

    @property
    def off(self) -> str:
        """``--policy.no-normalize-obs``, for booleans."""
        head, dot, last = self.flag.removeprefix("--").rpartition(".")
        return f"--{head}{dot}no-{last}"


def parse_options(
    target: str,
    algorithm: str | None,
    preset: str | None,
    words: Sequence[str],
    *,
    prog: str,
    description: str,
    only: Sequence[str] = (),
) -> RunCfg | TextRunCfg:
    """The settings of a target (environment id or JSON file), overridden by ``--any.field VALUE`` options.

    Args:
        only: paths of the settings that are options; empty for all.

    Raises:
        ConfigError: an option is unknown or its value wrong.
        SystemExit: after ``--help``.
    """
    words = _spelt_alike(words)
    default = _resolve(target, algorithm, preset, {})
    choices = [option for option in options_of(default) if option.choice]
    if chosen := _read(choices, words, prog)[0]:  # which options there are depends on the choices
        default = _resolve(target, algorithm, preset, chosen)
    options = [option for option in options_of(default) if not only or option.path in only]
    _show_help(options, words, f"{prog} {target}", description)
    changed, rest = _read(options, words, prog)
    _refuse(rest, options, default)
    return _resolve(target, algorithm, preset, changed) if changed else default


def options_of(config: Cfg, prefix: str = "") -> Iterator[Option]:
    """An option for every setting except the target, ``--algorithm``, and what only a file can set."""
    kind = type(config)
    for name, field in kind.model_fields.items():
        value, path, text = vars(config)[name], f"{prefix}{name}", " ".join((field.description or "").split())
        if _is_hidden(kind, name) or (value is None and kind.declared_type(name)):
            continue
        if isinstance(value, Choice):
            yield Option(path, Literal[tuple(sorted(value.known))], value.name, text, choice=True)
            yield from (option for option in options_of(value, f"{path}.") if option.path != f"{path}.name")
        elif isinstance(value, Cfg):
            yield from options_of(value, f"{path}.")
        else:
            yield Option(path, field.annotation, value, text)


def _is_hidden(kind: type[Cfg], name: str) -> bool:
    return (issubclass(kind, AlgorithmCfg) and name == "name") or (kind, name) in (
        (EnvCfg, "id"),
        (TextTaskCfg, "rewards"),
    )


def _is_switch(option: Option) -> bool:
    return set(_kinds(option.annotation)) == {bool}


def whole_number(text: str) -> int:
    """A whole number, also in the form 1e5."""
    try:
        number = Decimal(text)
    except InvalidOperation:
        number = Decimal("nan")
    if not number.is_finite() or number % 1:
        raise argparse.ArgumentTypeError(f"expected a whole number such as 100000 or 1e5, got {text!r}")
    return int(number)


# --- reading ---


def _read(options: Sequence[Option], words: Sequence[str], prog: str) -> tuple[dict[str, Any], list[str]]:
    """The settings in ``words`` as a tree, and the other words."""
    parser = Parser(prog=prog.partition(" --")[0], add_help=False, argument_default=argparse.SUPPRESS)
    for option in options:
        kinds = set(_kinds(option.annotation))
        if _is_switch(option):
            parser.add_argument(option.flag, dest=option.path, action="store_true")
            parser.add_argument(option.off, dest=option.path, action="store_false")
            continue
        several = tuple in kinds
        names = [option.flag, *([f"{option.flag}.name"] if option.choice else [])]
        parser.add_argument(*names, dest=option.path, type=_reader(kinds), nargs="*" if several else None)
    given, rest = parser.parse_known_args(words)
    chosen = {option.path for option in options if option.choice}
    tree: dict[str, Any] = {}
    for path, value in vars(given).items():
        *outer, last = (f"{path}.name" if path in chosen else path).split(".")
        inside = tree
        for name in outer:
            inside = inside.setdefault(name, {})
        inside[last] = None if value == [None] else value
    return tree, rest


def _reader(kinds: set[Any]) -> Any:
    """Reads a word for a setting of these types; the config checks floats and strings."""

    def read(word: str) -> Any:
        if type(None) in kinds and word in ("None", "none", "null") and word not in kinds:
            return None
        if dict in kinds:
            return _object(word)
        if int in kinds and float not in kinds and str not in kinds:
            return whole_number(word)
        return word

    return read


def _kinds(annotation: Any) -> Iterator[Any]:
    """The plain types of an annotation: of ``tuple[int, ...] | None`` tuple, int and None; of a Literal its values."""
    origin = get_origin(annotation)
    if origin is Literal:
        yield from get_args(annotation)
    elif origin is dict:
        yield dict
    elif origin is None:
        yield annotation
    elif "__metadata__" in dir(annotation):  # Annotated
        yield from _kinds(get_args(annotation)[0])
    else:
        if origin is tuple:
            yield tuple
        for inner in get_args(annotation):
            yield from _kinds(inner)


def _object(word: str) -> dict[str, Any]:
    try:
        value = json.loads(word)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{word!r} is broken JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{word!r}: expected a JSON object like '{{\"continuous\": true}}'")
    return value


def _spelt_alike(words: Sequence[str]) -> list[str]:
    """The words with hyphens in the names of options."""
    return [re.sub(r"^--[^=]*", lambda name: name[0].replace("_", "-"), word) for word in words]


# --- mistakes ---


def _refuse(rest: Sequence[str], options: Sequence[Option], default: CommonCfg) -> None:
    """Refuse words that belong to no option, by a ``ConfigError`` with the nearest name."""
    unknown = [word.partition("=")[0] for word in rest if word.startswith("--")]
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}{_hint(unknown[0], options, default)}")
    if rest:
        raise ConfigError(f"{rest[0]!r} belongs to no option; fix: leave it out, or name its option (see --help)")


def _hint(flag: str, options: Sequence[Option], default: CommonCfg) -> str:
    known = [name for option in options for name in (option.flag, *([option.off] if _is_switch(option) else []))]
    path = flag.removeprefix("--").replace("-", "_").split(".")
    own = type(default.algorithm).model_fields
    if path == ["env", "id"]:
        return ": the environment is the first argument"
    unknown = path[0] == "algorithm" and len(path) > 1 and path[1] not in own
    if unknown and (other := explain_other_algorithm(path[1], default.algorithm.name)):
        return f": {other}"
    if inside := [option.flag for option in options if option.flag.startswith(f"{flag}.")]:
        return f": it has {', '.join(inside)}"
    last = {name.removeprefix("--").rpartition(".")[2] for name in known}
    like = get_close_matches(flag.removeprefix("--").rpartition(".")[2], last, n=1, cutoff=0.7)
    near = get_close_matches(flag, known, n=1, cutoff=0.8) or [
        name for name in known if name.removeprefix("--").rpartition(".")[2] in like
    ]
    if near:
        return f"; did you mean {' or '.join(near[:3])}?"
    return f"; known: {', '.join(known)}" if len(known) < _FEW else "; --help-all shows them all"


# --- help ---


def _show_help(options: Sequence[Option], words: Sequence[str], prog: str, description: str) -> None:
    """After ``--help`` print the common options, after ``--help-all`` all of them."""
    if {"-h", "--help", "--help-all"}.isdisjoint(words):
        return
    print(f"usage: {prog} [options]\n\n{description.rstrip()}")
    if "--help-all" in words or len(options) < _FEW:
        width = min(shutil.get_terminal_size().columns, 120)
        print("\n".join(line for option in options for line in _in_full(option, width)))
    else:
        by_path = {option.path: option for option in options}
        common = [by_path[path] for path in COMMON if path in by_path]
        print("\n".join(map(_in_a_line, common)))
        print(f"\n{len(options) - len(common)} further settings: --help-all")
    raise SystemExit(0)


def _in_a_line(option: Option) -> str:
    return f"{f'  {option.flag} {_metavar(option)}':<38}{COMMON[option.path]} ({_shown(option.default)})"


def _in_full(option: Option, width: int) -> list[str]:
    body = f"{option.text.replace('``', '')} (default: {_shown(option.default)})"
    wrapped = textwrap.wrap(body, width, initial_indent="      ", subsequent_indent="      ", break_on_hyphens=False)
    return [f"  {option.flag} {_metavar(option)}", *wrapped]


def _metavar(option: Option) -> str:
    kinds = list(_kinds(option.annotation))
    if _is_switch(option):
        return f"| {option.off}"
    names = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", dict: "JSON", type(None): "none"}
    parts = [names.get(kind, str(kind)) for kind in dict.fromkeys(kinds) if kind not in (tuple, ...)]
    return "|".join(parts) + (" ..." if tuple in kinds else "")


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value)
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value).replace("None", "none")


# --- settings of a target ---


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
