"""What ``groupwise list`` shows: algorithms, presets, and every choice of credit and objective."""

import functools
import shutil
import textwrap
from collections.abc import Callable
from itertools import groupby
from typing import Any, NamedTuple

from groupwise.config import presets
from groupwise.config.registry import algorithm_entry, algorithm_names
from groupwise.errors import ConfigError, nearest


class Entry(NamedTuple):
    """What is shown as a whole or not at all."""

    lines: list[str]
    heading: str = ""
    """Stands once above all neighbours that have the same."""

    def contains(self, text: str) -> bool:
        """Whether ``text`` is in it, options and fields being spelt alike."""
        return _bare(text) in _bare(" ".join([self.heading, *self.lines]))


def show(text: str) -> None:
    """Print every entry that contains ``text``.

    Raises:
        ConfigError: none does.
    """
    found = {title: [entry for entry in entries if entry.contains(text)] for title, entries in _sections().items()}
    if not any(found.values()):
        hint = nearest(text, _names()) or f"; presets: {', '.join(presets.objective_presets())}"
        raise ConfigError(f"no entry contains {text!r}{hint}; all entries: groupwise list")
    for title, entries in found.items():
        if entries:
            _print(title, entries)


def _sections() -> dict[str, list[Entry]]:
    return {
        "Algorithms: --algorithm NAME": [Entry([f"{name}: {_title_of(name)}"]) for name in algorithm_names()],
        "Environments with tuned settings: groupwise train ID": [
            Entry([f"{env_id}: {', '.join(presets.env_preset(env_id))}"]) for env_id in presets.env_ids()
        ],
        "Credit and objective of a paper or library: --preset NAME": [
            Entry(
                [
                    p.note,
                    *(f"{k}: {_choices_of(v) if isinstance(v, dict) else v}" for k, v in p.settings.items()),
                    p.source,
                ],
                f"{name}: {p.title}",
            )
            for name, p in presets.objective_presets().items()
        ],
        "Each choice of credit and objective: --algorithm.credit.scale none": [
            _entry_of_choice(key, choice) for key, choice in presets.choices().items()
        ],
    }


def _title_of(algorithm: str) -> str:
    return (algorithm_entry(algorithm).cfg_type.__doc__ or "").partition("\n")[0]


def _entry_of_choice(key: str, choice: presets.ChoiceNote) -> Entry:
    setting, value = key.rsplit(".", 1)
    return Entry([f"{value}: {choice.note} [{choice.source}]"], f"--algorithm.{setting.replace('_', '-')}")


def _names() -> list[str]:
    """Words that somebody may have meant."""
    values = [key.rsplit(".", 1)[1] for key in presets.choices()]
    return [*algorithm_names(), *presets.env_ids(), *presets.objective_presets(), *values]


def _bare(text: str) -> str:
    return text.lower().replace("_", "-")


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
    """Print a section: its headings, and below each the lines that belong to it, as wide as the terminal."""
    width = shutil.get_terminal_size().columns
    print(f"\n{title}\n{'-' * min(len(title), width)}")
    wrap: Callable[..., list[str]] = functools.partial(
        textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False
    )
    for heading, neighbours in groupby(entries, key=lambda entry: entry.heading):
        indent = "    " if heading else ""
        wrapped = wrap(heading, subsequent_indent="    ")
        for line in (line for entry in neighbours for line in entry.lines):
            wrapped += wrap(line, initial_indent=indent, subsequent_indent=indent + "    ")
        print("\n".join(wrapped))
