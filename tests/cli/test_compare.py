"""``groupwise compare`` from real runs to tables, JSON and files."""

import json
from pathlib import Path

import pytest
from run_folders import write_seeds

import groupwise as gw
from groupwise import cli
from groupwise.cli.eval import parse_word


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds each of GRPO and PPO, evaluated at times of their own."""
    folder = tmp_path_factory.mktemp("trained")
    evaluation = {"interval": 100, "episodes": 2}
    for seed in (0, 1):
        small = {"seed": seed, "num_envs": 4, "total_steps": 300, "evaluation": evaluation}
        grpo, ppo = gw.GRPOCfg(num_epochs=1), gw.PPOCfg(num_steps=16, num_epochs=1)
        gw.train("CartPole-v1", grpo, run_dir=folder / "grpo" / f"seed_{seed}", **small)
        gw.train("CartPole-v1", ppo, run_dir=folder / "ppo" / f"seed_{seed}", **small)
    return folder


@pytest.mark.slow
def test_runs_are_compared_from_training_to_table_json_and_picture(trained, tmp_path, capsys):
    argv = ["compare", str(trained / "grpo"), f"mine={trained / 'ppo'}", "--out", str(tmp_path / "out")]
    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[1] == "CartPole-v1"
    assert all(
        text in shown for text in ("grpo > mine", "algorithm.num_steps", f"written: {tmp_path}/out/comparison.json")
    )
    assert "grpo &gt; mine" in (tmp_path / "out" / "comparison.html").read_text()

    assert cli.main([*argv[:3], "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out" / "comparison.json").read_text())
    [found] = printed["environments"]
    assert [(m["method"], m["seeds"]) for m in found["methods"]] == [("grpo", [0, 1]), ("mine", [0, 1])]
    for method in found["methods"]:
        summaries = [json.loads(Path(source, "summary.json").read_text()) for source in method["sources"]]
        assert method["scores"] == [summary["return_mean"] for summary in summaries]
        assert method["seconds"] == pytest.approx(sum(summary["seconds"] for summary in summaries) / 2)
        assert method["memory_mib"] > 100
        assert len(method["curve"]["env_steps"]) > 10


def test_reference_scores_come_from_a_file(tmp_path, capsys):
    grpo, ppo = write_seeds(tmp_path / "g", (10.0, 20.0)), write_seeds(tmp_path / "p", (5.0, 6.0), algorithm="ppo")
    reference = tmp_path / "reference.json"
    reference.write_text('{"CartPole-v1": [0, 20]}')
    assert cli.main(["compare", str(grpo), str(ppo), "--reference", str(reference)]) == 0
    shown = capsys.readouterr().out
    assert "all environments, normalised: CartPole-v1\n" in shown
    assert "0.7500" in shown
    for text in ("[1]", "{", '{"CartPole-v1": [1, 2, 3]}', '{"CartPole-v1": ["a", 1]}'):
        reference.write_text(text)
        assert cli.main(["compare", str(grpo), "--reference", str(reference)]) == 2
        assert 'expected a file with JSON like {"CartPole-v1": [20, 500]}' in capsys.readouterr().err


def test_notes_and_left_out_runs_are_printed(tmp_path, capsys):
    folder = write_seeds(tmp_path / "g", (1.0, 2.0, 3.0))
    (folder / "seed_1" / "summary.json").unlink()
    assert cli.main(["compare", str(folder)]) == 2
    message = capsys.readouterr().err
    assert "seed_1: unfinished" in message
    assert "--finished-only" in message
    assert cli.main(["compare", str(folder), "--finished-only"]) == 0
    assert "note: left out: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [([], "[NAME=]RUNS"), (["nowhere"], "'nowhere'"), (["=nowhere"], "NAME="), (["mine="], "NAME=")],
)
def test_wrong_arguments_say_what_to_write(argv, message, capsys):
    assert cli.main(["compare", *argv]) == 2
    assert message in capsys.readouterr().err


def test_an_equals_sign_makes_a_name_but_in_a_folder_or_a_pattern(tmp_path, monkeypatch, capsys):
    assert parse_word("runs/lr=0.1/*") == (None, Path("runs/lr=0.1/*"))
    assert parse_word("fast=runs/lr=0.1/*") == ("fast", Path("runs/lr=0.1/*"))
    monkeypatch.chdir(tmp_path)
    write_seeds(Path("lr=0.1"), (1.0, 2.0))
    assert cli.main(["compare", "lr=0.1"]) == 0
    assert "grpo" in capsys.readouterr().out
