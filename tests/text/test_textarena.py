"""TextArena's games: what they say at each turn, their ends, and how members share a start."""

import re

import numpy as np
import pytest
from public_games import game, parted
from text_runs import save_model

import groupwise as gw
from groupwise.cli import main
from groupwise.errors import ConfigError, EnvError
from groupwise.text.envs import TextEpisode, check_text_env
from groupwise.text.task import Start

pytest.importorskip("textarena")


def test_an_observation_is_what_is_new_also_after_a_reset():
    env = game("textarena:2048-v0")()
    first, _ = env.reset(seed=3)
    assert first.startswith("You are playing 2048")
    assert first.count("Score: ") == 1
    observations = [env.step(turn)[0] for turn in ("[Left]", "[Right]", "Left")]  # without brackets, too
    for observation in observations:
        assert observation.count("Score: ") == 1
        assert "playing" not in observation  # nor the prompt
        assert "[" not in observation  # nor what the model wrote
    again, _ = env.reset(seed=3)
    assert again == first
    assert [env.step(turn)[0] for turn in ("[Left]", "[Right]", "Left")] == observations


def test_the_end_has_the_games_reward_and_reason():
    env = game("textarena:GuessTheNumber-v0", max_number=3)()
    ends = {}
    for guess in "123":
        env.reset(seed=7)
        observation, reward, terminated, truncated, info = env.step(f"[{guess}]")
        if not terminated:
            assert (observation[:20], reward, truncated, info) == ("The target number is", 0.0, False, {})
            observation, reward, terminated, *_, info = [env.step("[9]") for _ in range(2)][-1]
        assert terminated
        ends[guess] = (observation, reward, info["success"])
    won = [end for end in ends.values() if end[2]]
    assert len(won) == 1
    assert won[0][:2] == ("Congratulations! You guessed the correct number.", 1.0)
    assert all("Invalid Move: " in reason and reward < 1 for reason, reward, success in ends.values() if not success)


def test_sampled_turns_are_forms_that_the_game_shows():
    rng = np.random.default_rng(0)
    for name, pattern in {
        "2048-v0": r"\[(Up|Down|Left|Right)\]",
        "Mastermind-v0": r"\[\d \d \d \d\]",
        "LightsOut-v0": r"\[\d \d\]",  # shown as [row col]
        "Bandit-v0": r"\[(red|blue|green|yellow|purple)\]",
    }.items():
        env = game(f"textarena:{name}")()
        env.reset(seed=1)
        turns = {env.sample_action(rng) for _ in range(30)}
        assert len(turns) > 2
        assert turns == {turn for turn in turns if re.fullmatch(pattern, turn)}


@pytest.mark.parametrize("name", ["2048-v0", "Minesweeper-v0"])
def test_members_share_a_start_as_they_have_their_own_random(name):
    make = game(f"textarena:{name}")
    report = check_text_env(make)
    assert (report.mode, report.kept, report.start_varies) == ("seed", ("random",), True)
    assert report.turns > 6
    turns = ["[Left]", "[Up]"] if name == "2048-v0" else ["[3 3]"]
    assert parted(make, (), turns) >= 4
    assert parted(make, ("random",), turns) == 0


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("2048-v9", {}, "unknown game of TextArena '2048-v9': did you mean '2048-v0'"),
        ("2048-v0", {"tile": 3}, "2048-v0 cannot be made: .*'tile'; fix: its settings, or another game"),
        ("GuessWho-v0", {}, "textarena:GuessWho-v0 asks a model on a server; fix: another game"),
    ],
)
def test_what_cannot_be_made_is_refused(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        game(f"textarena:{name}", **settings)()


def test_word_lists_that_are_missing_are_named_with_their_command(monkeypatch):
    def no_words(game):
        raise LookupError("long text")

    monkeypatch.setattr("textarena.make", no_words)
    with pytest.raises(ConfigError, match=r"Wordle-v0 needs word lists; fix: python -m nltk.downloader words averag"):
        game("textarena:Wordle-v0")()


def test_a_game_for_two_is_refused():
    episode = TextEpisode(game("textarena:TicTacToe-v0")())
    with pytest.raises(EnvError, match=r"^textarena:TicTacToe-v0 is no game for one player: .*; fix: another game$"):
        episode.reset(Start(0))


def test_the_command_line_checks_trains_and_evaluates_by_name(tmp_path, capsys):
    name = "textarena:2048-v0-ultra-easy"
    assert main(["check-env", name]) == 0
    assert f"{name}\nGroup starts: shared (seed), verified over " in capsys.readouterr().out
    model, path = save_model(tmp_path / "model", positions=2048), str(tmp_path / "run")
    words = ["--task.max-turns", "2", "--task.data-size", "20", "--task.eval-size", "2", "--num-prompts", "1"]
    words += ["--total-iterations", "1", "--sampling.max-new-tokens", "2", "--algorithm.group-size", "2"]
    assert main(["train", name, "--model", str(model), "--run-dir", path, *words]) == 0
    out = capsys.readouterr()
    assert "each member has its own random" in out.out + out.err
    assert gw.Run.load(path).summary["task"] == "2048-v0-ultra-easy"
    assert main(["eval", path, "--episodes", "2"]) == 0
    assert "prompts=2" in capsys.readouterr().out
