"""Budgets in passes over the prompts."""

import pytest
from text_runs import numbers, share_copied, train

import groupwise as gw
from groupwise import config
from groupwise.config.run import Budget
from groupwise.errors import ConfigError
from groupwise.training.checkpoint import load_checkpoint


def run_of(model, path, algorithm=None, held_out=None, **settings):
    task = gw.TextTask(numbers()[:10], reward=share_copied, eval_data=held_out)
    return train(task, model, path, algorithm, total_steps=None, **settings)


def test_a_run_of_epochs_takes_every_prompt_as_often(model, tmp_path):
    # 4 prompts an iteration of 10: 20 are taken by the fifth
    algorithm = gw.GRPOCfg(group_size=2, learning_rate=1e-3, schedule={"name": "linear", "warmup": 0.5})
    run = run_of(model, tmp_path / "run", algorithm, total_epochs=2)
    assert run.summary["stopped"] == "total_epochs"
    assert [entry["rollout/epoch"] for entry in run.metrics()] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    # one epoch up, one down
    rates = [entry["train/learning_rate"] / 1e-3 for entry in run.metrics()]
    assert rates == pytest.approx([0.4, 0.8, 1, 0.8, 0.4])


def test_a_run_of_epochs_goes_on(model, tmp_path):
    given = {"data": numbers()[:10], "reward": share_copied}
    whole = run_of(model, tmp_path / "whole", total_epochs=1.2)
    run_of(model, tmp_path / "part", total_epochs=0.5)
    longer = gw.resume(tmp_path / "part", total_epochs=1.2, **given)
    rewards = [[entry["reward/share_copied_mean"] for entry in run.metrics()] for run in (longer, whole)]
    assert rewards[0] == rewards[1]
    assert [entry["rollout/epoch"] for entry in longer.metrics()] == pytest.approx([0.4, 0.8, 1.2])
    with pytest.raises(ConfigError, match=r"total_epochs = 1\.2, but .* has 1\.2 epochs already"):
        gw.resume(tmp_path / "part", total_epochs=1.2, **given)


def test_a_fork_of_the_best_goes_on_in_the_data(model, tmp_path):
    held_out = {"eval_data": numbers()[10:12], "reward": share_copied}
    # a small rate: the first evaluation is the best one
    algorithm = gw.GRPOCfg(group_size=2, learning_rate=1e-9)
    run = run_of(model, tmp_path / "run", algorithm, held_out["eval_data"], total_epochs=1.2)
    assert load_checkpoint(run.path / "checkpoints/best").state["position"] == 4
    forked = gw.fork(run.path, tmp_path / "new", checkpoint="best")
    again = gw.resume(forked, data=numbers()[:10], **held_out)
    assert [entry["rollout/epoch"] for entry in again.metrics()] == pytest.approx([0.4, 0.8, 1.2])
    assert again.metrics()[-1]["rollout/return_mean"] == run.metrics()[-1]["rollout/return_mean"]
    with pytest.raises(ConfigError, match=r"total_epochs = 0\.3, but .*best has 0\.4 epochs already"):
        gw.fork(run.path, tmp_path / "newer", checkpoint="best", total_epochs=0.3)


def test_epochs_are_of_texts():
    assert config.resolve_text(total_epochs=0.5).budget == Budget("total_epochs", 0.5, "epochs", "rollout/epoch", 0.05)
    with pytest.raises(ConfigError, match="one of total_steps, total_iterations, total_epochs; got total_steps=5 and"):
        config.resolve_text(total_epochs=0.5, total_steps=5)
    with pytest.raises(ConfigError, match="unknown key 'total_epochs'"):
        config.resolve("CartPole-v1", total_epochs=2)
