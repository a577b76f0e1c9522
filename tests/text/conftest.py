"""A small model in a folder, and a server of it."""

import pytest
from text_runs import save_model
from vllm_double import VLLMDouble


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("lm") / "model")


@pytest.fixture
def double(model):
    with VLLMDouble(model) as server:
        yield server


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("groupwise.serving._FIRST_WAIT", 0.01)
