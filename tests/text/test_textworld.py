"""TextWorld's games: made from the seed, in a folder that is removed; commands, score and success. Each takes seconds to make."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from public_games import game

from groupwise.errors import ConfigError
from groupwise.text.envs import check_text_env
from groupwise.text.games import textworld as adapter

pytest.importorskip("textworld")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Game .* is not fully supported"),
]  # as TextWorld does
SIZES = "textworld:rooms=1,objects=4,quest=2"


def win(env):
    """The turns that a search through the possible commands of two turns finds, and what each led to."""
    for first in env.reset(seed=1) and list(env._state.admissible_commands):
        env.reset(seed=1)
        opened = env.step(first)
        for second in list(env._state.admissible_commands):
            env.reset(seed=1)
            env.step(first)
            ended = env.step(second)
            if ended[2]:
                return opened, ended
    raise AssertionError("no two commands win")


def test_a_game_is_won_by_its_quest_and_made_once_for_a_seed():
    env = game(SIZES, commands=True)()
    prompt, _ = env.reset(seed=1)
    assert "$$" not in prompt  # the banner
    assert "\n\n" not in prompt
    assert prompt.splitlines()[-1] == "Commands: " + "; ".join(env._state.admissible_commands)
    opened, ended = win(env)
    assert opened[1:] == (0.0, False, False, {})
    assert ended[1:] == (1.0, True, False, {"success": True})
    assert "The End" not in ended[0]
    other, began = game(SIZES)(), time.perf_counter()
    assert other.reset(seed=1)[0] == prompt.rpartition("\nCommands: ")[0]
    assert time.perf_counter() - began < 1  # not made again
    assert other.reset(seed=2)[0] not in prompt
    commands = other.reset(seed=1) and other.walkthrough()
    assert [other.step(command)[1:] for command in commands] == [opened[1:], ended[1:]]
    other.reset(seed=2)
    assert other.sample_action(np.random.default_rng(0)) in other._state.admissible_commands
    env.close()
    other.close()


@pytest.mark.parametrize("turn", ["save", "look. save", "look then save", "look\nthen save", "", "lo\0ok", "quit", "ö"])
def test_what_is_no_command_of_the_game_is_not_played(turn):
    env = game(SIZES)()
    env.reset(seed=1)
    env._env.step = None  # would fail
    assert env.step(turn) == ("That's not a verb I recognise.", 0.0, False, False, {})


def test_other_games_take_no_more_memory():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    env = game(SIZES)()
    for seed in (1, 2) * 5:
        env.reset(seed=seed)
    before = resident()
    for seed in (1, 2) * 25:
        env.reset(seed=seed)
    assert resident() - before < 8 * 2**20  # 20 MB where an interpreter loads one game after the other
    env.close()
    assert env.reset(seed=2)[0]


def test_members_share_a_start_by_the_seed_alone():
    report = check_text_env(game(SIZES), max_turns=3)
    assert (report.mode, report.kept, report.start_varies) == ("seed", (), True)


@pytest.mark.parametrize(
    "sizes", ["", "rooms", "rooms=0", "rooms=1,cats=2", "rooms=1;quest=2", "rooms=../x", "rooms=100"]
)
def test_sizes_that_are_none_are_refused(sizes):
    with pytest.raises(ConfigError, match=f"^textworld:{sizes}: expected sizes of 1 to 99; fix: textworld:rooms=1,obj"):
        game(f"textworld:{sizes}")()


def test_the_folder_is_removed_at_the_end_of_the_process():
    code = (
        "from groupwise.text.games import textworld as t; e = t.TextWorld('rooms=1'); e.reset(seed=1); "
        "print(t._folder(), *(f.name for f in t._folder().iterdir()))"
    )
    out = subprocess.run(
        [sys.executable, "-P", "-W", "error::ResourceWarning", "-c", code], capture_output=True, text=True, check=True
    )
    assert "ResourceWarning" not in out.stderr
    folder, *files = out.stdout.split()[-4:]
    assert sorted(Path(file).suffix for file in files) == [".json", ".ni", ".z8"]
    assert not Path(folder).exists()
    assert Path(folder) != adapter._folder()
