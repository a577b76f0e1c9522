"""Every test of this folder is computed on each device."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def everywhere(computed_there):
    """The functions that a module imports."""
