"""How long jaxtyping's checks of shapes go on."""

import jaxtyping

CHECKED_CALLS = 1_000
"""Of each test, that are checked. Whole runs go on with the same calls, and take twice as long with checks."""


class FirstCalls(type(jaxtyping.config)):  # type: ignore[misc]
    """Checks are off once this many calls were checked."""

    left = 0

    @property
    def jaxtyping_disable(self) -> bool:
        """Asked at each call of a function with annotations."""
        self.left -= 1
        return self.left < 0


def check_first_calls() -> None:
    """From here on, check the first calls."""
    jaxtyping.config.__class__ = FirstCalls
    jaxtyping.config.left = CHECKED_CALLS
