"""``groupwise list``: algorithms, presets, and every choice of credit and objective."""

import json
import shutil
import textwrap
from collections.abc import Sequence
from functools import partial

from groupwise.cli.parser import Parser
from groupwise.config import load as presets
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.errors import ConfigError, nearest

HELP = "Print algorithms, presets, and the choices of credit and objective with their sources."
Entry = list[str]
"""Lines that are shown together or not at all; all but the first are indented."""


def run(parser: Parser, argv: Sequence[str]) -> None:
    """Print the entries that contain the text in ``argv``, or all.

    Raises:
        ConfigError: none does.
    """
    parser.add_argument("text", nargs="?", default="", help="show only entries with this text, such as dapo or kl")
    text = parser.read(argv).text
    found = {title: [entry for entry in entries if _contains(entry, text)] for title, entries in _sections().items()}
    if not any(found.values()):
        hint = nearest(text, _names()) or f"; presets: {', '.join(presets.objective_presets())}"
        raise ConfigError(f"no entry contains {text!r}{hint}; all entries: groupwise list")
    for title, entries in found.items():
        if entries:
            _print(title, entries)


def _contains(entry: Entry, text: str) -> bool:
    """Whether ``text`` is in it; options and fields are spelt alike."""
    one, other = (words.lower().replace("_", "-") for words in (" ".join(entry), text))
    return other in one


def _sections() -> dict[str, list[Entry]]:
    return {
        "Algorithms: --algorithm NAME": [
            [f"{name}: {AlgorithmCfg.named(name).note()}"] for name in sorted(AlgorithmCfg.known)
        ],
        "Environments with tuned settings: groupwise train ID": [
            [f"{env_id}: {', '.join(presets.env_preset(env_id))}"] for env_id in presets.env_ids()
        ],
        "Credit and objective of a paper or library: --preset NAME": [
            [
                f"{name}: {preset.title}",
                preset.note,
                *(f"{key}: {json.dumps(value)}" for key, value in preset.settings.items()),
                preset.source,
            ]
            for name, preset in presets.objective_presets().items()
        ],
        "Each choice of credit and objective": [
            [f"--algorithm.{setting.replace('_', '-')} {value}: {choice.note} [{choice.source}]"]
            for key, choice in presets.choices().items()
            for setting, _, value in [key.rpartition(".")]
        ],
    }


def _names() -> list[str]:
    """Words that the user may have meant."""
    values = [key.rpartition(".")[2] for key in presets.choices()]
    return [*AlgorithmCfg.known, *presets.env_ids(), *presets.objective_presets(), *values]


def _print(title: str, entries: list[Entry]) -> None:
    """Print a section, as wide as the terminal."""
    width = shutil.get_terminal_size().columns
    print(f"\n{title}\n{'-' * min(len(title), width)}")
    wrap = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    for first, *others in entries:
        print(wrap(first, subsequent_indent="    "))
        for line in others:
            print(wrap(line, initial_indent="    ", subsequent_indent="        "))
