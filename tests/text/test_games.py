"""Public text games are found by the prefix of their names."""

import re
import sys

import pytest
from public_games import game

from groupwise import plugins
from groupwise.errors import ConfigError, MissingExtraError
from groupwise.text.games import making


@pytest.mark.parametrize(
    ("name", "package", "fix"),
    [
        ("textarena:2048-v0", "textarena", r"pip install -e '.\[textarena\]'"),
        ("textworld:rooms=1", "textworld", r"pip install -e '.\[textworld\]'"),
        ("skyrl:gsm8k", "skyrl_gym", r"pip install -e '.\[skyrl\]'"),
        ("gem:game:Game2048-v0-easy", "gem", "pip install --no-deps --ignore-requires-python gem-llm==0.1.0 msgspec"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_command(name, package, fix, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=f"'{package}' is not installed; fix: {fix}"):
        game(name)()


def test_a_name_is_a_game_by_its_prefix_alone():
    assert plugins.is_text_env("textarena:2048-v0")
    assert not plugins.is_text_env("textarena")
    assert not plugins.is_text_env("arena:2048-v0")
    with pytest.raises(ConfigError, match="unknown text env 'arena:2048-v0'"):
        game("arena:2048-v0")()


@pytest.mark.parametrize(
    "settings",
    [
        {"data_path": "secrets"},
        {"topics_path": "a"},
        {"jury_class": "Jury"},
        {"word": "../a"},
        {"words": ["a"]},
        {"word": "a.json"},
    ],
)
def test_settings_of_a_file_name_no_file_and_no_class(settings):
    [(name, value)] = settings.items()
    with (
        pytest.raises(
            ConfigError, match=re.escape(f"a game: {name}={value!r}: expected a number, true, false or a word")
        ),
        making("a game", settings),
    ):
        pass
    with making("a game", {"hardcore": True, "rows": 3, "share": 0.5, "level": "easy"}):
        pass
