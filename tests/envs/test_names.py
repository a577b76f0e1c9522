import sys

import pytest

from groupwise.envs import names
from groupwise.envs.names import check_id, import_package, unknown_environment
from groupwise.errors import EnvError, MissingExtraError

KNOWN = ["Ant-v5", "CartPole-v1", "ALE/Pong-v5"]


@pytest.mark.parametrize(
    ("env_id", "package", "fix"),
    [
        ("ALE/Pong-v5", "ale_py", r"pip install -e '.\[atari\]' in the checkout$"),
        ("BabyAI-GoToObj-v0", "minigrid", r"pip install -e '.\[minigrid\]' in the checkout$"),
        ("FetchPush-v4", "gymnasium_robotics", r"pip install -e '.\[robots\]' in the checkout$"),
        ("MetaWorld/push-v3", "metaworld", r"pip install -e '.\[robots\]' .*, then pip install --no-deps metaworld=="),
    ],
)
def test_an_id_of_a_package_that_is_not_installed_says_how_to_install_it(monkeypatch, env_id, package, fix):
    monkeypatch.setattr(names, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=f"needs '{package}', which is not installed; fix: {fix}"):
        import_package(env_id)


def test_only_the_package_of_the_id_is_imported(monkeypatch):
    for package in ("ale_py", "minigrid", "groupwise.embodied.fetch"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails
    monkeypatch.setattr(names, "find_spec", lambda name: object())
    for env_id in ("CartPole-v1", "Mine/Fetch-v0"):
        import_package(env_id)
    for env_id in ("ALE/Pong-v5", "MiniGrid-Empty-5x5-v0", "BabyAI-GoToObj-v0", "FetchReach-v4"):
        with pytest.raises(ModuleNotFoundError):
            import_package(env_id)


def test_any_other_id_names_the_nearest_or_asks_for_a_plugin():
    assert "unknown environment 'ALE/Pog-v5': did you mean 'ALE/Pong-v5'" in str(
        unknown_environment("ALE/Pog-v5", KNOWN)
    )
    message = "unknown environment 'Mine-v0': no registered id is similar; if it is yours: --plugin FILE.py"
    assert str(unknown_environment("Mine-v0", KNOWN)).startswith(message)


def test_an_id_that_names_a_module_is_refused():
    check_id("CartPole-v1")
    with pytest.raises(EnvError, match=r"'a:B-v0' would import 'a'.*--plugin a\) and name the id alone, 'B-v0'$"):
        check_id("a:B-v0")
