"""In control, too, the trainer gives an action the probability that the sampler gave it."""

import logging

import pytest

import groupwise as gw
from groupwise.policies.actor_critic import ActorCritic

QUICK = {"total_steps": 600, "evaluation": {"episodes": 1}, "logging": {"progress": "none"}}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["actor_critic", "recurrent"])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
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
        run = gw.train("CartPole-v1", "grpo", run_dir=tmp_path / "run", **QUICK | {"total_steps": 3000})
    # k3 of a log-ratio of 0.6: exp(0.6) - 0.6 - 1
    assert run.metrics()[0]["rollout/sampler_kl"] == pytest.approx(0.222119, abs=1e-3)
    assert len([line for line in caplog.messages if "act() and evaluate() of the policy" in line]) == 1
