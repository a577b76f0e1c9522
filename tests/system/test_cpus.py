import os
import sys

import pytest

from groupwise.system import num_cpus


@pytest.mark.parametrize(("platform", "count"), [("linux", 2), ("darwin", 5)])
def test_only_cpus_that_this_process_may_use_are_counted(monkeypatch, platform, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    monkeypatch.setattr(sys, "platform", platform)
    assert num_cpus() == count


@pytest.mark.parametrize(("value", "count"), [("1", 1), ("7", 7), ("0", 1), ("default", 2)])
def test_a_process_that_shares_them_is_told_how_many(monkeypatch, value, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setenv("PYTHON_CPU_COUNT", value)
    assert num_cpus() == count
