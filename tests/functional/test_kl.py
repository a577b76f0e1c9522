import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Bernoulli, Categorical, Normal

from groupwise.algorithms.losses import absolute, k1, k2, k3, k3_plus
from groupwise.functional.kl import bernoulli_kl, categorical_kl, gaussian_kl

INF = math.inf


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # with d = log_prob - ref_log_prob: d/d log_prob is 1, d, 1 - e^-d, (of k2:) d, sgn d
        (k1, [0.1, -0.2, 0.0], [1.0, 1.0, 1.0]),
        (k2, [0.005, 0.02, 0.0], [0.1, -0.2, 0.0]),
        (k3, [0.004837, 0.021403, 0.0], [0.095163, -0.221403, 0.0]),
        (k3_plus, [0.004837, 0.021403, 0.0], [0.1, -0.2, 0.0]),
        (absolute, [0.1, 0.2, 0.0], [1.0, -1.0, 0.0]),
    ],
)
def test_values_and_gradients_by_hand(estimator, value, gradient):
    log_prob = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    out = estimator(log_prob, log_prob.detach() - torch.tensor([0.1, -0.2, 0.0]))
    torch.testing.assert_close(out, torch.tensor(value), rtol=0, atol=1e-6)
    out.sum().backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor(gradient), rtol=0, atol=1e-6)


@pytest.mark.parametrize("moved", [200.0, -200.0])
@pytest.mark.parametrize("estimator", [k1, k2, k3, k3_plus, absolute])
def test_estimators_of_distant_policies_are_finite(estimator, moved):
    log_prob = torch.tensor([-1.0], requires_grad=True)
    out = estimator(log_prob, log_prob.detach() + moved)
    out.sum().backward()
    assert out.isfinite().all()
    assert log_prob.grad.isfinite().all()


def test_k3_keeps_tiny_differences():
    # d = 1e-3: d^2 / 2 + d^3 / 6 = 5.0017e-7; exp(d) - 1 in float32 would be off by 6e-8
    out = k3(torch.tensor([0.0]), torch.tensor([1e-3]))
    torch.testing.assert_close(out, torch.tensor([5.0017e-7]), rtol=1e-3, atol=0)


def test_estimators_agree_with_the_exact_kl_in_the_mean():
    # KL((.5, .5) || (.8, .2)) = .5 log(.5/.8) + .5 log(.5/.2); the mean over p of each estimator, both actions weighing .5
    p, q = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.8, 0.2]).log()
    exact = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert k1(p, q).mean().item() == pytest.approx(exact, abs=1e-6)
    assert k3(p, q).mean().item() == pytest.approx(exact, abs=1e-6)


def test_categorical_kl_by_hand():
    # p = (1/2, 1/2), q = (3/4, 1/4): .5 log(2/3) + .5 log 2 = 0.143841; the logits are shifted by 5 and -3
    logits = torch.tensor([[0.5, 0.5]]).log() + 5
    other = torch.tensor([[0.75, 0.25]]).log() - 3
    torch.testing.assert_close(categorical_kl(logits, other), torch.tensor([0.143841]), rtol=0, atol=1e-5)
    # the other way round: .75 log 1.5 + .25 log .5 = 0.130812
    torch.testing.assert_close(categorical_kl(other, logits), torch.tensor([0.130812]), rtol=0, atol=1e-5)


def test_categorical_kl_of_excluded_actions():
    # the third action is excluded on both sides and adds nothing, in value and in gradient
    logits = torch.tensor([0.0, 0.0, -INF], requires_grad=True)
    other = torch.tensor([3.0, 1.0, 0.0]).log()
    kl = categorical_kl(logits, other)
    torch.testing.assert_close(kl, torch.tensor(0.143841), rtol=0, atol=1e-5)
    kl.backward()
    assert torch.isfinite(logits.grad).all()
    assert categorical_kl(other, logits.detach()).isfinite()
    assert categorical_kl(torch.zeros(2), torch.tensor([0.0, -INF])).item() == INF


def test_categorical_kl_of_an_action_whose_probability_underflows():
    assert categorical_kl(torch.tensor([0.0, -200.0]), torch.tensor([0.0, -INF])).item() == 0.0


def test_bernoulli_kl_by_hand():
    # coins p = (1/2, 1/2), q = (3/4, 1/2): 0.143841 + 0
    logits = torch.zeros(1, 2)
    other = torch.tensor([[math.log(3.0), 0.0]])
    torch.testing.assert_close(bernoulli_kl(logits, other), torch.tensor([0.143841]), rtol=0, atol=1e-5)
    torch.testing.assert_close(bernoulli_kl(other, logits), torch.tensor([0.130812]), rtol=0, atol=1e-5)


def test_bernoulli_kl_far_out_is_finite():
    # p = 1, q = sigmoid(-100): log(1 / q) = 100
    kl = bernoulli_kl(torch.tensor([200.0]), torch.tensor([-100.0]))
    torch.testing.assert_close(kl, torch.tensor(100.0))
    torch.testing.assert_close(bernoulli_kl(torch.tensor([-200.0]), torch.tensor([100.0])), torch.tensor(100.0))


@pytest.mark.parametrize("certain", [INF, -INF])
def test_bernoulli_kl_of_a_certain_coin(certain):
    # one side adds log(1 / .5), the other, whose chance is 0, nothing
    kl = bernoulli_kl(torch.tensor([certain]), torch.tensor([0.0]))
    torch.testing.assert_close(kl, torch.tensor(math.log(2)))


def test_gaussian_kl_by_hand():
    # s_p 1, s_q 2, means 1 and 3: log 2 + (1 + 4) / 8 - 1/2 = 0.818147; plus an equal dimension
    mean, other_mean = torch.tensor([[1.0, 0.5]]), torch.tensor([[3.0, 0.5]])
    log_std, other_log_std = torch.tensor([[0.0, 0.3]]), torch.tensor([[math.log(2.0), 0.3]])
    out = gaussian_kl(mean, log_std, other_mean, other_log_std)
    torch.testing.assert_close(out, torch.tensor([0.818147]), rtol=0, atol=1e-5)


def test_gaussian_kl_takes_deviations_that_all_states_share():
    mean, shared = torch.zeros(3, 4, 2), torch.zeros(2)
    # distance (1^2 + 1^2) / 2
    assert torch.equal(gaussian_kl(mean, shared, mean + 1, shared), torch.ones(3, 4))


def test_gaussian_kl_of_nearly_equal_ones_does_not_cancel():
    # log_std differs by d = 1e-3: (exp(2d) - 1 - 2d) / 2 = d^2 + 2 d^3 / 3 = 1.00067e-6
    zero = torch.zeros(1)
    out = gaussian_kl(zero, torch.tensor([1e-3]), zero, zero)
    torch.testing.assert_close(out, torch.tensor(1.00067e-6), rtol=2e-3, atol=0)


@settings(deadline=None)
@given(seed=st.integers(0, 2**31 - 1), scale=st.floats(0.01, 10))
def test_exact_kl_is_zero_for_equals_and_positive_otherwise(seed, scale):
    torch.manual_seed(seed)
    a, b, c, d = torch.randn(4, 5, 3, dtype=torch.float64) * scale
    for kl in (categorical_kl, bernoulli_kl):
        assert kl(a, a).abs().max() < 1e-12
        assert (kl(a, b) > 0).all()
    assert gaussian_kl(a, b / scale, a, b / scale).abs().max() < 1e-12
    assert (gaussian_kl(a, b / scale, c, d / scale) > 0).all()
    assert categorical_kl(a, a + 7).abs().max() < 1e-12


def test_exact_kl_agrees_with_sampling():
    torch.manual_seed(0)
    a, b, c, d = torch.randn(4, 1, 3) * 0.5
    pairs = [
        (categorical_kl(a, b), Categorical(logits=a), Categorical(logits=b)),
        (bernoulli_kl(a, b), Bernoulli(logits=a), Bernoulli(logits=b)),
        (gaussian_kl(a, b, c, d), Normal(a, b.exp()), Normal(c, d.exp())),
    ]
    for exact, p, q in pairs:
        sample = p.sample((200_000,))
        estimate = (p.log_prob(sample) - q.log_prob(sample)).reshape(200_000, -1).sum(dim=1)
        assert abs(estimate.mean() - exact) < 5 * estimate.std() / math.sqrt(200_000)


def test_k3_of_one_improbable_step_does_not_overflow():
    log_prob = torch.tensor([-100.0], dtype=torch.float64, requires_grad=True)
    out = k3(log_prob, torch.zeros(1, dtype=torch.float64))
    # e^20 - 20 - 1, and beyond the bound it is flat
    torch.testing.assert_close(out, torch.tensor([485165174.4097903], dtype=torch.float64), rtol=1e-12, atol=0)
    out.sum().backward()
    assert log_prob.grad.item() == 0.0
