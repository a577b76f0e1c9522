"""Examples, a prompt and what else is known of it, from files and objects; and the order in which training takes them."""

import functools
import random
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from groupwise.config.text import GYM
from groupwise.errors import DataError, nearest
from groupwise.seeding import derive_seed
from groupwise.text.files import read, short
from groupwise.text.gym import Row, gym_maker
from groupwise.text.reward_functions import ARGUMENTS

Message = dict[str, str]
Prompt = str | tuple[Message, ...]
Completion = str | Sequence[Message]
"""As rewards read it: a text; of a prompt of messages, messages."""

_EVAL_OFFSET = 2**30
_MAX_BLOCKS = 20


class Example(NamedTuple):
    """A prompt and what else the data say of it."""

    prompt: Prompt
    """A text, or messages with ``role`` and ``content``."""
    columns: dict[str, Any]
    """All other columns, which rewards are called with."""


def load_examples(source: object, *, prompt_column: str = "prompt", **gym: Any) -> list[Example]:
    """The examples of a file or an object; a column that a row lacks is None there.

    Args:
        source: path of a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file; a ``datasets.Dataset``, a pandas data frame or
            any other iterable of mappings; or of texts, which are prompts without columns; or ``reasoning-gym:<name>``.
        gym: what ``gym_examples`` takes, for that.

    Raises:
        DataError: no examples, a row that cannot be read (names file and line), or a missing column (names those there are).
        MissingExtraError: a Parquet file without the extra ``text``.
    """
    if isinstance(source, str) and source.startswith(GYM):
        return gym_examples(source, **gym)
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
    examples = [_example(f"{where}, example {number}", row, columns, prompt_column) for number, row in enumerate(rows)]
    if len({isinstance(example.prompt, str) for example in examples}) > 1:
        raise DataError(f"some prompts of {where} are texts and some are messages; fix: all of one kind")
    return examples


def gym_examples(
    name: str,
    *,
    size: int = 1000,
    seed: int = 0,
    part: Literal["train", "eval"] = "train",
    kwargs: Mapping[str, Any] | None = None,
    without: Iterable[Example] = (),
) -> list[Example]:
    """Examples of a reasoning-gym task, with the columns ``task``, ``answer`` and ``metadata``; none has a prompt of ``without``.

    That library draws item i from the number ``seed + i``, so that data of neighbouring seeds are nearly the same; the
    two parts are 2**30 apart.

    Args:
        name: of the task, with or without ``reasoning-gym:``.

    Raises:
        UnknownNameError: there is no such task.
        ConfigError: a setting that the task does not have.
        DataError: the task has too few prompts besides those of ``without``.
        MissingExtraError: the extra ``text`` is not installed.
    """
    make = gym_maker(name.removeprefix(GYM), kwargs or {})
    first = derive_seed(seed, "reasoning-gym") // 2 + (_EVAL_OFFSET if part == "eval" else 0)
    taken = {_key(example.prompt) for example in without}
    examples: list[Example] = []
    for block in range(_MAX_BLOCKS):
        made = (_gym_example(name.removeprefix(GYM), item) for item in make(seed=first + block * size, size=size))
        examples += [example for example in made if _key(example.prompt) not in taken]
        if len(examples) >= size:
            return examples[:size]
    raise DataError(
        f"{name} with {dict(kwargs or {})} made only {len(examples)} of {size} prompts that the evaluation does not have; "
        "fix: a smaller eval_size, or data_kwargs that make it larger"
    )


def overlap(train: Sequence[Example], evaluation: Sequence[Example]) -> list[int]:
    """Which training examples have a prompt of the evaluation's; white space makes no difference."""
    held_out = {_key(example.prompt) for example in evaluation}
    return [number for number, example in enumerate(train) if _key(example.prompt) in held_out]


def report_overlap(train: Sequence[Example], shared: Sequence[int], rule: Literal["drop", "keep", "error"]) -> None:
    """Warn of training examples whose prompts are held out, or refuse them.

    Raises:
        DataError: ``rule="error"``.
    """
    said = (
        f"{len(shared)} of {len(train)} training prompts stand in the evaluation data, too, the first: "
        f"{str(train[shared[0]].prompt)[:80]!r}"
    )
    if rule == "error":
        raise DataError(f"{said}; fix: take them out of either, or eval_overlap='drop'")
    effect = "training leaves them out" if rule == "drop" else "evaluation tells less of what was not trained on"
    warnings.warn(f"{said}; {effect}", stacklevel=3)


@functools.lru_cache(maxsize=2)
def shuffled(size: int, seed: int, epoch: int) -> list[int]:
    """The order in which an epoch takes the examples."""
    order = list(range(size))
    random.Random(derive_seed(seed, "prompts", epoch)).shuffle(order)
    return order


def _rows(source: object) -> tuple[str, list[Any]]:
    """What to call the source, and its rows."""
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


def _example(where: str, row: Row, columns: Sequence[str], prompt_column: str) -> Example:
    rest = {column: row.get(column) for column in columns if column != prompt_column}
    return Example(_prompt(where, row.get(prompt_column)), rest)


def _prompt(where: str, prompt: object) -> Prompt:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or not prompt:
        raise DataError(f"{where}: prompt = {short(prompt)}: expected a text or a list of messages; fix: the row")
    return tuple(_message(where, message) for message in prompt)


def _message(where: str, message: object) -> Message:
    said = {key: value for key, value in message.items() if value is not None} if isinstance(message, Mapping) else {}
    if said.keys() != {"role", "content"} or not all(isinstance(value, str) for value in said.values()):
        raise DataError(
            f"{where}: message = {short(message)}: expected the texts role and content; fix: "
            "{'role': 'user', 'content': '...'}"
        )
    return said


def _gym_example(task: str, item: Row) -> Example:
    return Example(item["question"], {"task": task, "answer": item["answer"], "metadata": item["metadata"]})


def _key(prompt: Prompt) -> tuple[str, ...]:
    """The same for prompts that read the same."""
    if isinstance(prompt, str):
        return ("user", " ".join(prompt.split()))
    return tuple(" ".join(part.split()) for message in prompt for part in (message["role"], message["content"]))


def _some(names: Iterable[object]) -> str:
    return ", ".join(sorted(map(repr, names))) or "none"
