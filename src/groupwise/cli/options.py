"""Arguments of the commands, and settings as options: ``--any.field VALUE``. A mistake is one line, with the nearest name.

``groupwise.config`` checks the values of settings, so errors are the same as in files and in Python. Imports no torch.
"""

import functools
import json
import os
import re
import shutil
import textwrap
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, NoReturn, get_args

from pydantic import TypeAdapter

from groupwise import plugins
from groupwise import system as files
from groupwise.config import load as presets
from groupwise.config import load_config, resolve
from groupwise.config.base import OTHER_NAMES, Cfg, Choice, meant
from groupwise.config.load import SUFFIXES, Tree
from groupwise.config.run import EnvCfg, RunCfg, TextRunCfg, TextTaskCfg
from groupwise.envs.names import check_id, import_package, unknown_environment
from groupwise.errors import ConfigError

SHARED = ("--plugin", "--debug", "--help")
"""Options of every command."""
COMMON = (
    "algorithm", "algorithm.data", "policy.init_from", "task.data", "task.max_turns", "model.path", "seed", "total_steps", "total_iterations", "total_epochs", "run_dir", "device", "env.num_envs", "num_prompts",
    "sampling.max_new_tokens", "algorithm.group_size", "algorithm.learning_rate", "algorithm.num_steps",
    "algorithm.num_epochs", "algorithm.minibatch_size", "algorithm.gamma", "algorithm.ent_coef", "algorithm.kl_coef",
    "policy.hidden_sizes", "evaluation.interval", "stop.threshold",
)  # fmt: skip
"""Settings that ``--help`` shows, in this order; ``--help-all`` shows all."""
_HELP = {"-h", "--help", "--help-all"}
_HIDDEN = ((EnvCfg, "id"), (TextTaskCfg, "rewards"))
"""The target of the command, and what only a file can set."""
_TYPES = {"integer": "INT", "number": "FLOAT", "string": "TEXT", "object": "JSON", "null": "none"}
_CHOICE = "choice"
"""Type of an item that is a name, or a JSON object of a name and parameters."""


class HelpShownError(SystemExit):
    """Ends a command that was asked for help; other ``SystemExit`` come from code of the user's."""


class Parser(ArgumentParser):
    """Raises instead of exiting, and takes no abbreviations, which would swallow settings."""

    def __init__(self, **options: Any) -> None:
        self.flags = [*SHARED]
        super().__init__(allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter, **options)

    def add_argument(self, *names: Any, **options: Any) -> Any:
        """Add an argument, and remember its name."""
        self.flags += [name for name in names if name.startswith("--")]
        return super().add_argument(*names, **options)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """End the command after ``--help``."""
        raise HelpShownError(status)

    def read(self, argv: Sequence[str]) -> Namespace:
        """The arguments; a ``ConfigError`` if there are others."""
        found, rest = self.parse_known_intermixed_args(argv)  # positionals may follow options
        if flags := [word for word in rest if word.startswith("-")]:
            if not flags[0].startswith("--") and not re.fullmatch("-[A-Za-z]", flags[0]):
                raise ConfigError(f"unexpected {flags[0]!r}; fix: put a text that begins with a minus after --")
            raise unknown_option(flags[0].partition("=")[0], self.flags, f"{self.prog} --help")
        if rest:
            raise ConfigError(f"unexpected {rest[0]!r}; fix: see {self.prog} --help")
        return found

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message."""
        raise ConfigError(f"{message}; fix: see {self.prog} --help")


_NO = r"\bno_(?=\w*$)"
_THOUSANDS = r"[1-9]\d{0,2}(,\d{3})+"


def count(word: str) -> int:
    """A whole number of at least 1, also in the forms 1e5 and 12,345."""
    word = word.replace(",", "") if re.fullmatch(_THOUSANDS, word) else word
    if not re.fullmatch(r"\d+(\.\d+)?([eE]\+?\d+)?", word) or float(word) < 1 or float(word) % 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, such as 100 or 1e5, got {word!r}")
    return int(float(word))


def unknown_option(flag: str, known: Iterable[str], more: str) -> ConfigError:
    """The error of an option that does not exist: the nearest names, and where all are."""
    typed = re.sub(_NO, "", _path(flag))
    last = typed.rpartition(".")[2]
    own = OTHER_NAMES.get(last, last)
    paths = [path for path in map(_path, known) if not typed.startswith(f"{path}.")]
    inside = [_flag(path) for path in paths if path.startswith(f"{typed}.")]  # it is a group
    near = [path for path in paths if own in (path, path.rpartition(".")[2])]
    if not near and own == last:
        ends = [path for path in paths if path.endswith(f"_{last}")]  # --steps
        near = sorted(ends, key=lambda path: path.count(".")) or get_close_matches(typed, paths, n=1, cutoff=0.75)
    hint = f"{meant([*map(_flag, near[:3])] or [own])} " if near or own != last else ""
    hint = f"it is a group of options: {', '.join(inside)}; " if inside else hint
    return ConfigError(f"unknown option {_flag(_path(flag))}; {hint}all options: {more}")


def _path(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _flag(path: str) -> str:
    return f"--{path.replace('_', '-')}"


# Settings as options


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

    @property
    def types(self) -> list[dict[str, Any]]:
        """JSON Schemas of the values that it takes."""
        schema = TypeAdapter(self.annotation).json_schema()
        if "$ref" in schema.get("items", ()):  # a list of choices, whose definition lists the names first
            (definition,) = schema["$defs"].values()
            schema["items"] = {**definition["anyOf"][0], "type": _CHOICE}
        found: list[dict[str, Any]] = schema.get("anyOf", [schema])
        return [{"type": "object"} if "$ref" in kind else kind for kind in found]  # a number, or a choice

    @property
    def values(self) -> str:
        """``FLOAT|none``; of a flag the one that turns it off."""
        if self.annotation is bool:
            outer, dot, last = self.path.rpartition(".")
            return f"| {_flag(f'{outer}{dot}no_{last}')}"
        return "|".join(dict.fromkeys(map(_type_name, self.types)))


_FIRST = (Option("algorithm", str, None, "", choice=True), Option("policy.init_from", str, None, ""))
"""Options on which the defaults of the others depend."""


def parse_options(
    argv: Sequence[str], parser: Parser, only: Sequence[str] = (), *, allow_programs: bool = True
) -> RunCfg | TextRunCfg:
    """The settings of ``TARGET [--algorithm NAME] [--preset NAME] [--any.field VALUE ...]``; ``--a.no-b`` is ``--a.b false``.

    A ``ConfigError`` if an option is not known or its value not accepted; ``SystemExit`` after help.

    Args:
        argv: the target is an environment id or a file of settings; help without one is that of CartPole.
        parser: of the command, whose own options are not in ``argv``.
        only: paths of the settings that are options; empty for all.
        allow_programs: whether a file may name programs. Commands that train let the user decide; others start none.
    """
    asked, words = _HELP.intersection(argv), [word for word in argv if word not in _HELP]
    words = words or ["CartPole-v1"] * len(asked)
    if not words or words[0].startswith("-"):
        fix = f"{parser.prog} CartPole-v1 --seed 3"
        raise ConfigError(f"expected an environment id or a file of settings first, then options; fix: {fix}")
    target, *words = words
    given: dict[str, list[str]] = {}  # words after each option, by its path
    typed: dict[str, str] = {}  # the option, with its no
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.removeprefix("--").partition("=")
            name = _path(flag).removesuffix(".name")
            path = re.sub(_NO, "", name)
            typed[path] = name
            values = given[path] = ["false"] if path != name else []
            values += [value] if equals else []
        elif not given:
            raise ConfigError(f"{word!r} belongs to no option; fix: name one, as in --algorithm ppo (see --help)")
        else:
            values.append(word)
    if "model" in given:
        given["model.path"] = given.pop("model")  # as in Python, model="..."
    preset = None if only or typed.get("preset") != "preset" else " ".join(given.pop("preset"))
    default = _resolve(target, preset, _tree(_FIRST, given))
    options = [option for option in options_of(default, given=given) if not only or option.path in only]
    if asked:
        in_full = "--help-all" in asked or len(only) > 0
        _show_help(options, f"{parser.prog} {target}", parser.description or "", in_full=in_full)
    known = [option.path for option in options]
    switches = {option.path for option in options if option.annotation is bool}
    if unknown := [path for path in given if path not in (known if typed.get(path, path) == path else switches)]:
        what, other = ("an environment", TextRunCfg) if isinstance(default, RunCfg) else ("a text task", RunCfg)
        part, dot, _ = unknown[0].partition(".")
        if dot and part in other.model_fields.keys() - type(default).model_fields.keys():
            own = "language models" if other is TextRunCfg else "environments"
            fix = "a file with a task" if other is TextRunCfg and not only else "leave it out"
            raise ConfigError(f"{_flag(unknown[0])}: {target} is {what}, and this is an option of {own}; fix: {fix}")
        raise unknown_option(
            typed.get(unknown[0], unknown[0]), [*known, *parser.flags, *(() if only else ("preset",))], "--help-all"
        )
    return _resolve(target, preset, _tree(options, given), allow_programs=allow_programs)


def parse_env(argv: Sequence[str], parser: Parser, only: Sequence[str]) -> EnvCfg:
    """The settings of the environment that the words describe."""
    cfg = parse_options(argv, parser, only)
    if not isinstance(cfg, RunCfg):
        raise ConfigError(f"{argv[0]} is a text task without an environment; fix: an environment's id or file")
    return cfg.env


def words_of(env: EnvCfg) -> list[str]:
    """An environment's id, and options for what decides its spaces and length."""
    words = [env.id, *(("--env.kwargs", json.dumps(env.kwargs)) if env.kwargs else ())]
    of_spaces = ("action_chunk", "num_action_steps", "action_repeat", "max_episode_steps", "obs_keys", "action_masks")
    for name, value in env.changed(*of_spaces).items():
        values = () if value is True else value if isinstance(value, tuple) else (value,)
        words += [_flag(f"env.{name}"), *map(str, values)]
    return words


def _resolve(target: str, preset: str | None, changed: Tree, *, allow_programs: bool = True) -> RunCfg | TextRunCfg:
    if target.lower().endswith((".json", *SUFFIXES)):
        return load_config(target, preset=preset, allow_programs=allow_programs, **changed)
    if plugins.is_text_env(target):
        return presets.resolve_text(preset=preset, **changed | {"task": changed.get("task", {}) | {"env": target}})
    check_id(target)
    if target not in presets.env_ids():  # a typo is found before anything slow is imported
        from gymnasium.envs.registration import registry

        import_package(target)
        if target not in registry:
            raise unknown_environment(target, registry)
    return resolve(target, preset=preset, **changed)


def options_of(config: Cfg, prefix: str = "", given: Mapping[str, list[str]] = {}) -> Iterator[Option]:
    """An option for every setting except the target and what only a file can set.

    Args:
        given: words by path; the parameters of a choice are those of the member that is given, and a group that is None
            has options of its own once one of them is given.
    """
    for name, field in type(config).model_fields.items():
        value, path, text = vars(config)[name], f"{prefix}{name}", (field.description or "").replace("``", "")
        if (type(config), name) in _HIDDEN:
            continue
        groups = [kind for kind in get_args(field.annotation) if isinstance(kind, type) and issubclass(kind, Cfg)]
        if value is None and groups and any(other.startswith(f"{path}.") for other in given):
            value = groups[0]()
        if isinstance(value, Choice):
            yield Option(path, Literal[tuple(sorted(value.known))], value.own_name(), text, choice=True)
            chosen = " ".join(given.get(path, []))
            member = value.named(chosen)() if chosen in value.known and chosen != value.own_name() else value
            yield from (option for option in options_of(member, f"{path}.", given) if option.path != f"{path}.name")
        elif isinstance(value, Cfg):
            yield from options_of(value, f"{path}.", given)
        else:
            yield Option(path, field.annotation, value, text)


# Values


def _tree(options: Sequence[Option], given: Mapping[str, list[str]]) -> Tree:
    """The values that are given for these options, as nested settings."""
    tree: Tree = {}
    for option in options:
        if option.path in given:
            *outer, last = f"{option.path}.name".split(".") if option.choice else option.path.split(".")
            inside = functools.reduce(lambda settings, key: settings.setdefault(key, {}), outer, tree)
            inside[last] = value_of(option, given[option.path])
    return tree


def value_of(option: Option, words: Sequence[str]) -> Any:
    """Value of an option from the words after it; the config checks their types."""
    kinds = option.types
    own = {kind.get("type") for kind in kinds}
    if own == {"boolean"} and not words:
        return True
    if not words and "array" not in own:
        raise ConfigError(f"{option.flag}: expected a value")
    items = [item for kind in kinds for item in (kind.get("items", {}), *kind.get("prefixItems", ()))]
    types = own.union(item["type"] for item in items if "type" in item)

    def convert(word: str) -> Any:
        if "null" in types and word in ("None", "none", "null"):
            return None
        if types <= {"object", "null"} or (word.startswith("{") and not types.isdisjoint(("object", _CHOICE))):
            return parse_json(option.flag, word)
        if "boolean" in types and word in ("true", "false"):
            return word == "true"
        if not types.isdisjoint(("integer", "number")):
            if types.isdisjoint(("array", "number")) and re.fullmatch(_THOUSANDS, word):  # 1,500 may be 1.5 elsewhere
                return int(word.replace(",", ""))
            for number in (int, float):
                with suppress(ValueError):
                    return number(word)
        if (
            "array" in own
            and types <= {"array", "integer", "number", "null"}
            and len(parts := re.findall(r"\d[\d.e-]*", word)) > 1
        ):
            raise ConfigError(
                f"{option.flag}: {word!r:.200} is no number; expected numbers with spaces between; fix: {option.flag} {' '.join(parts)}"
            )
        return word

    values, single = list(map(convert, words)), [None, *(kind.get("const") for kind in kinds)]
    return values[0] if len(values) == 1 and ("array" not in own or values[0] in single) else values


def parse_json(flag: str, word: str) -> Any:
    """The value of a JSON text after an option."""
    try:
        return files.parse_json(os.fsencode(word))
    except ValueError as error:
        raise ConfigError(f"{flag}: {word!r:.200} is broken JSON: {error}") from error


# Help


def _show_help(options: Sequence[Option], prog: str, description: str, *, in_full: bool) -> NoReturn:
    """Print the common options, or all of them, and exit."""
    print(f"usage: {prog} [options]\n\n{description}")
    by_path = {option.path: option for option in options}
    if in_full:
        wrap = functools.partial(textwrap.fill, width=min(shutil.get_terminal_size().columns, 120))
        for option in options:
            print(f"  {option.flag} {option.values}")
            body = f"{option.text} (default: {_shown(option.default)})"
            print(wrap(body, break_on_hyphens=False, initial_indent=" " * 6, subsequent_indent=" " * 6))
        raise HelpShownError(0)
    unused = {"algorithm.num_steps"} if "num_prompts" in by_path else set()
    common = [by_path[path] for path in COMMON if path in by_path and path not in unused]
    for option in common:
        text = textwrap.shorten(option.text.partition(". ")[0].rstrip("."), 80, placeholder=" ...")
        of_none = re.search(r"None: ([^.]+)", option.text)
        default = of_none[1] if option.default is None and of_none else _shown(option.default)
        print(f"{f'  {option.flag} {option.values}':<38}{text} ({default})")
    print(f"\n{len(options) - len(common)} further settings: --help-all")
    raise HelpShownError(0)


def _type_name(schema: Mapping[str, Any]) -> str:
    if "const" in schema or "enum" in schema:
        return "|".join(map(str, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return f"{_type_name(schema.get('items') or schema['prefixItems'][0])} ..."
    return "PATH" if schema.get("format") == "path" else _TYPES.get(str(schema.get("type")), "VALUE")


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return json.dumps(value)
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value).replace("None", "none")
