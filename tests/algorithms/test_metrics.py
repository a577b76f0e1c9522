"""Means of an update's metrics: over the elements of each step by their shares, over the steps that were taken."""

import pytest
import torch
from small_updates import build, make_rollout, parameters

from groupwise.algorithms.base import sampler_kl_sums
from groupwise.algorithms.losses import Counts, policy_loss
from groupwise.config.algorithm import ObjectiveCfg


def diagnostics(cfg, log_prob, old):
    batch = {"old_log_prob": old, "advantage": old, "loss_mask": old <= 0, "episode_id": torch.zeros(3).long()}
    return policy_loss(cfg, log_prob, batch, Counts(1))[1]


@pytest.mark.parametrize(
    ("clip", "ratio", "low", "high"),
    [
        (0.2, [2.0, 1.0, 0.5], [0, 0, 1], [1, 0, 0]),
        (0.5, [0.5, 1.5, 1.0], [0, 0, 0], [0, 0, 0]),
    ],  # borders do not count
)
def test_diagnostics_by_hand(clip, ratio, low, high):
    cfg = ObjectiveCfg(trust_region={"clip_low": clip, "clip_high": clip})
    old = torch.tensor([-1.0, -7.0, -2.0]) if clip == 0.2 else torch.zeros(3)
    kl, *found = diagnostics(cfg, old + torch.tensor(ratio).log(), old)
    assert [x.tolist() for x in found] == [[a + b for a, b in zip(low, high, strict=True)], low, high]
    if clip == 0.2:  # ratio - 1 - log ratio: 1 - log 2 at 2, log 2 - 1/2 at 1/2
        torch.testing.assert_close(kl, torch.tensor([0.306853, 0.0, 0.193147]))


SETTINGS = {
    "minibatches": {"num_epochs": 3, "minibatch_size": 30},
    "micro-batches": {"num_epochs": 2, "minibatch_size": 40, "micro_batch_size": 7},
    "one minibatch": {"num_epochs": 4},
    "target_kl": {"num_epochs": 2, "minibatch_size": 30, "target_kl": 100.0},
    "stopped": {"num_epochs": 9, "minibatch_size": 30, "target_kl": 0.005},
    "episodes": {"minibatch_size": 30, "objective": {"aggregation": "seq_mean_token_mean"}},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_an_updates_metrics_are_those_of_its_elements_one_by_one(monkeypatch, kind, settings):
    algorithm = build(kind, **SETTINGS[settings], learning_rate=2.0, max_grad_norm=0.5)
    loss, step, names = algorithm.loss, algorithm.optimizer.step, algorithm.metric_names
    steps, current, weights, norms = [], [], [], []
    is_loss = torch.tensor([name.endswith("loss") for name in names])

    def recorded_loss(batch, evaluation):
        found = loss(batch, evaluation)
        for i, counts in enumerate(batch["loss_mask"]):
            assert counts
            current.append([float(values[i].detach()) for values in found.metrics])
            weights.append(float(batch["weight"][i]))
        return found

    def recorded_step():
        values, weight = torch.tensor(current, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
        steps.append(torch.where(is_loss, weight @ values, values.mean(dim=0)))
        norms.append(torch.stack([p.grad.norm() for p in algorithm.parameters]).norm())
        current.clear()
        weights.clear()
        step()

    monkeypatch.setattr(algorithm, "loss", recorded_loss)
    monkeypatch.setattr(algorithm.optimizer, "step", recorded_step)
    found = algorithm.update(make_rollout(algorithm.policy))
    assert found["train/optimizer_steps"] == len(steps) > 0
    assert bool(current) is (settings == "stopped")  # the last step was measured and not taken
    assert found["rollout/sampler_kl"] == pytest.approx(steps[0][names.index("approx_kl")].item(), abs=1e-6)
    expected = torch.stack(steps).mean(dim=0).tolist()
    for name, value in zip(names, expected, strict=True):
        assert found[f"train/{name}"] == pytest.approx(value, abs=1e-5), name
    clipped = torch.stack(norms)
    assert clipped.max() <= 0.5 + 1e-5
    assert found["train/grad_norm"] >= clipped.mean() - 1e-6  # the norm before clipping
    assert settings in ("episodes", "stopped") or found["train/clip_fraction"] > 0


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_looking_at_single_steps_changes_neither_metrics_nor_parameters(kind):
    ends = []
    for watched in ({}, {"target_kl": 1e9}):
        algorithm = build(kind, num_epochs=3, minibatch_size=30, **watched)
        metrics = algorithm.update(make_rollout(algorithm.policy))
        ends.append((parameters(algorithm), metrics))
    (one, first), (other, second) = ends
    assert torch.equal(one, other)
    assert first == second


def test_metrics_are_numbers():
    algorithm = build("grpo")
    assert {type(value) for value in algorithm.update(make_rollout(algorithm.policy)).values()} == {float}


def test_sampler_mismatch_by_hand():
    batch = {
        "loss_mask": torch.tensor([[True, True, True, False]]),
        "sample_log_prob": torch.tensor([[-1.0, -2.0, -3.0, -4.0]]),
        "old_log_prob": torch.tensor([[-1.1, -1.8, -3.0, 7.0]]),
    }
    total, count = sampler_kl_sums(batch)
    # exp(-0.1) + 0.1 - 1 = 0.004837; exp(0.2) - 0.2 - 1 = 0.021403; and 0
    assert total.item() == pytest.approx(0.004837 + 0.021403, abs=1e-6)
    assert count.item() == 3
