"""Python's collector of cycles, kept from searching what will not be garbage.

Each full search looks at everything that torch and the rest of the imports made: a twentieth of a second, several times
while they are imported and again in training.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
