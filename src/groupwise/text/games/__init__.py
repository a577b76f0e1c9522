"""Public text games as text environments, by names such as ``textarena:2048-v0``. Their packages are imported when one is made."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from groupwise.errors import ConfigError

_DIGIT = re.compile(r"\d|\b(?:row|col|column|number|[ijkrc])\b")
"""A digit of an action, or the name of one."""


@contextmanager
def making(game: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Raises a ``ConfigError`` where a game cannot be made. Settings may come from a stranger's file, so none names a file or a class."""
    for name, value in settings.items():
        plain = isinstance(value, bool | int | float) or (isinstance(value, str) and value.isidentifier())
        if not plain or re.search("path|file|class|url", name):
            raise ConfigError(
                f"{game}: {name}={value!r:.80}: expected a number, true, false or a word; fix: leave it out"
            )
    try:
        yield
    except LookupError as error:
        fix = "python -m nltk.downloader words averaged_perceptron_tagger_eng"
        raise ConfigError(f"{game} needs word lists; fix: {fix}") from error
    except (TypeError, ValueError, ImportError, SyntaxError) as error:
        raise ConfigError(f"{game} cannot be made: {error}; fix: its settings, or another game") from error


def sample_form(forms: Sequence[str], rng: np.random.Generator) -> str:
    """An action like one that a game has shown, with other digits."""
    form = str(rng.choice(forms))
    largest = max((int(digit) for digit in re.findall(r"\d", "".join(forms))), default=3)
    count = len(_DIGIT.findall(form))
    digits = iter(rng.permutation(max(min(largest + 2, 10), count)))
    return _DIGIT.sub(lambda _: str(next(digits)), form)
