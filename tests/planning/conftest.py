import pytest
from planned import save_config


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return save_config(tmp_path_factory.mktemp("llama"))
