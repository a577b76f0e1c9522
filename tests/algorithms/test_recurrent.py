"""Updates of recurrent policies."""

import pytest
import torch
from recurrent_policies import group_rollouts, small, vector_rollouts
from small_updates import updated

MINIBATCHES = {"minibatch_size": 20, "num_epochs": 2}


def rollout_of(kind):
    """The last of several rollouts, in which episodes go on from earlier ones."""
    policy = small(actor_only=kind == "grpo")
    return list((group_rollouts if kind == "grpo" else vector_rollouts)(policy, rows=6))[-1]


def after(kind, rollout, **cfg):
    return updated(kind, rollout, policy=small(actor_only=kind == "grpo"), **cfg)


@pytest.mark.parametrize("micro", [1, 13, 30])
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_micro_batches_never_change_the_gradient(kind, micro):
    cfg = MINIBATCHES | {"ent_coef": 0.01} | ({"kl_coef": 0.1} if kind == "grpo" else {})
    rollout = rollout_of(kind)
    whole, metrics = after(kind, rollout, **cfg)
    found, cut_metrics = after(kind, rollout, micro_batch_size=micro, **cfg)
    torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-5)
    for name, value in metrics.items():
        torch.testing.assert_close(cut_metrics[name], value, atol=1e-5, rtol=1e-4)
    assert metrics["train/optimizer_steps"] > 4
    assert not torch.equal(whole, parameters_of(kind))


def parameters_of(kind):
    return torch.cat([p.detach().flatten() for p in small(actor_only=kind == "grpo").parameters()])


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_row_order_never_changes_the_gradient(kind):
    rollout = rollout_of(kind)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(3))
    whole, metrics = after(kind, rollout)
    torch.testing.assert_close(after(kind, rollout[order])[0], whole, atol=1e-6, rtol=1e-5)
    assert abs(metrics["train/approx_kl"]) < 1e-8, "the ratio of a first minibatch is 1"
    assert metrics["train/clip_fraction"] == 0


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_minibatches_are_whole_rows(kind, monkeypatch):
    rollout, seen = rollout_of(kind), []
    policy = small(actor_only=kind == "grpo")
    evaluate = policy.evaluate
    monkeypatch.setattr(policy, "evaluate", lambda batch: seen.append(batch["obs"]) or evaluate(batch))
    updated(kind, rollout, policy=policy, **MINIBATCHES)
    rows = {tuple(row.flatten().tolist()) for row in rollout["obs"][:, :-1]}
    assert len(seen) > 4
    assert {tuple(row.flatten().tolist()) for obs in seen for row in obs} == rows
