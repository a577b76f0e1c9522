"""How the C library holds memory in a process that trains a large network on a CPU."""

import ctypes
import os
import sys

_TRIM, _MAP = -1, -3
"""Numbers of the settings in glibc's ``malloc.h``: how much is kept at the end of the heap, and from what size on memory is
mapped by itself, which is given back whenever it is freed."""
_SETTINGS = {_TRIM: 2**31 - 1, _MAP: 32 * 2**20}


def keep_freed_memory() -> bool:
    """Hand freed memory out again, in place of giving it back to the system; whether that can be had here.

    The system clears new memory page by page as it is first written to, which takes longer than most operations on it: a
    training step of a model with 135M weights is a fifth faster, and one of 1.2M (a small VLA) a twentieth. Where the environment has settings of its own, they stay.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    set_outside = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    if mallopt is None or set_outside:
        return False
    taken = [mallopt(setting, value) for setting, value in _SETTINGS.items()]
    return all(taken)
