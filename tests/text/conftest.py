"""Marks every test here as one of language models: ``pytest -m text`` runs them alone, ``-m "not text"`` the others."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.text)
