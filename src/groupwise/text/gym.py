"""Tasks of reasoning-gym, which generates questions with answers."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from groupwise.config.text import GYM
from groupwise.errors import ConfigError, UnknownNameError, require_extra
from groupwise.seeding import derive_seed
from groupwise.text.data import Example

_EVAL_OFFSET = 2**30


def gym_examples(
    name: str, *, size: int, part: Literal["train", "eval"] = "train", kwargs: Mapping[str, Any] | None = None
) -> list[Example]:
    """Examples of a task, with the columns ``task``, ``answer`` and ``metadata``.

    The library draws item i from ``seed + i``; the seeds of the two parts are 2**30 apart.

    Args:
        name: ``reasoning-gym:<task>``.
        kwargs: settings of the task.

    Raises:
        UnknownNameError: no such task.
        ConfigError: a setting that the task does not have, or refuses.
        MissingExtraError: the extra ``text`` is not installed.
    """
    require_extra("reasoning_gym", "text")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task, kwargs = name.removeprefix(GYM), kwargs or {}
    if task not in DATASETS:
        raise UnknownNameError("reasoning-gym task", task, DATASETS)
    seed = derive_seed(0, "reasoning-gym") // 2 + (_EVAL_OFFSET if part == "eval" else 0)
    try:
        items = reasoning_gym.create_dataset(task, seed=seed, size=size, **kwargs)
    except (TypeError, AssertionError) as error:
        known = ", ".join(field.name for field in dataclasses.fields(DATASETS[task][1]))
        raise ConfigError(f"data_kwargs of {GYM}{task}: {error}; fix: {known}") from error
    return [
        Example(item["question"], {"task": task, "answer": item["answer"], "metadata": item["metadata"]})
        for item in items
    ]
