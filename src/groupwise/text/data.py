"""Examples from files and objects, and the order in which training takes them."""

import functools
import random
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from groupwise.errors import DataError, nearest
from groupwise.seeding import derive_seed
from groupwise.text.files import read, short
from groupwise.text.reward_functions import ARGUMENTS

Message = dict[str, str]
Prompt = str | tuple[Message, ...]
Completion = str | Sequence[Message]
"""As rewards read it: a text; after a prompt of messages, messages."""


class Example(NamedTuple):
    """A prompt and its columns."""

    prompt: Prompt
    """A text, or messages with ``role`` and ``content``."""
    columns: dict[str, Any]
    """All other columns; they are passed to the rewards."""


def load_examples(source: object, *, prompt_column: str = "prompt") -> list[Example]:
    """The examples of a file or an object; columns that a row lacks are None.

    Args:
        source: path of a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file; or a ``datasets.Dataset``, a pandas data
            frame or any other iterable of mappings, or of texts, which are prompts without columns.

    Raises:
        DataError: no examples, a row that cannot be read (names file and line), or a missing column.
        MissingExtraError: a Parquet file without the extra ``text``.
    """
    where, rows = _rows(source)
    rows = [{prompt_column: row} if isinstance(row, str) else row for row in rows]
    if not rows:
        raise DataError(f"{where} has no examples; fix: at least one prompt")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(
                f"{where}, example {number}: expected a mapping of columns or a text; got {short(row)}; fix: {{'prompt': ...}}"
            )
    columns = list(dict.fromkeys(column for row in rows for column in row))
    _check_columns(where, columns, prompt_column)
    examples = [
        Example(
            _prompt(f"{where}, example {number}", row.get(prompt_column)),
            {column: row.get(column) for column in columns if column != prompt_column},
        )
        for number, row in enumerate(rows)
    ]
    if len({isinstance(example.prompt, str) for example in examples}) > 1:
        raise DataError(f"some prompts of {where} are texts and some are messages; fix: all of one kind")
    return examples


def without_overlap(train: Sequence[Example], held_out: Sequence[Example]) -> list[Example]:
    """The training examples whose prompts are not held out; white space makes no difference. Warns of the others.

    Raises:
        DataError: none are left.
    """
    keys = {_key(example.prompt) for example in held_out}
    kept = [example for example in train if _key(example.prompt) not in keys]
    if not kept:
        raise DataError("all training prompts are in the evaluation data; fix: other eval_data, or eval_overlap='keep'")
    if num_dropped := len(train) - len(kept):
        warnings.warn(
            f"{num_dropped} of {len(train)} training prompts are in the evaluation data: dropped", stacklevel=2
        )
    return kept


@functools.lru_cache(maxsize=2)
def shuffled(size: int, seed: int, epoch: int) -> list[int]:
    """The order in which an epoch takes the examples."""
    order = list(range(size))
    random.Random(derive_seed(seed, "prompts", epoch)).shuffle(order)
    return order


def _rows(source: object) -> tuple[str, list[Any]]:
    """Name and rows of the source."""
    if isinstance(source, (str, Path)):
        return str(source), read(Path(source))
    if "pandas" in sys.modules and isinstance(source, sys.modules["pandas"].DataFrame):
        return "the data frame", source.to_dict("records")
    if isinstance(source, Mapping):
        raise DataError(f"the data are a mapping of {_some(source)}; fix: one of its parts, such as data['train']")
    if not isinstance(source, Iterable):
        raise DataError(f"data = {short(source)}: expected a path or an iterable of examples; fix: a list of mappings")
    return "the data", list(source)


def _check_columns(where: str, columns: Sequence[str], prompt_column: str) -> None:
    if prompt_column not in columns:
        raise DataError(
            f"{where} has no column {prompt_column!r}; it has {_some(columns)}; fix: prompt_column"
            f"{nearest(prompt_column, columns)}"
        )
    for column in columns:
        if column in ARGUMENTS:
            raise DataError(f"{where} has a column {column!r}, which is an argument of every reward; fix: rename it")


def _prompt(where: str, prompt: object) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or not prompt:
        raise DataError(f"{where}: prompt = {short(prompt)}: expected a text or a list of messages; fix: the row")
    return tuple(_message(where, message) for message in prompt)


def _message(where: str, message: object) -> Message:
    found = {key: value for key, value in message.items() if value is not None} if isinstance(message, Mapping) else {}
    if found.keys() != {"role", "content"} or not all(isinstance(value, str) for value in found.values()):
        raise DataError(
            f"{where}: message = {short(message)}: expected the texts role and content; fix: "
            "{'role': 'user', 'content': '...'}"
        )
    return found


def _key(prompt: Prompt) -> tuple[str, ...]:
    """The prompt without differences of white space and form."""
    if isinstance(prompt, str):
        return ("user", " ".join(prompt.split()))
    return tuple(" ".join(part.split()) for message in prompt for part in (message["role"], message["content"]))


def _some(names: Iterable[object]) -> str:
    return ", ".join(sorted(map(repr, names))) or "none"
