import json
import re

import pytest

from groupwise import cli
from groupwise.cli.options import options_of
from groupwise.config import resolve


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--algorithm.learning-rat", "; did you mean --algorithm.learning-rate?"),
        ("--total-step=1", "; did you mean --total-steps?"),
        ("--algorithm.collection.nois", "; did you mean --algorithm.collection.noise?"),
        ("--algorithm.colection.nois", "; did you mean --algorithm.collection.noise?"),
        ("--policy.normalise-obs", "; did you mean --policy.normalize-obs?"),
        ("--evaluation.intervall", "; did you mean --evaluation.interval?"),  # several options end so
        ("--learning_rate", "; did you mean --algorithm.learning-rate?"),
        ("--noise", "; did you mean --algorithm.collection.noise?"),
        ("--qqq", "; all options: --help-all"),
        ("--algorithm.qq", "; all options: --help-all"),
        ("--algorithm.lr", "; did you mean --algorithm.learning-rate?"),
        ("--algoritm", "; did you mean --algorithm?"),
        ("--max-steps", "; did you mean --total-iterations?"),  # of TRL
        ("--optimize-hyperparameters", "; here: a search with Optuna, see docs/coming_from.md."),
        ("--n-trials", "; here: a search with Optuna, see docs/coming_from.md."),
        ("--clip-range", "; did you mean --algorithm.clip-coef?"),
        ("--algorithm.num-envs", "; did you mean --env.num-envs?"),
        ("--steps", "; did you mean --total-steps or --algorithm.num-steps or --env.max-episode-steps?"),
        ("--epochs", "; did you mean --algorithm.num-epochs?"),
        ("--algorithm.optimizer.momentum", "; "),  # of another optimizer
        ("--no-eval", "; "),
        ("--no-seed", "; did you mean --seed?"),  # it cannot be turned off
        ("--policy.no-normalise-obs", "; did you mean --policy.normalize-obs?"),
        ("--stop", "; it is a group of options: --stop.threshold, --stop.time-limit; all options"),
    ],
)
def test_an_unknown_option_names_the_nearest_one(capsys, option, hint):
    assert cli.main(["config", "LunarLander-v3", "--seed", "3", option, "1"]) == 2
    spelt = option.partition("=")[0].replace("_", "-")
    assert f"unknown option {spelt}{hint}" in capsys.readouterr().err


def test_what_is_wrong_in_an_option_is_not_said_of_the_file(capsys, tmp_path):
    path = tmp_path / "run.json"
    for content, words, said in (
        ({}, ["--algorithm.gamma", "0.9", "0.8"], "error: algorithm.gamma = [0.9, 0.8]: "),
        ({}, ["--preset", "drgrpo"], "error: unknown preset 'drgrpo'"),
        ({"seed": -1}, ["--algorithm.gamma", "2"], f"error: {path}: "),
        ({"seed": -1}, [], f"error: {path}: seed = -1"),
    ):
        path.write_text(json.dumps({"env": {"id": "CartPole-v1"}, **content}))
        assert cli.main(["config", str(path), *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("", "expected an environment id or a file of settings first, then options; fix: groupwise config CartPole-v1"),
        ("--env CartPole-v1", "first, then options; fix: groupwise config CartPole-v1 --seed 3"),
        ("--seed 3 CartPole-v1", "first, then options; fix: groupwise config CartPole-v1 --seed 3"),
        ("CartPole-v1 ppo --seed 3", "'ppo' belongs to no option; fix: name one, as in --algorithm ppo"),
        ("ppo CartPole-v1", "'CartPole-v1' belongs to no option"),
    ],
)
def test_words_in_another_order_are_refused(capsys, typed, answer):
    assert cli.main(["config", *typed.split()]) == 2
    assert answer in capsys.readouterr().err


def test_a_value_that_looks_like_a_target_moves_nothing(capsys):
    assert cli.main(["config", "CartPole-v1", "--policy.init-from", "runs/Ant-v5", "--preset", "dapo"]) == 0
    assert cli.main(["config", "CartPole-v1", "--env", "Ant-v5"]) == 2
    assert "unknown option --env; it is a group of options: --env.kwargs, " in capsys.readouterr().err


def test_numbers_may_have_commas_between_thousands(capsys):
    assert cli.main(["config", "CartPole-v1", "--total-steps", "12,345", "--checkpoint-interval", "1,000"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["total_steps"], shown["checkpoint_interval"]) == (12_345, 1_000)
    assert cli.main(["config", "CartPole-v1", "--policy.hidden-sizes", "32,32"]) == 2
    assert "expected numbers with spaces between; fix: --policy.hidden-sizes 32 32" in capsys.readouterr().err
    assert cli.main(["config", "CartPole-v1", "--total-steps", "1,00"]) == 2
    assert "spaces" not in capsys.readouterr().err
    for wrong in (
        ["--algorithm.learning-rate", "0,001"],
        ["--algorithm.learning-rate", "1,500"],
        ["--total-steps", "0,500"],
    ):
        assert cli.main(["config", "CartPole-v1", *wrong]) == 2, wrong  # a comma may stand for a point
        assert wrong[1] in capsys.readouterr().err


def test_a_port_is_checked(capsys):
    assert cli.main(["view", ".", "--port", "99999"]) == 2
    assert "--port 99999: expected 0 to 65535" in capsys.readouterr().err


COMMANDS = {
    "eval runs/x": "completions-per-prompt",
    "play runs/x": "checkpoint",
    "sample runs/x hello": "deterministic",
    "export runs/x --to onnx": "checkpoint",
    "compare runs/x": "finished-only",
    "demos FetchPush-v4": "keep-failures",
    "check-env CartPole-v1": "env.start-mode",
    "config CartPole-v1": "preset",
    "train CartPole-v1": "plugin",
    "list": "debug",
}


@pytest.mark.parametrize(("command", "option"), COMMANDS.items())
def test_options_of_commands(command, option, capsys):
    for typed in (option[:2] + option[3:], option[:2] + "x" + option[3:], option + option[-1]):
        assert cli.main([*command.split(), f"--{typed}", "1"]) == 2
        assert f"unknown option --{typed}; did you mean --{option}? " in capsys.readouterr().err


def test_a_choice_takes_its_own_parameters_and_the_settings_that_it_needs(capsys):
    choice = ["--algorithm.credit.baseline", "knn", "--algorithm.credit.baseline.k", "3"]
    needed = ["--algorithm.credit.group-key", "group", "--algorithm.credit.scale", "none"]
    assert cli.main(["config", "LunarLander-v3", *choice, *needed]) == 0
    credit = json.loads(capsys.readouterr().out)["algorithm"]["credit"]
    assert credit["baseline"] == {"name": "knn", "k": 3, "gae_lambda": 0.95}
    assert credit["group_key"] == {"name": "group"}


def test_help_of_a_text_run_leaves_out_steps_of_environments(capsys, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"task": {"data": "prompts.jsonl"}, "model": {"path": "somewhere"}}))
    assert cli.main(["train", str(path), "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--num-prompts" in shown
    assert "--algorithm.num-steps" not in shown
    assert cli.main(["train", str(path), "--env.num-envs", "3"]) == 2
    assert (
        "run.json is a text task, and this is an option of environments; fix: leave it out" in capsys.readouterr().err
    )


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_help_of_all_shows_every_option(capsys, algorithm):
    assert cli.main(["train", "CartPole-v1", "--algorithm", algorithm, "--help-all"]) == 0
    shown = re.findall(r"^  (--[a-z][\w.-]*)", capsys.readouterr().out, flags=re.MULTILINE)
    own = {"--allow-programs", "--preset", "--seeds", "--launcher", "--plugin", "--profile", "--quiet", "--verbose"}
    known = [option.flag for option in options_of(resolve("CartPole-v1", algorithm))]
    assert [flag for flag in shown if flag not in own] == known
    assert len(known) > 40
    assert {"--seed", "--algorithm.schedule", "--algorithm.optimizer.betas", "--env.kwargs"} <= {*known}
    assert not {"--env.id", "--algorithm.name", "--algorithm.schedule.name"} & {*known}
