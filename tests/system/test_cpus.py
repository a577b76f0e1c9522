import os
import sys

import pytest

from groupwise.system import num_cpus


@pytest.mark.parametrize(
    ("platform", "told", "count"),
    [
        ("linux", "", 2),
        ("darwin", "", 5),
        ("linux", "1", 1),
        ("linux", "7", 7),
        ("linux", "0", 1),
        ("linux", "default", 2),
    ],
)
def test_cpus_that_this_process_may_use(monkeypatch, platform, told, count):
    """A process that shares them is told how many."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("PYTHON_CPU_COUNT", told)
    assert num_cpus() == count
