"""What ``groupwise list`` shows: algorithms, presets, and every choice of credit and objective."""

import shutil
import textwrap
from typing import Any

from groupwise.config import presets
from groupwise.config.algorithm import AlgorithmCfg
from groupwise.errors import ConfigError, nearest

Entry = list[str]
"""Lines that are shown together or not at all; all but the first are indented."""


def show(text: str) -> None:
    """Print every entry that contains ``text``.

    Raises:
        ConfigError: none does.
    """
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
            _entry_of_preset(name, preset) for name, preset in presets.objective_presets().items()
        ],
        "Each choice of credit and objective": [
            _entry_of_choice(key, choice) for key, choice in presets.choices().items()
        ],
    }


def _entry_of_preset(name: str, preset: presets.ObjectivePreset) -> Entry:
    parts = preset.settings.items()
    settings = [f"{key}: {_choices_of(value) if isinstance(value, dict) else value}" for key, value in parts]
    return [f"{name}: {preset.title}", preset.note, *settings, preset.source]


def _entry_of_choice(key: str, choice: presets.ChoiceNote) -> Entry:
    setting, value = key.rsplit(".", 1)
    return [f"--algorithm.{setting.replace('_', '-')} {value}: {choice.note} [{choice.source}]"]


def _names() -> list[str]:
    """Words that the user may have meant."""
    values = [key.rsplit(".", 1)[1] for key in presets.choices()]
    return [*AlgorithmCfg.known, *presets.env_ids(), *presets.objective_presets(), *values]


def _choices_of(tree: dict[str, Any]) -> str:
    """Settings in a line: a choice by its value, a number or 'none' with its name."""
    parts = []
    for key, value in tree.items():
        if isinstance(value, dict):
            rest = {name: item for name, item in value.items() if name != "name"}
            parts.append(f"{value.get('name', key)} ({_choices_of(rest)})")
        else:
            parts.append(value if isinstance(value, str) and value != "none" else f"{key} {value}")
    return ", ".join(parts)


def _print(title: str, entries: list[Entry]) -> None:
    """Print a section, as wide as the terminal."""
    width = shutil.get_terminal_size().columns
    print(f"\n{title}\n{'-' * min(len(title), width)}")
    for entry in entries:
        for number, line in enumerate(entry):
            indent = "    " if number else ""
            print(
                textwrap.fill(
                    line,
                    width,
                    initial_indent=indent,
                    subsequent_indent=indent + "    ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            )
