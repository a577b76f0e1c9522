"""Means of an update's metrics: over the elements of each step by their shares, over the steps that were taken."""

import pytest
import torch
from small_updates import build, make_rollout, parameters

from groupwise.algorithms.base import UpdateStats
from groupwise.algorithms.losses import DIAGNOSTICS, Counts, policy_loss
from groupwise.config.algorithm import ObjectiveCfg
from groupwise.functional.reduce import local

CPU = torch.device("cpu")


def stats_of(*names, all_sum=local):
    return UpdateStats(names, CPU, all_sum)


def step(stats, *micro_batches, norm=0.0):
    """One optimiser step that is taken, from the sums of each micro-batch."""
    stats.end_step([torch.tensor(sums) for sums in micro_batches], torch.tensor(norm))


def numbers(means):
    return {name.removeprefix("train/"): pytest.approx(value.item(), abs=1e-6) for name, value in means.items()}


def two_steps(stats):
    # step one: 1/4 * 2 + 1/4 * 4 + 1/2 * 10 = 6.5 and 1/4 * 1 + 0 + 1/2 * 3 = 1.75; step two: 8 and -1
    step(stats, (1.5, 0.25), (5.0, 1.5), norm=3.0)
    step(stats, (8.0, -1.0), norm=5.0)


MEANS = {"a": 7.25, "b": 0.375, "grad_norm": 4.0, "optimizer_steps": 2.0}


def test_means_by_hand():
    stats = stats_of("a", "b")
    two_steps(stats)
    assert stats.steps == 2
    assert numbers(stats.means()) == MEANS
    assert all(value.shape == () for value in stats.means().values())


def test_the_samplers_kl_is_that_of_the_first_step_that_is_taken():
    stats = stats_of("loss", "approx_kl")
    assert stats.means()["rollout/sampler_kl"] == 0
    two_steps(stats)
    assert stats.means()["rollout/sampler_kl"].item() == 1.75
    assert "rollout/sampler_kl" not in stats_of("loss").means()


def test_an_update_without_steps_has_means_of_0():
    assert numbers(stats_of("a").means()) == {"a": 0.0, "grad_norm": 0.0, "optimizer_steps": 0.0}


def test_the_current_step_by_hand():
    stats = stats_of("a", "b")
    two_steps(stats)
    sums = [torch.tensor([1.5, 0.25]), torch.tensor([5.0, 1.5])]
    assert numbers(stats.step_means(sums)) == {"a": 6.5, "b": 1.75}
    assert numbers(stats.means()) == MEANS  # a step that is not taken does not count


def diagnostics(cfg, log_prob, old):
    batch = {"old_log_prob": old, "advantage": old, "loss_mask": old <= 0, "episode_id": torch.zeros(3).long()}
    return policy_loss(cfg, log_prob, batch, Counts(1))[1]


def test_diagnostics_by_hand():
    # clip range 0.8 to 1.2; approx_kl is ratio - 1 - log ratio: 1 - log 2 at 2, log 2 - 1/2 at 1/2
    ratio, old = torch.tensor([2.0, 1.0, 0.5]), torch.tensor([-1.0, -7.0, -2.0])
    kl, clipped, low, high = diagnostics(ObjectiveCfg(), old + ratio.log(), old)
    torch.testing.assert_close(kl, torch.tensor([0.306853, 0.0, 0.193147]))
    assert (clipped.tolist(), low.tolist(), high.tolist()) == ([1, 0, 1], [0, 0, 1], [1, 0, 0])


def of_rank(steps, all_sum):
    """Means of a rank, given its sums in each step; none where it has no share."""
    stats = stats_of("a", all_sum=all_sum)
    current = []
    for micro_batches in steps:
        sums = [torch.tensor([value]) for value in micro_batches]
        current.append(stats.step_means(sums)["a"])
        stats.end_step(sums, torch.tensor(1.0))
    return torch.stack([*current, stats.means()["train/a"]])


def first_of_rank(steps, all_sum):
    stats = stats_of("approx_kl", all_sum=all_sum)
    for micro_batches in steps:
        step(stats, *([value] for value in micro_batches))
    return stats.means()["rollout/sampler_kl"].reshape(1)


def test_the_first_step_is_the_same_one_on_every_rank(two_ranks):
    assert two_ranks(first_of_rank, ([[], [7.0]],), ([[0.25, 3.25], []],)).flatten().tolist()[0] == 3.5


def test_two_ranks_have_the_means_of_their_union(two_ranks):
    union = of_rank([[0.25, 3.25], [7.0]], local)
    assert union.tolist() == [3.5, 7.0, 5.25]
    for here, there in [([[0.25], [7.0]], [[3.25], []]), ([[3.25], []], [[0.25], [7.0]])]:
        torch.testing.assert_close(two_ranks(of_rank, (here,), (there,)), union)
    alone = [[0.25, 3.25], [7.0]], [[], []]
    for here, there in [alone, alone[::-1]]:
        torch.testing.assert_close(two_ranks(of_rank, (here,), (there,)), union)


def test_sums_over_ranks_do_not_depend_on_what_a_rank_has():
    """One rank that adds up more often than the others would wait for them for ever."""
    calls = []

    def all_sum(tensor):
        calls.append(tensor.shape)
        return tensor

    for rounds in (0, 1, 4):
        stats = stats_of("a", all_sum=all_sum)
        for _ in range(4):
            step(stats, *[(1.0,)] * rounds)
        stats.means()
    assert calls == [(2, 1)] * 3


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
    expected = torch.stack(steps).mean(dim=0).tolist()
    for name, value in zip(names, expected, strict=True):
        assert found[f"train/{name}"].item() == pytest.approx(value, abs=1e-5), name
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
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_metrics_carry_no_gradient():
    algorithm = build("grpo")
    assert "approx_kl" in DIAGNOSTICS
    assert not any(value.requires_grad for value in algorithm.update(make_rollout(algorithm.policy)).values())


def test_sampler_mismatch_by_hand_and_by_depth():
    stats = UpdateStats((), CPU, local, recomputed=True)
    batch = {
        "loss_mask": torch.tensor([[True, True, True, False]]),
        "step": torch.tensor([[127, 128, 600, 9]]),
        "sample_log_prob": torch.tensor([[-1.0, -2.0, -3.0, -4.0]]),
        "old_log_prob": torch.tensor([[-1.1, -1.8, -3.0, 7.0]]),
    }
    stats.compare_sampler([batch])
    found = stats.means()
    # exp(-0.1) + 0.1 - 1 = 0.004837; exp(0.2) - 0.2 - 1 = 0.021403; and 0
    assert found["rollout/sampler_kl_from_0"].item() == pytest.approx(0.004837, abs=1e-6)
    assert found["rollout/sampler_kl_from_128"].item() == pytest.approx(0.021403, abs=1e-6)
    assert found["rollout/sampler_kl_from_512"].item() == 0
    assert found["rollout/sampler_kl"].item() == pytest.approx((0.004837 + 0.021403) / 3, abs=1e-6)


def test_no_ratio_on_the_border_counts_as_clipped():
    # 1 - .5 and 1 + .5 are exact
    ratio, cfg = (
        torch.tensor([0.5, 1.5, 1.0]),
        ObjectiveCfg(trust_region={"name": "clip", "clip_low": 0.5, "clip_high": 0.5}),
    )
    _, clipped, low, high = diagnostics(cfg, ratio.log(), torch.zeros(3))
    assert (clipped.tolist(), low.tolist(), high.tolist()) == ([0.0] * 3,) * 3
