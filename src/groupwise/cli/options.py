"""Options of ``train``, ``config`` and ``check-env``: the fields of the settings, as ``--any.field VALUE``.

``groupwise.config`` checks the values, so errors are the same as in files and in Python.
Imports no torch.
"""

import functools
import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin

from groupwise.config import load_config, presets, resolve
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.config.base import Cfg
from groupwise.config.choices import Choice
from groupwise.config.env import EnvCfg
from groupwise.config.presets import Tree
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

_HELP = {"-h", "--help", "--help-all"}

_NAMES = """  --algorithm NAME                    grpo, ppo, or one that a plugin registers (grpo)
  --preset NAME                       credit and objective of a paper; see: groupwise list
"""


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
        return _flag(self.path)


def parse_options(argv: Sequence[str], *, prog: str, description: str, only: Sequence[str] = ()) -> RunCfg | TextRunCfg:
    """The settings of ``TARGET [--algorithm NAME] [--preset NAME] [--any.field VALUE ...]``.

    Args:
        argv: the target is an environment id or a JSON file; help without one is that of CartPole.
        only: paths of the settings that are options; empty for all.

    Raises:
        ConfigError: an option is unknown or its value wrong.
        SystemExit: after ``--help``.
    """
    asked = _HELP.intersection(argv)
    target, *words = [word for word in argv if word not in _HELP] or (["CartPole-v1"] if asked else [""])
    if target.startswith("-") or not target:
        raise ConfigError(f"expected an environment id or a JSON file first, as in: {prog} CartPole-v1")
    given = _by_path(words)
    preset = None if only or "preset" not in given else " ".join(given.pop("preset"))
    algorithm = [] if only else [Option("algorithm", str, None, "Name in the registry.", choice=True)]
    default = _resolve(target, preset, _tree(algorithm, given))
    choices = algorithm + [option for option in options_of(default) if option.choice]
    default = _resolve(target, preset, _tree(choices, given))  # which options there are depends on the choices
    options = [option for option in options_of(default) if not only or option.path in only]
    if asked:
        top = description if only else description + _NAMES
        _show_help(options, f"{prog} {target}", top, in_full="--help-all" in asked)
    known = {option.path for option in algorithm + options}
    if unknown := [path for path in given if path not in known]:
        raise ConfigError(f"unknown option {_flag(unknown[0])}{_hint(unknown[0], options, default)}")
    return _resolve(target, preset, _tree(algorithm + options, given))


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


def _flag(path: str) -> str:
    return f"--{path.replace('_', '-')}"


# --- reading ---


def _by_path(words: Sequence[str]) -> dict[str, list[str]]:
    """The words after each option, by its path; ``--policy.no-normalize-obs`` is ``--policy.normalize-obs false``."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.removeprefix("--").partition("=")
            outer, dot, last = flag.replace("-", "_").removesuffix(".name").rpartition(".")
            values = found[outer + dot + last.removeprefix("no_")] = ["false"] if last.startswith("no_") else []
            values += [value] if equals else []
        elif not found:
            raise ConfigError(f"{word!r} belongs to no option; fix: leave it out, or name its option (see --help)")
        else:
            values.append(word)
    return found


def _tree(options: Sequence[Option], given: Mapping[str, list[str]]) -> Tree:
    """The values that are given for these options, as nested settings."""
    tree: Tree = {}
    for option in options:
        if option.path in given:
            *outer, last = f"{option.path}.name".split(".") if option.choice else option.path.split(".")
            inside = functools.reduce(lambda settings, key: settings.setdefault(key, {}), outer, tree)
            inside[last] = _value(option, given[option.path])
    return tree


def _value(option: Option, words: Sequence[str]) -> Any:
    """What the words after an option mean; the config checks their types."""
    kinds = set(_kinds(option.annotation))
    if kinds == {bool} and not words:
        return True
    if not words and tuple not in kinds:
        raise ConfigError(f"{option.flag}: expected a value")
    values = [_convert(option.flag, word, kinds) for word in words]
    return values[0] if len(values) == 1 and (tuple not in kinds or values == [None]) else values


def _convert(flag: str, word: str, kinds: set[Any]) -> Any:
    if type(None) in kinds and word in ("None", "none", "null") and word not in kinds:
        return None
    if dict in kinds:
        try:
            return json.loads(word)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{flag}: {word!r} is broken JSON: {error}") from error
    return float(word) if int in kinds and re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d+", word) else word


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


# --- mistakes ---


def _hint(path: str, options: Sequence[Option], default: CommonCfg) -> str:
    """What an unknown option may mean."""
    if path == "env.id":
        return ": the environment is the first argument"
    part, _, field = path.partition(".")
    field = field.partition(".")[0]
    unknown = part == "algorithm" and field not in type(default.algorithm).model_fields
    if unknown and (other := explain_other_algorithm(field, default.algorithm.name)):
        return f": {other}"
    if inside := [option.flag for option in options if option.path.startswith(f"{path}.")]:
        return f": it has {', '.join(inside)}"
    known = [option.path for option in options]
    last = {name: name.rpartition(".")[2] for name in known}
    like = get_close_matches(path.rpartition(".")[2], last.values(), n=1, cutoff=0.7)
    near = get_close_matches(path, known, n=1, cutoff=0.8) or [name for name in known if last[name] in like]
    if near:
        return f"; did you mean {' or '.join(map(_flag, near[:3]))}?"
    return f"; known: {', '.join(map(_flag, known))}" if len(known) < _FEW else "; --help-all shows them all"


# --- help ---


def _show_help(options: Sequence[Option], prog: str, description: str, *, in_full: bool) -> NoReturn:
    """Print the common options, or all of them, and exit."""
    print(f"usage: {prog} [options]\n\n{description.rstrip()}")
    if in_full or len(options) < _FEW:
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
    if kinds == [bool]:
        outer, dot, last = option.path.rpartition(".")
        return f"| {_flag(f'{outer}{dot}no_{last}')}"
    names = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH", dict: "JSON", type(None): "none"}
    parts = [names.get(kind, str(kind)) for kind in dict.fromkeys(kinds) if kind not in (tuple, ...)]
    return "|".join(parts) + (" ..." if tuple in kinds else "")


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value)
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value).replace("None", "none")


# --- settings of a target ---


def _resolve(target: str, preset: str | None, changed: Tree) -> RunCfg | TextRunCfg:
    if target.endswith(".json"):
        return load_config(target, preset=preset, **changed)
    _check_env_id(target)
    return resolve(target, preset=preset, **changed)


def _check_env_id(env_id: str) -> None:
    """Catch a typo before anything slow is imported."""
    refuse_module(env_id)
    if env_id in presets.env_ids():
        return
    from gymnasium.envs.registration import registry

    if env_id not in registry:
        raise unknown_environment(env_id, registry)
