"""How long jaxtyping's checks of shapes go on, and from which generator beartype draws the item of a list that it looks at."""

import random
import sys
from collections import Counter
from importlib.util import find_spec

import jaxtyping

if find_spec("beartype"):  # `make gpu` does without
    from beartype._check.code import codemain

    # a server's thread, whose calls are checked, would disturb environments that play with the process's generator
    codemain.getrandbits = random.Random(0).getrandbits

CHECKED_CALLS = 5
"""Of each function in each test, that are checked. Whole runs go on with the same calls, and take twice as long with checks."""


class FirstCalls(type(jaxtyping.config)):  # type: ignore[misc]
    """Checks of a function are off once this many of its calls were checked."""

    calls: Counter[object] = Counter()

    @property
    def jaxtyping_disable(self) -> bool:
        """Asked at each call of a function with annotations, by what wraps it."""
        function = sys._getframe(1).f_locals["fn"]
        function = getattr(function, "__code__", function)  # which keeps nothing in memory that the function refers to
        self.calls[function] += 1
        return self.calls[function] > CHECKED_CALLS


def check_first_calls() -> None:
    """From here on, check the first calls."""
    jaxtyping.config.__class__ = FirstCalls
    FirstCalls.calls.clear()
