import os
import sys

import pytest

from groupwise.system import num_cpus


@pytest.mark.parametrize(
    ("platform", "number", "count"),
    [("linux", "", 2), ("darwin", "", 5), ("linux", "7", 7), ("linux", "0", 1), ("linux", "default", 2)],
)
def test_cpus_that_this_process_may_use(monkeypatch, platform, number, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("PYTHON_CPU_COUNT", number)
    assert num_cpus() == count
