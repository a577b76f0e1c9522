from pathlib import Path

import pytest

import groupwise as gw
from groupwise.config import resolve
from groupwise.config.credit import PartsCfg
from groupwise.errors import ConfigError


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        ("gdpo", r"credit\.reward='parts' .* its names are empty; fix: credit\.reward\.names="),
        ("agilerl_turn_ratio", r"ratio='turn' needs turn_id in the rollout.*; fix: ratio='token'"),
    ],
)
def test_what_would_fail_after_the_first_rollout_leaves_no_folder(preset, message, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        gw.train("CartPole-v1", preset=preset, total_steps=10)
    assert list(tmp_path.iterdir()) == []


def test_parts_that_are_named_and_turns_that_are_steps_are_fine():
    parts = resolve("CartPole-v1", {"credit": {"reward": {"names": ["a", "b"]}}}, preset="gdpo")
    assert parts.algorithm.credit.reward == PartsCfg(names=("a", "b"))
    turns = resolve("LunarLander-v3", {"credit": {"group_key": "group_step", "returns": "turn"}})
    assert turns.algorithm.credit.returns == "turn"
