"""Budgets in iterations; those in epochs are in ``tests/text/test_budgets.py``."""

import json

import pytest
from run_folders import same_weights, write_run

import groupwise as gw
from groupwise import config
from groupwise.comparison.compare import compare
from groupwise.errors import ConfigError, RunFolderError
from groupwise.report.folder import RunFolder

QUICK = {"num_envs": 4, "evaluation": {"episodes": 1}, "logging": {"progress": "lines"}}
ALGORITHM = gw.PPOCfg(num_steps=16, minibatch_size=64, num_epochs=1, schedule={"name": "linear", "warmup": 2})


def train(run_dir, **settings):
    return gw.train("CartPole-v1", ALGORITHM, run_dir=run_dir, **QUICK | settings)


def test_a_run_of_iterations_takes_as_many_and_schedules_and_intervals_follow(tmp_path, capsys):
    run = train(tmp_path / "run", total_iterations=20)
    assert (run.summary["stopped"], run.cfg.total_steps) == ("total_iterations", None)
    entries = run.metrics()
    assert [entry["iteration"] for entry in entries] == list(range(1, 21))
    # half and all of it in the first 2 of 20 iterations, then down over 18
    rates = [entry["train/learning_rate"] / run.cfg.algorithm.learning_rate for entry in entries]
    assert rates == pytest.approx([0.5, 1, *(1 - n / 18 for n in range(18))])
    assert "20 / 20 iterations" in capsys.readouterr().err
    assert [entry["iteration"] for entry in entries if "eval/return_mean" in entry] == list(range(2, 21, 2))


def test_a_longer_run_of_iterations_is_that_run_from_the_start(tmp_path):
    # a constant rate: a schedule would have been stretched
    constant = {"name": "ppo", "num_steps": 16, "minibatch_size": 64, "num_epochs": 1, "schedule": "none"}
    quick = QUICK | {"evaluation": {"episodes": 1, "interval": 9999}, "checkpoint_interval": 9999}
    whole = gw.train("CartPole-v1", constant, run_dir=tmp_path / "whole", total_iterations=8, **quick)
    gw.train("CartPole-v1", constant, run_dir=tmp_path / "part", total_iterations=4, **quick)
    longer = gw.resume(tmp_path / "part", total_iterations=8)
    assert same_weights(whole, longer)
    assert RunFolder(tmp_path / "part").read_config()["total_iterations"] == 8
    assert [entry["iteration"] for entry in longer.metrics()] == list(range(1, 9))
    with pytest.raises(ConfigError, match=r"total_iterations = 8, but .* has 8 iterations already; fix: a larger"):
        gw.resume(tmp_path / "part", total_iterations=8)
    with pytest.raises(ConfigError, match="total_epochs = 3: an environment has no epochs"):
        gw.resume(tmp_path / "part", total_epochs=3)
    for wrong, why in (
        ({"total_steps": 640.5}, "total_steps = 640.5: input should be a valid integer"),
        ({"total_steps": [640]}, r"total_steps = \[640\]: input should be a valid integer"),
        ({"total_steps": 640, "total_iterations": 10}, "training needs one of"),
    ):
        with pytest.raises(ConfigError, match=why):
            gw.resume(tmp_path / "part", **wrong)
    steps = gw.resume(tmp_path / "part", total_steps=600)
    assert (steps.cfg.total_iterations, steps.summary["env_steps"]) == (None, 640)


def test_a_budget_that_does_not_fit_leaves_the_run_as_it_was(tmp_path):
    warm = gw.PPOCfg(num_steps=16, num_epochs=1, schedule={"name": "linear", "warmup": 64})
    run = gw.train("CartPole-v1", warm, run_dir=tmp_path / "run", total_steps=128, **QUICK)
    before = run.folder.config.read_bytes()
    with pytest.raises(ConfigError, match=r"schedule\.warmup=64 is not less than total_iterations=8"):
        gw.resume(run.path, total_iterations=8)
    assert run.folder.config.read_bytes() == before
    assert gw.resume(run.path, total_steps=192).summary["env_steps"] == 192


def test_one_budget_replaces_that_of_the_preset_and_of_the_file(tmp_path):
    cfg = config.resolve("CartPole-v1", total_iterations=5)
    assert (cfg.total_steps, cfg.total_iterations) == (None, 5)
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"env": {"id": "CartPole-v1"}, "total_steps": 10}))
    assert config.load_config(path, total_iterations=7).budget[:2] == ("total_iterations", 7)
    path.write_text(config.to_json(cfg))
    assert config.load_config(path) == cfg
    assert config.load_config(path, total_steps=9).budget[:2] == ("total_steps", 9)
    assert gw.RunCfg(total_iterations=3).budget[:2] == ("total_iterations", 3)
    assert gw.RunCfg().budget[:2] == ("total_steps", 100_000)


def test_exactly_one_budget():
    for totals in ({"total_steps": 9, "total_iterations": 5}, {"total_steps": None}):
        with pytest.raises(ConfigError, match="one of total_steps, total_iterations"):
            gw.RunCfg(**totals)


def test_runs_of_iterations_are_compared_at_equal_budgets(tmp_path):
    for seed in (0, 1):
        made = {"total_steps": None, "total_iterations": 4, "seed": seed}
        write_run(tmp_path / f"seed{seed}", summary={"stopped": "total_iterations"}, **made)
    assert compare(tmp_path).environments
    write_run(tmp_path / "short", (1.0, 2.0), steps=(250, 500), total_steps=None, total_iterations=4, seed=2)
    with pytest.raises(RunFolderError, match="stopped early at iteration 2 of 4"):
        compare(tmp_path / "short")
    write_run(tmp_path / "other", seed=3, total_steps=None, total_iterations=3)
    with pytest.raises(ConfigError, match=r"unequal budgets .*total_iterations=3 in .*total_iterations=4 in"):
        compare([tmp_path / "seed0", tmp_path / "other"])
