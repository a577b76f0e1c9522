"""Trust regions through the update: at ratio 1, beyond their bounds, and where these are wide."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_updates import EVERY, REGIONS, make_policy, make_rollout, updated

from groupwise.algorithms.losses import Counts, policy_loss, policy_ratio
from groupwise.config.algorithm import ObjectiveCfg


@pytest.mark.parametrize("name", EVERY)
def test_the_first_minibatch_has_ratio_one_and_nothing_is_clipped(name):
    policy = make_policy()
    rollout = make_rollout(policy, mismatch=0.0)
    _, metrics = updated(EVERY[name], rollout, policy, num_epochs=1)
    assert metrics["train/clip_fraction"] == 0
    assert abs(metrics["train/approx_kl"]) < 1e-7


def made_up_batch(seed, name):
    g = torch.Generator().manual_seed(seed)
    log_prob = -torch.rand(4, 5, generator=g) * 3
    mask = torch.rand(4, 5, generator=g) < 0.8
    episode = torch.arange(4)[:, None].expand(4, 5).contiguous()
    advantage = torch.randn(4, 1 if name in ("gmpo", "gspo") else 5, generator=g).expand(4, 5).contiguous()
    batch = {"old_log_prob": log_prob.clone(), "sample_log_prob": log_prob.clone(), "loss_mask": mask}
    batch |= {"advantage": advantage, "episode_id": episode, "turn": episode * 3 + torch.arange(5) // 2}
    return log_prob, batch | {"chosen": torch.rand(4, 5, generator=g) < 0.5}


@settings(max_examples=10)
@given(seed=st.integers(0, 999))
@pytest.mark.parametrize("name", [*REGIONS, "gspo_token"])
def test_at_ratio_one_the_gradient_is_minus_the_advantage(name, seed):
    """Of the summed losses of an episode; element by element but for the ratio of whole episodes."""
    cfg = ObjectiveCfg(**EVERY[name])
    log_prob, batch = made_up_batch(seed, name)
    log_prob.requires_grad_()
    counts = Counts(4, 12)
    ratio = policy_ratio(cfg, log_prob, batch, counts)
    assert torch.equal(ratio, torch.ones(4, 5))
    batch["chosen"] &= name == "kl_cov"  # clip_cov leaves out what is chosen
    loss, _ = policy_loss(cfg, log_prob, batch, counts)
    loss[batch["loss_mask"]].sum().backward()
    expected = torch.where(batch["loss_mask"], -batch["advantage"], 0.0)
    torch.testing.assert_close(log_prob.grad, expected, atol=1e-5, rtol=1e-5)


def gradient_of_one_step(name, moved, advantage):
    batch = {"old_log_prob": torch.tensor([-2.0]), "sample_log_prob": torch.tensor([-2.0])}
    batch |= {
        "advantage": torch.tensor([advantage]),
        "loss_mask": torch.ones(1).bool(),
        "episode_id": torch.tensor([0]),
    }
    log_prob = torch.tensor([-2.0 + moved]).requires_grad_()
    policy_loss(ObjectiveCfg(**EVERY[name]), log_prob, batch, Counts(1))[0].sum().backward()
    return log_prob.grad.item()


@pytest.mark.parametrize(
    ("name", "towards_gain"),
    [(n, "flat") for n in ("clip", "clip_higher", "dual_clip", "two_sided", "dppo_tv")]
    + [(n, "goes on") for n in ("none", "cispo_trl", "cispo_verl", "reinforce")],
)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_far_beyond_the_region_only_policy_gradients_go_on(name, towards_gain, advantage):
    gradient = gradient_of_one_step(name, advantage, advantage)
    assert gradient == 0 if towards_gain == "flat" else -advantage * gradient > 0.3


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", ["clip", "clip_higher", "two_sided", "dual_clip", "sapo", "dppo_tv", "none"])
def test_the_way_back_is_always_open(name, advantage):
    """A step that went against its advantage, by a little, has a gradient that brings it back."""
    assert -advantage * gradient_of_one_step(name, -0.25 * advantage, advantage) > 0.5


def test_dppo_pulls_every_step_back_to_where_it_was():
    # kept, ratio e^.3: -2 e^.3 * -1.7 + .5 * .3^2; dropped, moved too far upwards: only .5 * 1.5^2
    cfg = ObjectiveCfg(trust_region={"name": "dppo", "low": 0.3, "high": 0.3, "pull": 0.5})
    old = torch.tensor([-2.0, -2.0])
    sampled = torch.tensor([-1.9, -2.1])  # decides what is dropped, and nothing is pulled towards it
    batch = {"old_log_prob": old, "sample_log_prob": sampled, "advantage": torch.tensor([2.0, 2.0])}
    log_prob = torch.tensor([-1.7, -0.5]).requires_grad_()
    loss, _ = policy_loss(cfg, log_prob, batch | EPISODE, Counts(1))
    torch.testing.assert_close(loss, torch.tensor([2 * 1.3498588 * 1.7 + 0.045, 1.125]))
    loss.sum().backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([-2 * 1.3498588 + 0.3, 1.5]))


EPISODE = {"loss_mask": torch.tensor([True, True]), "episode_id": torch.tensor([0, 0])}
WIDE = {
    "dual_clip": {"trust_region": {"name": "dual_clip", "bound": 1e6}},
    "two_sided": {"trust_region": {"name": "two_sided", "delta": 1e6}},
    "clip_cov": {"trust_region": {"name": "clip_cov", "low": 50.0, "high": 60.0}},
    "off_policy": {"importance_sampling_correction": {"name": "off_policy_mask", "off_policy_mask_threshold": 50.0}},
}
UNCLIPPED = {
    "clip": {"trust_region": {"clip_low": 50.0, "clip_high": 50.0}},
    "cispo": {"trust_region": {"name": "cispo", "high": None}},
    "sapo": {"trust_region": {"name": "sapo", "positive": 1e-3, "negative": 1e-3}},
    "kl_cov": {"trust_region": {"name": "kl_cov", "penalty": 0.0}},
    "dppo": {"trust_region": {"name": "dppo", "low": 2.0, "high": 2.0, "max_ratio": None}},
}


@pytest.mark.parametrize("name", WIDE)
def test_with_wide_bounds_it_is_the_clip(name):
    torch.testing.assert_close(updated(WIDE[name])[0], updated({})[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", UNCLIPPED)
def test_with_wide_bounds_it_is_the_unclipped_gradient(name):
    expected = updated({"trust_region": "none"})[0]
    torch.testing.assert_close(updated(UNCLIPPED[name])[0], expected, atol=1e-5, rtol=1e-4)
