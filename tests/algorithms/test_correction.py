"""Corrections of the sampler: numbers by hand."""

import math

import pytest
import torch
from loss_calls import corrected, off_policy_keeps

NAN = float("nan")
OLD = torch.tensor([-1.0, -2.0, -0.5, -1.0])
# ratios 2, 1/2, 4 in the first episode, 1/4 in the second
SAMPLED = OLD - torch.tensor([2.0, 0.5, 4.0, 0.25]).log()
ON = torch.ones(4, dtype=torch.bool)
IDS = torch.tensor([0, 0, 0, 1])


def assert_near(out, expected):
    torch.testing.assert_close(out, torch.as_tensor(expected), rtol=1e-5, atol=0)


def test_weights_by_hand():
    wide = {"high": 1e9}
    assert_near(corrected("tis", OLD, SAMPLED, **wide), [2.0, 0.5, 4.0, 0.25])
    wide["level"] = "sequence"
    assert_near(corrected("tis", OLD, SAMPLED, ON, IDS, 2, **wide), [4.0, 4.0, 4.0, 0.25])  # 2 * 1/2 * 4
    mask = torch.tensor([True, False, True, True])
    sampled = SAMPLED.masked_fill(~mask, NAN)
    assert_near(corrected("tis", OLD, sampled, mask, IDS, 2, **wide), [8.0, 1.0, 8.0, 0.25])


def test_truncating_and_masking_by_hand():
    old, sampled = torch.tensor([2.0, 0.5, 4.0, 0.25, 2.99]).log(), torch.zeros(5)
    assert_near(corrected("tis", old, sampled, high=3.0), [2.0, 0.5, 3.0, 0.25, 2.99])
    assert_near(corrected("mis", old, sampled, low=0.4, high=3.0), [2.0, 0.5, 0.0, 0.0, 2.99])
    assert_near(corrected("mis", old, sampled, high=3.0), [2.0, 0.5, 0.0, 0.25, 2.99])


def test_bounds_are_inclusive():
    assert corrected("mis", torch.zeros(2), torch.zeros(2), low=1.0, high=1.0).tolist() == [1.0, 1.0]
    assert corrected("mis", torch.zeros(2), torch.zeros(2), high=1.0).tolist() == [1.0, 1.0]


def test_weights_have_no_gradient_and_no_overflow():
    old = (OLD + 500).requires_grad_()
    for level in ("token", "sequence"):
        weight = corrected("tis", old, SAMPLED, ON, IDS, 2, level=level, high=1e30)
        assert not weight.requires_grad
        assert weight.isfinite().all()
        assert corrected("mis", old, SAMPLED, ON, IDS, 2, level=level, low=0.5, high=5.0).tolist() == [0.0] * 4


@pytest.mark.parametrize(("limit", "kept"), [(0.4, False), (0.41, False), (0.43, True)])
def test_bad_episodes_that_the_policy_has_left_behind_are_dropped(limit, kept):
    # sampled - now: 1.2, .04, .01 in the first episode, mean .41667; -3 in the second
    now = torch.tensor([-1.0, -2.0, -3.0, -4.0])
    sampled = now + torch.tensor([1.2, 0.04, 0.01, -3.0])
    advantage = torch.tensor([-1.0, -2.0, 0.5, -1.0])
    out = off_policy_keeps(now, sampled, advantage, ON, IDS, 2, limit)
    assert out.tolist() == [kept, kept, True, True]


def test_no_advantage_and_a_distance_at_the_limit_are_kept():
    sampled, advantage = torch.tensor([2.0, 2.0, 2.0, 0.5]), torch.tensor([0.0, -1.0, 0.0, -1.0])
    out = off_policy_keeps(torch.zeros(4), sampled, advantage, ON, IDS, 2, 0.5)
    assert out.tolist() == [True, False, True, True]


def test_the_masked_out_do_not_count_as_left_behind():
    mask = torch.tensor([True, False, True, True])
    sampled = torch.tensor([0.2, 900.0, 0.2, NAN])
    out = off_policy_keeps(torch.zeros(4), sampled, -torch.ones(4), mask, torch.tensor([0, 0, 0, -1]), 1, 0.3)
    assert out[mask & (IDS == 0)].all()
    assert math.isnan(sampled[3])
