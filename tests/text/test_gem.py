"""GEM's games: what they say around an observation, their ends, and how members share a start."""

import random
import re

import numpy as np
import pytest
from public_games import game, parted

from groupwise.errors import ConfigError
from groupwise.text.envs import check_text_env

pytest.importorskip("gem")


def test_an_observation_has_what_is_said_after_it_and_the_end_a_success():
    env = game("gem:game:GuessTheNumber-v0-easy")()
    first, _ = env.reset(seed=3)
    assert first.startswith("You are playing Guess The Number")
    assert first.endswith("\nEnter your next guess.")
    ends = {}
    for guess in range(1, 11):
        env.reset(seed=3)
        observation, reward, terminated, truncated, info = env.step(f"\\boxed{{{guess}}}")
        assert observation.endswith("\nEnter your next guess.")
        ends[guess] = (reward, terminated, truncated, info)
    won = [end for end in ends.values() if end[1]]
    assert won == [(1.0, True, False, {"success": True})]
    assert env.step("seven")[1:] == (pytest.approx(-0.1), True, False, {"success": False})


def test_sampled_turns_are_the_games_or_forms_that_it_shows_and_leave_random_alone():
    rng, before = np.random.default_rng(0), random.getstate()
    for name, pattern in {
        "Game2048-v0-easy": r"\\boxed\{(up|down|left|right)\}",
        "FifteenPuzzle-v0-easy": r"\\boxed\{(up|down|left|right)\}",  # its own are not boxed
        "Sudoku-v0-easy": r"\\boxed\{\d \d \d\}",  # has none of its own
    }.items():
        env = game(f"gem:game:{name}")()
        env.reset(seed=1)
        random.setstate(before)
        turns = {env.sample_action(rng) for _ in range(30)}
        assert random.getstate() == before
        assert len(turns) > 2
        assert all(re.fullmatch(pattern, turn) for turn in turns), turns


def test_members_share_a_start_as_they_have_their_own_generators():
    make = game("gem:game:Game2048-v0-easy")
    report = check_text_env(make)
    assert (report.mode, report.kept, report.start_varies) == (
        "seed",
        ("random", "numpy.random"),
        True,
    )  # it seeds both
    turns = ["\\boxed{left}", "\\boxed{up}", "\\boxed{right}"]
    assert parted(make, (), turns) >= 4
    assert parted(make, report.kept, turns) == 0


@pytest.mark.parametrize("name", ["math:GSM8K", "code:CodeContest", "game:Game2048-v9"])
def test_what_is_no_game_is_refused(name):
    with pytest.raises(ConfigError, match=f"unknown game of GEM '{name}'"):
        game(f"gem:{name}")()
