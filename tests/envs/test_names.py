import pytest

from groupwise.envs import names
from groupwise.envs.names import refuse_module, unknown_environment
from groupwise.errors import EnvError, MissingExtraError, UnknownNameError

KNOWN = ["Ant-v5", "CartPole-v1"]


@pytest.mark.parametrize(
    ("env_id", "module", "extra"),
    [("ALE/Pong-v5", "ale_py", "atari"), ("MiniGrid-Empty-5x5-v0", "minigrid", "minigrid")],
)
def test_an_id_of_a_package_that_nobody_imported_names_the_package(monkeypatch, env_id, module, extra):
    monkeypatch.setattr(names, "find_spec", lambda name: object())
    error = unknown_environment(env_id, KNOWN)
    assert isinstance(error, UnknownNameError)
    assert str(error) == (
        f"unknown environment {env_id!r}: {module} (extra {extra!r}) registers it when it is imported; "
        f"fix: import {module} (command line: --plugin {module})"
    )


def test_an_id_of_a_package_that_is_not_installed_names_the_extra(monkeypatch):
    monkeypatch.setattr(names, "find_spec", lambda name: None)
    error = unknown_environment("BabyAI-GoToObj-v0", KNOWN)
    assert isinstance(error, MissingExtraError)
    assert (
        "fix: pip install -e '.[minigrid]' in the checkout, then import minigrid (command line: --plugin minigrid)"
        in str(error)
    )


@pytest.mark.parametrize(
    ("env_id", "known", "near"),
    [("CartPol-v1", KNOWN, "'CartPole-v1'"), ("ALE/Pog-v5", [*KNOWN, "ALE/Pong-v5"], "'ALE/Pong-v5'")],
)
def test_any_other_id_names_the_nearest(env_id, known, near):
    assert f"unknown environment {env_id!r}: did you mean {near}" in str(unknown_environment(env_id, known))


def test_an_id_like_no_other_asks_for_a_plugin_and_lists_nothing():
    assert str(unknown_environment("Mine-v0", KNOWN)) == (
        "unknown environment 'Mine-v0': no registered id is similar; fix: --plugin FILE.py if it is yours (in Python: "
        "register it first)"
    )


def test_an_id_that_names_a_module_is_refused():
    refuse_module("CartPole-v1")
    with pytest.raises(EnvError, match=r"'a:B-v0' would import 'a'.*--plugin a\) and name the id alone, 'B-v0'$"):
        refuse_module("a:B-v0")
