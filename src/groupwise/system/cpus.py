"""How many processors there are to share. Imports no torch."""

import os
import sys

NUM_CPUS = "PYTHON_CPU_COUNT"
"""Environment variable, also of Python from 3.13 on, with the number for a process that shares them with others."""


def num_cpus() -> int:
    """Among those this process may use."""
    if os.environ.get(NUM_CPUS, "").isdecimal():
        return max(1, int(os.environ[NUM_CPUS]))
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
