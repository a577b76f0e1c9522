"""Public text games as text environments, by names such as ``textarena:2048-v0``. Their packages are imported when one is made."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from groupwise.errors import ConfigError

_DIGIT = re.compile(r"\d|\b(?:row|col|column|number|[ijkrc])\b")
"""A digit of an action, or the name of one."""


@contextmanager
def making(game: str) -> Iterator[None]:
    """Raises a ``ConfigError`` where a game cannot be made."""
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
