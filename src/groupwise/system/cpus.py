"""How many processors there are to share. Imports no torch."""

import os
import sys


def num_cpus() -> int:
    """Among those this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
