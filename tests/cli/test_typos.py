"""Typing errors: the message names what was meant."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupwise import cli
from groupwise.cli.options import options_of
from groupwise.config import load_config, resolve
from groupwise.errors import ConfigError

COMMANDS = {
    "eval runs/x": ["episodes", "completions-per-prompt", "sampled", "seed", "video", "checkpoint", "json"],
    "sample runs/x hello": ["messages", "count", "deterministic", "seed", "checkpoint"],
    "resume runs/x": ["total-steps"],
    "export runs/x --to onnx": ["out", "checkpoint"],
    "compare runs/x": ["out", "json", "finished-only", "reference", "metric"],
    "demos FetchPush-v4": ["episodes", "out", "noise", "seed", "keep-failures", "env.kwargs"],
    "check-env CartPole-v1": ["json", "env.kwargs", "env.start-mode"],
    "config CartPole-v1": ["schema", "preset"],
    "train CartPole-v1": ["preset", "plugin", "debug", "algorithm", "run-dir"],
    "list": ["plugin", "debug", "help"],
}
TEXT = {"task": {"data": "prompts.jsonl"}, "model": {"path": "model"}}


def mistyped(word: str, rng: random.Random) -> str:
    """The word with a letter left out, doubled or replaced, or with two exchanged."""
    at = rng.choice([i for i in range(1, len(word) - 1) if word[i].isalpha()] or [0])
    left, letter, right = word[:at], word[at], word[at + 1 :]
    return rng.choice(
        [left + right, left + 2 * letter + right, left + "x" + right, left + right[:1] + letter + right[1:]]
    )


def settings_mistyped(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """A setting of GRPO on control, and how its last word was mistyped."""
    rng = random.Random(seed)
    options = list(options_of(resolve("CartPole-v1")))
    for _ in range(count):
        flag = rng.choice(options).flag
        outer, dot, last = flag.removeprefix("--").rpartition(".")
        typed = mistyped(last, rng)
        if f"--{outer}{dot}{typed}" not in {option.flag for option in options}:
            yield flag, f"--{outer}{dot}{typed}"


def test_settings(capsys: pytest.CaptureFixture[str]):
    wrong = []
    for meant, typed in settings_mistyped(60):
        assert cli.main(["config", "CartPole-v1", typed, "1"]) == 2
        if f"{meant}?" not in (message := capsys.readouterr().err):
            wrong.append((meant, message))
    assert len(wrong) <= 2, wrong


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_commands(command: str, capsys: pytest.CaptureFixture[str]):
    rng = random.Random(0)
    for option in COMMANDS[command]:
        for typed in {mistyped(option, rng) for _ in range(4)} - {option}:
            assert cli.main([*command.split(), f"--{typed}", "1"]) == 2
            message = capsys.readouterr().err
            assert f"unknown option --{typed}" in message
            assert f" --{option}" in message.partition(";")[2]  # alone, or in a short list


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("eval runs/x --checkpoint bset", "did you mean 'best'?"),
        ("export runs/x --to onxn", "did you mean 'onnx'?"),
        ("compare runs/x --metric retrun", "did you mean 'return'?"),
        ("resume runs/x --total_steps=5", "did you mean --total-steps?"),
        ("resume runs/x 5", "unexpected '5'"),
        ("--verison", "did you mean '--version'?"),
        ("config CartPole-v1 --seed true", "seed = 'true'"),
        ("config CartPole-v1 --policy.hidden-sizes [64, 64]", "policy.hidden_sizes.0 = '[64,': "),
        ("config CartPole-v1 --policy.normalize-obs 1", "normalize_obs = '1'"),
    ],
)
def test_values_and_words(words: str, hint: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(words.split()) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ('"seed": 1, "seed": 2', "'seed'"),
        ('"policy": {"name": "mlp", "name": "cnn"}', "'name'"),
        ('"seed": "1"', "seed = '1'"),
        ('"seed": true', "seed = True"),
        ('"policy": {"normalize_obs": 1}', "normalize_obs = 1"),
        ('"policy": {"normalize_obs": "yes"}', "normalize_obs = 'yes'"),
        ('"policy": {"hidden_sizes": 64}', "policy.hidden_sizes = 64"),
        ('"policy": {"hidden_sizes": [64, "64"]}', "hidden_sizes = [64, '64']"),
        ('"logging": {"report_to": "wandb"}', "logging.report_to = 'wandb'"),
    ],
)
def test_duplicates_and_wrong_types_in_a_file(content: str, name: str, tmp_path: Path):
    path = tmp_path / "run.json"
    path.write_text('{"env": {"id": "CartPole-v1"}, %s}' % content)  # noqa: UP031
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("rewards", "name"),
    [
        ([{"nam": "exact"}], "task.rewards.0: unknown key 'nam'"),
        ([{"name": "exact", "weight": "2"}], "weight = '2'"),
        ([{"name": "exact", "weight": True}], "weight = True"),
        ({"name": "exact"}, "task.rewards = "),
    ],
)
def test_rewards_in_a_file(rewards: object, name: str, tmp_path: Path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(TEXT | {"task": TEXT["task"] | {"rewards": rewards}}))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert name in str(caught.value)


def test_an_integer_may_have_the_form_of_a_float(tmp_path: Path):
    path = tmp_path / "run.json"
    path.write_text('{"env": {"id": "CartPole-v1"}, "total_steps": 1e5, "algorithm": {"learning_rate": 1}}')
    cfg = load_config(path)
    assert (cfg.total_steps, cfg.algorithm.learning_rate) == (100_000, 1.0)
