"""Ratios, the clip and the value loss: numbers by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_calls import (
    clip_loss,
    dual_clip_loss,
    sequence_product_ratio,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
    turn_ratio,
    unclipped_loss,
)

from groupwise.algorithms.losses import value_loss
from groupwise.functional.reduce import loss_weights

NAN = float("nan")
LOG_RATIO = torch.tensor([0.1, -0.2, 0.3])
OLD = torch.tensor([-1.0, -2.0, -0.5])
ON = torch.ones(3, dtype=torch.bool)
FIRST = torch.zeros(3, dtype=torch.long)
SEQUENCE_RATIOS = [sequence_ratio, sequence_token_ratio, sequence_product_ratio]


def assert_near(out, expected):
    torch.testing.assert_close(out, torch.as_tensor(expected), rtol=0, atol=2e-6)


def test_token_ratio_golden():
    assert_near(token_ratio(OLD + LOG_RATIO, OLD), [1.105171, 0.818731, 1.349859])


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(sequence_ratio, 1.068939), (sequence_token_ratio, 1.068939), (sequence_product_ratio, 1.221403)],
)
def test_sequence_ratios_golden(ratio, expected):
    assert_near(ratio(OLD + LOG_RATIO, OLD, ON, FIRST, 1), [expected] * 3)


@pytest.mark.parametrize("ratio", SEQUENCE_RATIOS)
def test_sequence_ratios_follow_episodes_not_rows(ratio):
    # the golden episode, spread over two rows among masked-out garbage, and another that moved by 0.4 in one element
    log_prob = torch.tensor([[0.1, NAN, -0.2, 0.4], [0.3, 9.0, -math.inf, 5.0]], requires_grad=True)
    mask = torch.tensor([[True, False, True, True], [True, False, False, True]])
    episode_id = torch.tensor([[0, 0, 0, 1], [0, 1, -1, -1]])
    out = ratio(log_prob, torch.zeros(2, 4), mask, episode_id, 2)
    moved = 1.221403 if ratio is sequence_product_ratio else 1.068939
    assert_near(out.detach(), [[moved, 1.0, moved, 1.491825], [moved, 1.0, 1.0, 1.0]])
    out.sum().backward()
    assert log_prob.grad.isfinite().all()
    assert not log_prob.grad[~mask].any()


def test_with_the_ids_of_turns_the_sequence_ratio_is_that_of_turns():
    # an episode of two turns: x = .1, -.3 with mean -.1, and .4 alone
    turn = torch.tensor([0, 0, 1])
    out = turn_ratio(OLD + torch.tensor([0.1, -0.3, 0.4]), OLD, ON, turn, 2)
    assert_near(out, [0.904837, 0.904837, 1.491825])


def test_gradients_of_sequence_ratios():
    """d/d log_prob_1 of 3 equal entries s is 3 s/3 for the mean, s for one's own element alone, 3 s for the product."""
    for ratio, of_middle_entry, of_all in [
        (sequence_ratio, [1.068939 / 3] * 3, [1.068939] * 3),
        (sequence_token_ratio, [0.0, 1.068939, 0.0], [1.068939] * 3),
        (sequence_product_ratio, [1.221403] * 3, [3 * 1.221403] * 3),
    ]:
        for entries, expected in [([1], of_middle_entry), ([0, 1, 2], of_all)]:
            log_prob = (OLD + LOG_RATIO).requires_grad_()
            ratio(log_prob, OLD, ON, FIRST, 1)[entries].sum().backward()
            assert_near(log_prob.grad, expected)


@pytest.mark.parametrize("ratio", SEQUENCE_RATIOS)
def test_sequence_ratio_of_an_empty_mask_is_one(ratio):
    out = ratio(torch.full((3,), NAN), OLD, ~ON, FIRST, 1)
    assert out.tolist() == [1.0, 1.0, 1.0]


@settings(deadline=None)
@given(seed=st.integers(0, 2**31 - 1))
def test_an_unchanged_policy_has_ratio_exactly_one(seed):
    torch.manual_seed(seed)
    log_prob, mask, ids = -torch.rand(5, 7) * 9, torch.rand(5, 7) < 0.8, torch.randint(-1, 3, (5, 7))
    assert torch.equal(token_ratio(log_prob, log_prob), torch.ones(5, 7))
    for ratio in SEQUENCE_RATIOS:
        assert torch.equal(ratio(log_prob, log_prob, mask, ids, 3), torch.ones(5, 7))


@pytest.mark.parametrize("moved", [150.0, -150.0])
def test_a_ratio_that_would_overflow_is_bounded_and_so_is_its_gradient(moved):
    advantage = torch.tensor([1.0, 0.0, -1.0])
    for ratio in [lambda x: token_ratio(x, OLD), *(lambda x, r=r: r(x, OLD, ON, FIRST, 1) for r in SEQUENCE_RATIOS)]:
        log_prob = (OLD + moved).requires_grad_()
        clip_loss(ratio(log_prob), advantage, 0.2, 0.2).sum().backward()
        assert log_prob.grad.isfinite().all()
    assert token_ratio(OLD + 150, OLD)[0].item() == pytest.approx(math.exp(20))
    assert token_ratio(OLD + 19.5, OLD)[0].item() == pytest.approx(math.exp(19.5), rel=1e-4)


RATIO = torch.tensor([1.105171, 0.818731, 1.349859])


@pytest.mark.parametrize(
    ("advantage", "clip_high", "objective"),
    [
        (1.0, 0.2, [1.105171, 0.818731, 1.2]),
        (1.0, 0.28, [1.105171, 0.818731, 1.28]),
        (-1.0, 0.2, [-1.105171, -0.818731, -1.349859]),
        (-1.0, 0.28, [-1.105171, -0.818731, -1.349859]),
        (2.0, 0.2, [2.210342, 1.637462, 2.4]),
    ],
)
def test_clip_loss_golden(advantage, clip_high, objective):
    assert_near(clip_loss(RATIO, torch.full((3,), advantage), 0.2, clip_high), [-x for x in objective])


@pytest.mark.parametrize(("ratio", "plain", "dual"), [(6.0, -6.0, -3.0), (0.5, -0.8, -0.8), (2.0, -2.0, -2.0)])
def test_losses_of_bad_actions_golden(ratio, plain, dual):
    ratio, bad = torch.tensor([ratio]), torch.tensor([-1.0])
    assert_near(clip_loss(ratio, bad, 0.2, 0.2), [-plain])
    assert_near(dual_clip_loss(ratio, bad, 0.2, 0.2, 3.0), [-dual])


def test_dual_clip_bound_is_in_units_of_the_advantage():
    # A = -2: ratio 6 costs 12, held at 3 * 2
    assert_near(dual_clip_loss(torch.tensor([6.0]), torch.tensor([-2.0]), 0.2, 0.2, 3.0), [6.0])


def test_each_side_has_its_own_clip():
    # at ratio .5 and a bad action the objective stops at 1 - clip_low, whatever clip_high is
    bad = torch.tensor([-1.0])
    assert_near(clip_loss(torch.tensor([0.5]), bad, 0.1, 0.4), [0.9])
    assert_near(clip_loss(torch.tensor([2.0]), -bad, 0.1, 0.4), [-1.4])


@settings(deadline=None)
@given(ratio=st.floats(0, 50, width=32), advantage=st.floats(0, 5, width=32))
def test_dual_clip_leaves_good_actions_to_the_clip(ratio, advantage):
    args = (torch.tensor([ratio]), torch.tensor([advantage]), 0.2, 0.28)
    assert torch.equal(dual_clip_loss(*args, 3.0), clip_loss(*args))


def test_gradient_stops_only_where_moving_on_would_gain():
    # d loss / d ratio is -A, and 0 for a good action above the clip or a bad one below it
    for advantage, expected in [(1.0, [-1.0, -1.0, -1.0, 0.0]), (-1.0, [0.0, 1.0, 1.0, 1.0])]:
        ratio = torch.tensor([0.5, 1.0, 1.1, 1.5], requires_grad=True)
        clip_loss(ratio, torch.full((4,), advantage), 0.2, 0.2).sum().backward()
        assert ratio.grad.tolist() == expected


def test_dual_clip_has_no_gradient_beyond_its_bound():
    ratio = torch.tensor([2.0, 6.0], requires_grad=True)
    dual_clip_loss(ratio, torch.tensor([-1.0, -1.0]), 0.2, 0.2, 3.0).sum().backward()
    assert ratio.grad.tolist() == [1.0, 0.0]


def test_unclipped_loss_by_hand():
    out = unclipped_loss(torch.tensor([2.0, 0.5]), torch.tensor([-3.0, 4.0]))
    assert out.tolist() == [6.0, -2.0]


def test_a_loss_of_zero_still_trains():
    """At ratio 1 advantages that sum to 0 give loss 0, but not gradient 0."""
    log_prob = OLD[:2].clone().requires_grad_()
    loss = clip_loss(token_ratio(log_prob, OLD[:2]), torch.tensor([1.0, -1.0]), 0.2, 0.2).sum()
    loss.backward()
    assert loss.item() == 0.0
    assert log_prob.grad.tolist() == [-1.0, 1.0]


def test_sequence_loss_weighs_every_element_of_an_episode_alike():
    # GSPO: s_i A_i averaged over two episodes of 3 and 1 elements, A = 2 and -1: -(2 * 1.068939 - 1.491825) / 2
    log_prob, ids = torch.cat([LOG_RATIO, torch.tensor([0.4])]), torch.tensor([0, 0, 0, 1])
    mask = torch.ones(4, dtype=torch.bool)
    ratio = sequence_ratio(log_prob, torch.zeros(4), mask, ids, 2)
    term = unclipped_loss(ratio, torch.tensor([2.0, 2.0, 2.0, -1.0]))
    loss = (loss_weights(mask, ids, 2, "seq_mean_token_mean") * term).sum()
    assert_near(loss, -(2 * 1.068939 - 1.491825) / 2)


def test_value_loss_has_no_half():
    assert value_loss(torch.tensor([1.0, 5.0]), torch.tensor([3.0, 4.0])).tolist() == [4.0, 1.0]


@pytest.mark.parametrize(
    ("value", "target", "expected"),
    [
        (3.0, 4.0, 2.5**2),  # held at 1.5: error 2.5, more than 1
        (-1.0, 4.0, 5.0**2),  # held at .5: error 3.5, less than the raw 5
        (-1.0, -2.0, 2.5**2),  # held at .5: error 2.5, more than 1
        (1.2, 4.0, 2.8**2),  # within the clip: raw
        (0.8, 0.0, 0.8**2),
    ],
)
def test_clipped_value_loss_takes_the_greater_error(value, target, expected):
    out = value_loss(torch.tensor([value]), torch.tensor([target]), torch.tensor([1.0]), 0.5)
    assert_near(out, [expected])
