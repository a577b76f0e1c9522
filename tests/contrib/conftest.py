"""Marks what is in this folder ``contrib``, which the default run leaves out, but for the smoke test."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents and item.path.name != "test_smoke.py":
            item.add_marker(pytest.mark.contrib)
