"""Python's collector of cycles, kept from searching what will not be garbage.

Each full search looks at everything that torch and the rest of the imports made: a twentieth of a second, several times
while they are imported and again in training.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

PYTHONS_OWN = 1_000
"""More objects than Python itself leaves out from its start on (none in 3.11, 375 in 3.12), and fewer than anybody who leaves out
what exists: an interpreter that has imported nothing holds thousands."""


@contextmanager
def importing() -> Iterator[None]:
    """No search while modules are imported. What they made counts as old afterwards, without having been looked at."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        with leaving_out_what_exists():
            gc.enable()


@contextmanager
def leaving_out_what_exists() -> Iterator[None]:
    """Searches leave out what exists now; afterwards it is old. Nothing changes where somebody else leaves out things."""
    if gc.get_freeze_count() >= PYTHONS_OWN:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
