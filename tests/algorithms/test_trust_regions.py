"""Trust regions beyond the clip: numbers by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_calls import (
    cispo_loss,
    clip_cov_loss,
    clip_loss,
    dppo_keeps,
    dppo_loss,
    dual_clip_loss,
    gmpo_loss,
    kl_cov_loss,
    reinforce_loss,
    sapo_loss,
    sequence_ratio,
    token_ratio,
    two_sided_loss,
    unclipped_loss,
    vespo_loss,
)

NAN = float("nan")
LOG_RATIO = torch.tensor([0.1, -0.2, 0.3])
RATIO = torch.tensor([1.105171, 0.818731, 1.349859])
OLD = torch.tensor([-1.0, -2.0, -0.5])
ON = torch.ones(3, dtype=torch.bool)
OFF = ~ON
ONE = torch.zeros(3, dtype=torch.long)
GOOD, BAD = torch.ones(3), -torch.ones(3)
VESPO = {"positive": (2.0, 3.0), "negative": (3.0, 2.0)}


def assert_near(out, expected):
    torch.testing.assert_close(out, torch.as_tensor(expected), rtol=1e-6, atol=2e-6)


def gradient(loss_of, x):
    x = torch.as_tensor(x).clone().requires_grad_()
    loss_of(x).sum().backward()
    return x.grad


@pytest.mark.parametrize(("ratio", "expected"), [(6.0, 4.0), (0.5, 0.8), (3.0, 3.0)])
def test_two_sided_bounds_bad_actions_golden(ratio, expected):
    bad = torch.tensor([-1.0])
    assert_near(two_sided_loss(torch.tensor([ratio]), bad, 0.2, 0.2, 4.0), [expected])
    assert_near(two_sided_loss(torch.tensor([ratio]), 2 * bad, 0.2, 0.2, 4.0), [2 * expected])


@pytest.mark.parametrize(
    "function",
    [
        lambda r, a: two_sided_loss(r, a, 0.1, 0.4, 9.0),
        lambda r, a: dual_clip_loss(r, a, 0.1, 0.4, 9.0),
        lambda r, a: clip_cov_loss(r, a, OFF[:2], 0.1, 0.4),
    ],
)
def test_each_side_of_the_clip_has_its_own_bound(function):
    # a bad action stops at .9, a good one at 1.4
    assert_near(function(torch.tensor([0.5, 2.0]), torch.tensor([-1.0, 1.0])), [0.9, -1.4])


def test_clip_cov_leaves_out_what_is_chosen():
    # the rest is clipped at 1.2
    out = clip_cov_loss(RATIO, GOOD, torch.tensor([True, False, False]), 0.2, 0.2)
    assert_near(out, [0.0, -0.818731, -1.2])


def test_two_sided_has_no_gradient_beyond_its_bound():
    assert gradient(lambda r: two_sided_loss(r, BAD[:2], 0.2, 0.2, 4.0), [3.0, 6.0]).tolist() == [1.0, 0.0]


@given(ratio=st.floats(0, 50, width=32), advantage=st.floats(-5, 5, width=32))
def test_two_sided_is_the_clip_for_good_actions_and_under_a_wide_bound(ratio, advantage):
    r, a = torch.tensor([ratio]), torch.tensor([advantage])
    assert torch.equal(two_sided_loss(r, a.abs(), 0.2, 0.28, 4.0), clip_loss(r, a.abs(), 0.2, 0.28))
    assert torch.equal(two_sided_loss(r, a, 0.2, 0.28, 51.0), clip_loss(r, a, 0.2, 0.28))


def test_reinforce_by_hand():
    assert reinforce_loss(torch.tensor([-2.0, -0.5]), torch.tensor([3.0, -4.0])).tolist() == [6.0, -2.0]
    assert gradient(lambda x: reinforce_loss(x, torch.tensor([3.0, -4.0])), [-2.0, -0.5]).tolist() == [-3.0, 4.0]


@pytest.mark.parametrize(
    ("low", "high", "weights"),
    [
        (None, 5.0, [0.5, 1.0, 3.0, 5.0]),  # TRL
        (0.8, 1.2, [0.8, 1.0, 1.2, 1.2]),  # verl
        (None, 1.2, [0.5, 1.0, 1.2, 1.2]),  # AgileRL
        (None, None, [0.5, 1.0, 3.0, 6.0]),
        (0.8, None, [0.8, 1.0, 3.0, 6.0]),
    ],
)
def test_cispo_weights_of_the_libraries(low, high, weights):
    # advantage 2 and log-probability -1: the loss is twice the weight, its gradient minus twice; no step loses it
    ratio, two = torch.tensor([0.5, 1.0, 3.0, 6.0]), torch.full((4,), 2.0)
    assert_near(cispo_loss(-torch.ones(4), ratio, two, low, high), [2 * w for w in weights])
    assert_near(gradient(lambda x: cispo_loss(x, ratio, two, low, high), -torch.ones(4)), [-2 * w for w in weights])


def test_the_weight_of_cispo_is_a_constant():
    # -sg(r) A logp at r = e^.1, A = 1: -1.105171; through the ratio it would be -1.105171 * (1 + logp) = 0 at logp = -1
    assert_near(
        gradient(lambda x: cispo_loss(x, token_ratio(x, x.detach() - 0.1), GOOD[:1], None, 5.0), [-1.0]), [-1.105171]
    )


@pytest.mark.parametrize(
    ("log_ratio", "good", "bad"),
    [
        # w = e^.2: w^2 e^(3(1-w)) = 1.491825 * .514680, and w^3 e^(2(1-w)) = 1.822119 * .642232
        (0.2, 0.767814, 1.170223),
        # w = e^-.5 = .606531: .367879 * 3.255694, and .223130 * 2.196663
        (-0.5, 1.197706, 0.490141),
        (0.0, 1.0, 1.0),
    ],
)
def test_vespo_weights_by_hand(log_ratio, good, bad):
    ratio, log_prob = torch.tensor([log_ratio] * 3).exp(), torch.tensor([-1.0, 0.0, -2.0])
    assert_near(vespo_loss(log_prob, ratio, torch.tensor([2.0, 0.0, -3.0]), **VESPO), [2 * good, 0.0, -6 * bad])
    grad = gradient(lambda x: vespo_loss(x, ratio, torch.tensor([2.0, 0.0, -3.0]), **VESPO), log_prob)
    assert_near(grad, [-2 * good, 0.0, 3 * bad])


def test_the_weight_of_vespo_is_a_constant():
    # -sg(1) A logp at w = 1, A = 1: -1; through the weight, which changes by 2 - 3 with log w, it would be -2 at logp = -1
    assert_near(gradient(lambda x: vespo_loss(x, token_ratio(x, x.detach()), GOOD[:1], **VESPO), [-1.0]), [-1.0])


def test_the_sign_of_the_advantage_chooses_vespos_weight_not_its_size():
    # at w = e^.2 a good action's weight is .767814 and a bad one's 1.170223, see above
    ratio = torch.tensor([0.2, 0.2]).exp()
    assert_near(
        vespo_loss(torch.tensor([-1.0, -1.0]), ratio, torch.tensor([0.01, -0.01]), **VESPO), [0.00767814, -0.01170223]
    )


@pytest.mark.parametrize("log_ratio", [-100.0, 20.0])
def test_vespo_weights_fade_to_zero_on_both_sides(log_ratio):
    ratio = torch.tensor([log_ratio]).exp()
    for advantage in (GOOD[:1], BAD[:1]):
        grad = gradient(lambda x, a=advantage: vespo_loss(x, ratio, a, **VESPO), [-1.0])
        assert grad.abs().item() < 1e-10
    # w is held at 1e-8: with power 0 the weight is e^(3(1 - 1e-8)), with power -1 it would be 1e8 times it
    held = vespo_loss(torch.tensor([-1.0]), torch.zeros(1), GOOD[:1], positive=(0.5, 3.0), negative=(0.5, 3.0))
    assert_near(held, [1e-4 * math.exp(3)])


@pytest.mark.parametrize(
    ("advantage", "objective"), [(1.0, [2.105074, 1.819225, 2.346333]), (-1.0, [-2.009826, -1.724038, -2.250739])]
)
def test_sapo_golden(advantage, objective):
    assert_near(sapo_loss(RATIO, torch.full((3,), advantage), 1.0, 1.05), [-x for x in objective])


def test_the_sign_of_the_advantage_chooses_sapos_temperature_not_its_size():
    # (4 / tau) sigmoid(tau (r - 1)) at r = 1.105171 is 2.105074 of a good action and 2.009826 of a bad one, see above
    out = sapo_loss(RATIO[[0, 0]], torch.tensor([0.01, -0.01]), 1.0, 1.05)
    assert_near(out, [-0.02105074, 0.02009826])


def test_sapo_gradient_fades_on_both_sides():
    # 4 s (1 - s) with s = sigmoid(tau (r - 1)); at r = .5, 1, 2: .940015, 1, .786448 (tau 1); .934140, 1, .768110 (1.05)
    ratio = [0.5, 1.0, 2.0]
    assert_near(gradient(lambda r: sapo_loss(r, GOOD, 1.0, 1.05), ratio), [-0.940015, -1.0, -0.786448])
    assert_near(gradient(lambda r: sapo_loss(r, BAD, 1.0, 1.05), ratio), [0.934140, 1.0, 0.768110])


@pytest.mark.parametrize(("advantage", "objective"), [(1.0, 1.033895), (-1.0, -1.068939)])
def test_gmpo_golden(advantage, objective):
    # A = 1: u = .1, -.2, .2; A = -1: u = .1, -.2, .3
    out = gmpo_loss(OLD + LOG_RATIO, OLD, torch.full((3,), advantage), ON, ONE, 1, 0.2, 0.2)
    assert_near(out, [-objective] * 3)


def test_gmpo_clips_each_side_by_its_own_bound():
    # A = -1 and x = -.5, .1: held at -.3, mean -.1; A = 1 and x = .5, -.9: held at .1, mean -.4
    ids, on = torch.tensor([0, 0, 1, 1]), torch.ones(4, dtype=torch.bool)
    moved, advantage = torch.tensor([-0.5, 0.1, 0.5, -0.9]), torch.tensor([-1.0, -1.0, 1.0, 1.0])
    out = gmpo_loss(moved, torch.zeros(4), advantage, on, ids, 2, 0.3, 0.1)
    assert_near(out, [0.904837, 0.904837, -0.670320, -0.670320])  # e^-.1, e^-.4


def test_gmpo_gradient_by_hand():
    # the loss of each of 3 elements is -e^(.1/3); the clipped third has no gradient, the others 3 * -1.033895 / 3
    grad = gradient(lambda x: gmpo_loss(x, OLD, GOOD, ON, ONE, 1, 0.2, 0.2), OLD + LOG_RATIO)
    assert_near(grad, [-1.033895, -1.033895, 0.0])


def test_gmpo_follows_episodes_and_leaves_the_masked_out():
    mask = torch.tensor([True, False, True, True])
    log_prob, old = torch.tensor([0.1, NAN, 0.2, 9.0]), torch.zeros(4)
    grad = gradient(
        lambda x: gmpo_loss(x, old, torch.ones(4), mask, torch.tensor([0, 0, 0, -1]), 1, 0.5, 0.5)[mask], log_prob
    )
    assert_near(grad, [-math.exp(0.15)] * 1 + [0.0] + [-math.exp(0.15), 0.0])  # two elements of weight e^.15 / 2 each


def test_gmpo_steps_without_advantage_count_as_unmoved():
    advantage = torch.tensor([1.0, 0.0])
    out = gmpo_loss(torch.tensor([0.2, 5.0]), torch.zeros(2), advantage, ON[:2], ONE[:2], 1, 0.4, 0.4)
    assert_near(out, [-math.exp(0.1), 0.0])


def test_gmpo_with_a_wide_clip_is_the_sequence_ratio():
    advantage = torch.tensor([2.0, -1.0, 0.5])
    wide = gmpo_loss(OLD + LOG_RATIO, OLD, advantage, ON, ONE, 1, 9.0, 9.0)
    assert_near(wide, unclipped_loss(sequence_ratio(OLD + LOG_RATIO, OLD, ON, ONE, 1), advantage))


def test_kl_cov_by_hand():
    # -r A + 2 |log r| on the first and last; d/d logp: -r A + 2 sgn(log r)
    held = torch.tensor([True, False, True])
    out = kl_cov_loss(OLD + LOG_RATIO, OLD, RATIO, torch.tensor([1.0, 1.0, -1.0]), held, 2.0)
    assert_near(out, [-1.105171 + 0.2, -0.818731, 1.349859 + 0.6])

    def loss(x):
        return kl_cov_loss(x, OLD, token_ratio(x, OLD), torch.tensor([1.0, 1.0, -1.0]), held, 2.0)

    assert_near(gradient(loss, OLD + LOG_RATIO), [-1.105171 + 2, -0.818731, 1.349859 + 2])
    assert_near(gradient(loss, OLD + torch.tensor([-0.1, 0.0, 0.0]))[:2], [-0.904837 - 2, -1.0])
    # nothing is pulled at ratio 1
    assert_near(gradient(loss, OLD), [-1.0, -1.0, 1.0])


def test_kl_cov_holds_nothing_without_a_mask():
    assert torch.equal(kl_cov_loss(OLD + LOG_RATIO, OLD, RATIO, BAD, OFF, 1.0), unclipped_loss(RATIO, BAD))


@pytest.mark.parametrize(
    ("now", "advantage", "tv", "kl"),
    [
        # from q = .5. KL: to .6 or .4 .020411, to .7 or .3 .087177 (.5 ln(.5/.7) + .5 ln(.5/.3))
        (0.6, 1.0, True, True),
        (0.7, 1.0, False, False),
        (0.3, 1.0, True, True),  # moved against its advantage: may come back
        (0.4, -1.0, True, True),
        (0.3, -1.0, False, False),
        (0.7, -1.0, True, True),
        (0.5, 1.0, True, True),
        (0.5, -1.0, True, True),
        (0.7, 0.0, True, True),
        (0.3, 0.0, False, False),
    ],
)
def test_dppo_drops_what_would_move_further_away(now, advantage, tv, kl):
    args = torch.tensor([now]).log(), torch.tensor([0.5]).log(), torch.tensor([advantage])
    assert dppo_keeps(*args, "tv", 0.15, 0.15).item() is tv
    assert dppo_keeps(*args, "kl", 0.05, 0.05).item() is kl


def test_dppo_distances_by_hand():
    # from .2: tv to .3 is .1, to .05 is .15; KL(q || p) to .3 is .2 ln(2/3) + .8 ln(8/7) = .025732
    start, up, down = (torch.tensor([p]).log() for p in (0.2, 0.3, 0.05))
    for bound, kept in [(0.0999, False), (0.1001, True)]:
        assert dppo_keeps(up, start, GOOD[:1], "tv", 9.0, bound).item() is kept
    for bound, kept in [(0.1499, False), (0.1501, True)]:
        assert dppo_keeps(down, start, BAD[:1], "tv", bound, 9.0).item() is kept
    for bound, kept in [(0.0257, False), (0.0258, True)]:
        assert dppo_keeps(up, start, GOOD[:1], "kl", 9.0, bound).item() is kept
    # to .05: .2 ln 4 + .8 ln(.8 / .95) = .139779
    for bound, kept in [(0.1397, False), (0.1399, True)]:
        assert dppo_keeps(down, start, BAD[:1], "kl", bound, 9.0).item() is kept


def test_dppo_keeps_what_moved_just_as_far_as_the_bound():
    # from 0 to 1 and from 1 to 0 the distance is exactly 1
    never, always = torch.tensor([-math.inf]), torch.tensor([0.0])
    for bound, kept in [(1.0, True), (0.999, False)]:
        assert dppo_keeps(always, never, GOOD[:1], "tv", 9.0, bound).item() is kept
        assert dppo_keeps(never, always, BAD[:1], "tv", bound, 9.0).item() is kept


def test_dppo_distances_from_and_to_certainty():
    # KL(q || p) from 1 to .5: ln 2 = .693147; from .5 to 1, whose other side counts as 2^-23: .5 ln .5 + .5 * 22 ln 2
    certain, even = torch.tensor([0.0]), torch.tensor([0.5]).log()
    for bound, kept in [(0.6931, False), (0.6932, True)]:
        assert dppo_keeps(even, certain, BAD[:1], "kl", bound, 99.0).item() is kept
    for bound, kept in [(7.277, False), (7.279, True)]:
        assert dppo_keeps(certain, even, GOOD[:1], "kl", 99.0, bound).item() is kept


def test_dppo_at_certainty_is_finite():
    certain, even = torch.tensor([0.0]), torch.tensor([0.5]).log()
    assert not dppo_keeps(certain, even, GOOD[:1], "kl", 0.05, 0.05).item()
    assert dppo_keeps(certain, certain, GOOD[:1], "kl", 0.05, 0.05).item()


def test_dppo_loss_by_hand():
    # A = 2, logp = -1: twice the ratio, which counts as at most 20
    ratio, keeps = torch.tensor([1.5, 30.0, 1.5]), torch.tensor([True, True, False])
    two, log_prob = torch.full((3,), 2.0), torch.full((3,), -1.0)
    assert_near(dppo_loss(log_prob, ratio, two, keeps, 20.0), [3.0, 40.0, 0.0])
    assert_near(gradient(lambda x: dppo_loss(x, ratio, two, keeps, 20.0), log_prob), [-3.0, -40.0, 0.0])
    assert_near(dppo_loss(log_prob, ratio, two, keeps, None), [3.0, 60.0, 0.0])


@pytest.mark.parametrize("moved", [150.0, -150.0])
def test_losses_and_gradients_stay_finite_however_far_the_policy_moved(moved):
    advantage = torch.tensor([1.0, 0.0, -1.0])
    losses = [
        lambda x: two_sided_loss(token_ratio(x, OLD), advantage, 0.2, 0.2, 4.0),
        lambda x: cispo_loss(x, token_ratio(x, OLD), advantage, None, None),
        lambda x: sapo_loss(token_ratio(x, OLD), advantage, 1.0, 1.05),
        lambda x: gmpo_loss(x, OLD, advantage, ON, ONE, 1, 200.0, 200.0),
        lambda x: vespo_loss(x, token_ratio(x, OLD), advantage, **VESPO),
        lambda x: kl_cov_loss(x, OLD, token_ratio(x, OLD), advantage, ON, 1.0),
        lambda x: dppo_loss(x, token_ratio(x, OLD), advantage, dppo_keeps(x, OLD, advantage, "kl", 1.0, 1.0), 20.0),
    ]
    for loss in losses:
        x = (OLD + moved).requires_grad_()
        out = loss(x)
        out.sum().backward()
        assert out.isfinite().all()
        assert x.grad.isfinite().all()
