import re

import pytest

from groupwise import cli
from groupwise.cli.option_names import check_names
from groupwise.config import resolve
from groupwise.config.algorithm import GRPOCfg, PPOCfg
from groupwise.config.env import EnvCfg
from groupwise.errors import ConfigError


def hidden(config):
    return {EnvCfg: ("id",), GRPOCfg: ("name",), PPOCfg: ("name",)}.get(config, ())


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--algorithm.learning-rat", "; did you mean --algorithm.learning-rate?"),
        ("--total-step=1", "; did you mean --total-steps?"),
        ("--algorithm.collection.nois", "; did you mean --algorithm.collection.noise?"),
        ("--algorithm.colection.nois", "; did you mean --algorithm.collection.noise?"),
        ("--policy.no-normalise-obs", "; did you mean --policy.no-normalize-obs?"),
        ("--evaluation.intervall", "; did you mean --evaluation.interval?"),  # several options end so
        ("--learning_rate", "; did you mean --algorithm.learning-rate?"),
        ("--noise", "; did you mean --algorithm.collection.noise?"),
        ("--env.id", ": the environment is the first argument"),
        ("--algorithm.reference", ": it holds several, --algorithm.reference.refresh, --algorithm.reference.interval"),
        ("--qqq", "; --help shows them all"),
        ("--algorithm.gae-lambda", ": 'gae_lambda' is a setting of "),
    ],
)
def test_an_unknown_option_names_the_nearest_one(option, hint):
    with pytest.raises(ConfigError, match=re.escape(f"unknown option {option.partition('=')[0]}{hint}")):
        check_names(["--seed", "3", option, "1"], resolve("CartPole-v1"), hidden)


@pytest.mark.parametrize(
    "option", ["--algorithm.collection.x", "--algorithm.collection.noise", "--algorithm.collection"]
)
def test_settings_of_another_algorithm_are_named_as_such(option):
    hint = "'collection' is a setting of grpo, not of ppo; fix: leave it out, or choose algorithm 'grpo'"
    with pytest.raises(ConfigError, match=re.escape(f"unknown option {option}: {hint}")):
        check_names([option, "1"], resolve("CartPole-v1", "ppo"), hidden)


def test_the_command_line_says_it_in_one_line(capsys):
    assert cli.main(["config", "CartPole-v1", "--algorithm", "ppo", "--algorithm.collection.x", "1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(
        "groupwise: error: unknown option --algorithm.collection.x: 'collection' is a setting of grpo"
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_every_option_that_the_help_shows_exists(capsys, algorithm):
    assert cli.main(["train", "CartPole-v1", "--algorithm", algorithm, "--help"]) == 0
    shown = set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out))
    own = {"--help", "--algorithm", "--preset", "--seeds", "--run-dir", "--plugin", "--debug", "--algorithm."}
    options = [option for option in sorted(shown - own) if "." in option]
    assert len(options) > 40
    check_names(options, resolve("CartPole-v1", algorithm), hidden)
