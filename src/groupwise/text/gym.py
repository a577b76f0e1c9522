"""Tasks of reasoning-gym: procedures that make as many questions with answers as one wants."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from groupwise.config.text import GYM
from groupwise.errors import ConfigError, UnknownNameError, nearest, require_extra

Row = Mapping[str, Any]


def gym_maker(name: str, kwargs: Mapping[str, Any]) -> Callable[..., Iterable[Row]]:
    """What makes ``size`` rows (``question``, ``answer``, ``metadata``) from ``seed``.

    Raises:
        UnknownNameError: there is no such task.
        ConfigError: a setting that the task does not have.
        MissingExtraError: the extra ``text`` is not installed.
    """
    require_extra("reasoning_gym", "text")
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        raise UnknownNameError("reasoning-gym task", name, DATASETS)
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for key in kwargs:
        if key not in known:
            raise ConfigError(
                f"data_kwargs: {GYM}{name} has no setting {key!r}{nearest(key, known) or '; known: ' + ', '.join(sorted(known))}"
            )
    return functools.partial(reasoning_gym.create_dataset, name, **kwargs)
