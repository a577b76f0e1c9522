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
        ("eval runs/x --checkpoint bset", "expected latest or best, got 'bset'; did you mean 'best'?"),
        ("export runs/x --to onxn", "expected onnx or safetensors or transformers, got 'onxn'; did you mean 'onnx'?"),
        ("compare runs/x --metric retrun", "expected return or success_rate, got 'retrun'; did you mean 'return'?"),
        ("resume runs/x --total_steps=5", "unknown option --total-steps; did you mean --total-steps?"),
        ("resume runs/x 5", "unexpected '5'; fix: see groupwise resume --help"),
        ("--verison", "unknown command '--verison': did you mean '--version'?"),
        ("config CartPole-v1 --seed true", "seed = 'true': "),
        ("config CartPole-v1 --policy.hidden-sizes [64, 64]", "policy.hidden_sizes.0 = '[64,': "),
        (
            "config CartPole-v1 --policy.normalize-obs 1",
            "policy: normalize_obs = '1': expected true or false, got text",
        ),
    ],
)
def test_values_and_words(words: str, hint: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(words.split()) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rewards", "hint"),
    [
        ([{"nam": "exact"}], "task.rewards.0: unknown key 'nam'; did you mean 'name'?"),
        ([{"name": "exact", "wieght": 2}], "task.rewards.0: unknown key 'wieght'; did you mean 'weight'?"),
        ([{"name": "exact", "weight": "2"}], "task.rewards.0: weight = '2': expected a number, got text; fix: 2.0"),
        ([{"name": "exact", "weight": True}], "weight = True: expected a number, got true or false; fix: 1.0"),
        ({"name": "exact"}, "task.rewards = {'name': 'exact'}: expected a list; fix: [{\"name\": \"exact\"}]"),
    ],
)
def test_rewards_in_a_file(rewards: object, hint: str, tmp_path: Path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(TEXT | {"task": TEXT["task"] | {"rewards": rewards}}))
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ('"seed": 1, "seed": 2', "broken JSON: the key 'seed' comes twice"),
        ('"policy": {"name": "mlp", "name": "cnn"}', "broken JSON: the key 'name' comes twice"),
        ('"seed": "1"', "seed = '1': expected a number, got text; fix: 1"),
        ('"seed": true', "seed = True: expected a number, got true or false; fix: 1"),
        (
            '"policy": {"normalize_obs": 1}',
            "policy: normalize_obs = 1: expected true or false, got a number; fix: true",
        ),
        ('"policy": {"normalize_obs": "yes"}', "normalize_obs = 'yes': expected true or false, got text; fix: true"),
        ('"policy": {"hidden_sizes": 64}', "policy.hidden_sizes = 64: expected a list; fix: [64]"),
        (
            '"policy": {"hidden_sizes": [64, "64"]}',
            "hidden_sizes = [64, '64']: expected a number, got text; fix: [64, 64]",
        ),
        ('"logging": {"report_to": "wandb"}', "logging.report_to = 'wandb': expected a list; fix: [\"wandb\"]"),
    ],
)
def test_duplicates_and_wrong_types_in_a_file(content: str, hint: str, tmp_path: Path):
    path = tmp_path / "run.json"
    path.write_text('{"env": {"id": "CartPole-v1"}, %s}' % content)  # noqa: UP031
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert hint in str(caught.value)


def test_an_integer_may_have_the_form_of_a_float(tmp_path: Path):
    path = tmp_path / "run.json"
    path.write_text('{"env": {"id": "CartPole-v1"}, "total_steps": 1e5, "algorithm": {"learning_rate": 1}}')
    cfg = load_config(path)
    assert (cfg.total_steps, cfg.algorithm.learning_rate) == (100_000, 1.0)
