"""Numbers of objectives of papers and libraries, by their presets, worked out by hand."""

import re

import pytest
import torch
from objective_updates import make_policy
from tensordict import TensorDict
from variants import SETTINGS

from groupwise.algorithms.losses import Counts, objective_data, policy_ratio, reference_kl
from groupwise.config.algorithm import ObjectiveCfg
from groupwise.functional.reduce import loss_weights
from groupwise.policies.base import Evaluation

# log-ratios of one episode of three steps and one of two: sums .2 and 1.5
LOG_RATIO = torch.tensor([[0.1, -0.2, 0.3], [1.2, 0.3, 0.0]])
MASK = torch.tensor([[True] * 3, [True, True, False]])


def objective(name):
    return ObjectiveCfg(**SETTINGS[name]["objective"])


def assert_near(found, expected):
    torch.testing.assert_close(found, torch.tensor(expected), atol=2e-6, rtol=0)


def batch(**more):
    keys = {"loss_mask": MASK, "episode_id": torch.tensor([[0, 0, 0], [1, 1, -1]]), "sample_log_prob": -LOG_RATIO}
    return TensorDict(keys | more, batch_size=[2, 3])


@pytest.mark.parametrize(
    ("name", "value", "gradient"),
    [
        ("verl_kl_mse", [0.005, 0.02, 0.045], [0.1, -0.2, 0.3]),
        ("verl_kl_abs", [0.1, 0.2, 0.3], [1.0, -1.0, 1.0]),
        ("verl_kl_k3_plus", [0.004837, 0.021403, 0.040818], [0.1, -0.2, 0.3]),
    ],
)
def test_kl_losses_of_verl(name, value, gradient):
    log_prob = LOG_RATIO[0].clone().requires_grad_()
    at = {"ref_log_prob": torch.zeros(3), "old_log_prob": log_prob.detach()}
    distance = reference_kl(SETTINGS[name]["kl_estimator"], make_policy(), Evaluation(log_prob, log_prob), at)
    assert_near(distance, value)
    distance.sum().backward()
    assert_near(log_prob.grad, gradient)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # e^.1 e^-.2 e^.3; e^1.2 is above 3
        ("tis_trl", [1.105171, 0.818731, 1.349859, 3.0, 1.349859]),
        ("tis", [1.105171, 0.818731, 1.349859, 2.0, 1.349859]),
        # e^.2, and e^1.5 = 4.48 is above 3
        ("sequence_tis", [1.221403, 1.221403, 1.221403, 3.0, 3.0]),
    ],
)
def test_importance_weights_are_truncated(name, expected):
    start = Evaluation(torch.zeros(2, 3), torch.zeros(2, 3))
    data = objective_data(objective(name), batch(), torch.ones(2, 3), batch()["loss_mask"], 2, lambda: start, seed=0)
    assert_near(data["policy_factor"][MASK], expected)


def test_one_ratio_for_each_turn():
    # turns of two steps: e^-.05 twice, e^.3; e^.75 twice
    turns = batch(turn_id=torch.tensor([[0, 0, 1], [0, 0, 0]]))
    cfg = objective("agilerl_turn_ratio")
    data = objective_data(cfg, turns, torch.ones(2, 3), turns["loss_mask"], 2, lambda: None, seed=0)
    at = {"loss_mask": MASK, "episode_id": turns["episode_id"], **data}
    ratio = policy_ratio(cfg, torch.zeros(2, 3), at, Counts(2, int(data["turn"].max()) + 1))
    assert_near(ratio[MASK], [0.951229, 0.951229, 1.349859, 2.117000, 2.117000])


def test_the_sum_over_a_length_is_no_mean_over_episodes():
    expected = {"dr_grpo_verl": 1 / 10, "dr_grpo": 1 / (2 * 10)}
    for name, each in expected.items():
        cfg = objective(name)
        weight = loss_weights(MASK, batch()["episode_id"], 2, cfg.aggregation.name, max_length=10)
        assert_near(weight[MASK], [each] * 5)


@pytest.mark.parametrize(("clip_high", "delta"), [(0.2, 1.1), (3.0, 4.0), (7.5, 4.0)])
def test_the_fix_of_a_bound_within_the_clip_is_accepted(clip_high, delta):
    choices = {"name": "two_sided", "clip_high": clip_high}
    with pytest.raises(ValueError, match=f"delta={delta} must exceed") as found:
        ObjectiveCfg(trust_region=choices | {"delta": delta})
    (fix,) = re.findall(r"fix: delta=([\d.]+)", str(found.value))
    assert ObjectiveCfg(trust_region=choices | {"delta": float(fix)}).trust_region.delta > 1 + clip_high
