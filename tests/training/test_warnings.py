"""Runs whose policy cannot learn, or acts otherwise than it evaluates, say so."""

import logging

import pytest
from plain_envs import Plain

import groupwise as gw
from groupwise.cli.train import print_run
from groupwise.policies.actor_critic import ActorCritic
from groupwise.report.folder import RunFolder
from groupwise.training.checkpoint import saved_counts


class Steady(Plain):
    """Three steps; ``pays`` is the reward of action 1."""

    length = 3

    def __init__(self, pays=0.0):
        self.pays = pays

    def step(self, action):
        return super().step(self.pays * action)


def trained(path, algorithm, pays=0.0):
    quiet = {"logging": {"progress": "none"}, "evaluation": {"episodes": 2}, "max_episode_steps": 3}
    return gw.train(lambda: Steady(pays), algorithm, num_envs=4, total_steps=48, run_dir=path, seed=0, **quiet)


def test_a_run_without_any_gradient_says_so(tmp_path, caplog, capsys):
    run = trained(tmp_path / "run", gw.GRPOCfg(group_size=2, num_steps=6, num_epochs=2))
    assert run.summary["updates_without_gradient"] == run.summary["iterations"] > 1
    assert run.summary == gw.Run.load(run.path, env=Steady).summary
    warnings = [record.message[:23] for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["update 1 learns nothing"]
    assert print_run(run) == 0
    assert "Nothing was learned: the gradient of every update was 0" in capsys.readouterr().out


@pytest.mark.parametrize("algorithm", [gw.GRPOCfg(group_size=2, num_steps=6), gw.PPOCfg(num_steps=6)])
def test_a_run_with_a_gradient_does_not(algorithm, tmp_path, caplog, capsys):
    run = trained(tmp_path / "run", algorithm, pays=1.0)
    assert run.summary.get("updates_without_gradient", 0) < run.summary["iterations"]
    assert not caplog.records
    assert print_run(run) == 0
    assert "Nothing was learned" not in capsys.readouterr().out


QUICK = {"total_steps": 600, "evaluation": {"episodes": 1}, "logging": {"progress": "none"}}


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "policy"), [("ppo", "recurrent"), ("grpo", "actor_critic")])
def test_sampler_and_trainer_agree(algorithm, policy, tmp_path, caplog):
    run = gw.train("CartPole-v1", algorithm, policy=policy, run_dir=tmp_path / "run", **QUICK)
    found = [entry["rollout/sampler_kl"] for entry in run.metrics() if entry["train/optimizer_steps"]]
    assert found
    assert max(abs(kl) for kl in found) < 1e-6
    assert max(entry["train/approx_kl"] for entry in run.metrics()) > 1e-6
    assert "sampler and trainer" not in caplog.text


def test_a_policy_that_acts_otherwise_than_it_evaluates_is_warned_of_once(monkeypatch, tmp_path, caplog):
    honest = ActorCritic.evaluate

    def off(self, batch):
        evaluation = honest(self, batch)
        return evaluation._replace(log_prob=evaluation.log_prob + 0.6)

    monkeypatch.setattr(ActorCritic, "evaluate", off)
    with caplog.at_level(logging.WARNING):
        never = {"sampler_mismatch": {"stop": None}}
        run = gw.train("CartPole-v1", {"name": "grpo", "num_steps": 32}, run_dir=tmp_path / "run", **QUICK, **never)
    # k3 of a log-ratio of 0.6: exp(0.6) - 0.6 - 1
    assert run.metrics()[0]["rollout/sampler_kl"] == pytest.approx(0.222119, abs=1e-3)
    assert len([line for line in caplog.messages if "act() and evaluate() of the policy" in line]) == 1


class Meddles(gw.Callback):
    """Changes the weights between sampling and update, from the third iteration on."""

    def on_rollout_end(self, trainer, rollout):
        if trainer.iteration >= 2:
            head = trainer.algorithm.policy.actor.head
            head.weight.data.mul_(-300)


@pytest.mark.parametrize("algorithm", [gw.PPOCfg(num_steps=32), gw.GRPOCfg(group_size=4, num_steps=32)])
def test_weights_that_change_between_sampling_and_update_stop_the_run(algorithm, tmp_path, caplog):
    settings = QUICK | {"num_envs": 4, "callbacks": [Meddles()], "checkpoint_interval": 1}
    with pytest.raises(
        gw.errors.SamplerMismatchError, match=r"KL .* in iteration 3, more than 0\.1; fix: act\(\) and .*limits in"
    ):
        gw.train("CartPole-v1", algorithm, run_dir=tmp_path / "run", **settings)
    summary = RunFolder(tmp_path / "run").read_summary()
    assert (summary["stopped"], summary["iterations"]) == ("failed", 2)
    assert saved_counts(tmp_path / "run" / "checkpoints" / "latest")["iterations"] == 2
    higher = {"sampler_mismatch": {"stop": 1e9}}
    run = gw.train("CartPole-v1", algorithm, run_dir=tmp_path / "free", **settings, **higher)
    assert run.summary["stopped"] == "total_steps"
    assert "sampler and trainer differ" in caplog.text
