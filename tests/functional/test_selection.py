import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.functional.reduce import (
    covariance,
    element_noise,
    explained_variance,
    highest,
    kth_largest,
    random_fraction,
    top_fraction,
    zero_variance_groups,
)

NAN = float("nan")
ON = torch.ones(6, dtype=torch.bool)


def count(k):
    return torch.tensor(float(k))


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    k=st.integers(1, 45),
    seed=st.integers(0, 99),
)
def test_kth_largest_is_that_of_a_sorted_list(values, k, seed):
    x = torch.tensor(values, dtype=torch.float32)
    mask = torch.rand(len(values), generator=torch.Generator().manual_seed(seed)) < 0.8
    kept = sorted(x[mask].tolist(), reverse=True)
    expected = kept[k - 1] if k <= len(kept) else -math.inf
    assert kth_largest(x.masked_fill(~mask, NAN), count(k), mask).item() == expected


def test_kth_largest_is_over_all_ranks(two_ranks):
    # 5, 3, 1 here and 4, 2 there: in order 5 4 3 2 1
    here, there = torch.tensor([1.0, 5.0, 3.0]), torch.tensor([4.0, 2.0])
    for k, expected in [(1, 5.0), (2, 4.0), (4, 2.0), (5, 1.0), (6, -math.inf)]:
        out = two_ranks(kth_largest, (here, count(k), ON[:3]), (there, count(k), ON[:2]))
        assert out.item() == expected


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        # of six the interpolated quantile 1 - share stands at place 5 (1 - share), from below
        (0.2, [False, False, False, False, True, True]),  # at 4: the fifth itself
        (0.19, [False, False, False, False, False, True]),  # at 4.05
        (0.5, [False, False, False, True, True, True]),  # at 2.5
        (1.0, [True] * 6),
        (0.01, [False, False, False, False, False, True]),
    ],
)
def test_highest_follows_the_interpolated_quantile(share, expected):
    x = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, 3.0])
    assert highest(x, share, ON).tolist() == expected
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert highest(x[order], share, ON)[order.argsort()].tolist() == expected


def test_a_quantile_at_a_place_is_not_pushed_beyond_it_by_rounding():
    # of eleven the quantile .3 stands at place 3: the fourth. In floating point (1 - .7) * 10 = 3.0000000000000004
    assert highest(torch.arange(11.0), 0.7, torch.ones(11, dtype=torch.bool)).tolist() == [False] * 3 + [True] * 8
    # of 26 the quantile .6 stands at place 15. In single precision (1 - .4) * 25 = 15.000001
    assert highest(torch.arange(26.0), 0.4, torch.ones(26, dtype=torch.bool)).tolist() == [False] * 15 + [True] * 11


@given(n=st.integers(1, 60), share=st.floats(0.01, 1.0), seed=st.integers(0, 99))
def test_highest_are_those_at_or_above_the_quantile(n, share, seed):
    x = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()
    # a hair below, for the rounding of the interpolation
    border = x.double().quantile(1 - share) - 1e-9
    assert torch.equal(highest(x, share, torch.ones(n, dtype=torch.bool)), x >= border)


def test_highest_keeps_everything_that_is_equal_and_nothing_that_is_masked_out():
    assert highest(torch.full((6,), 1.5), 0.2, ON).all()
    x, mask = torch.tensor([1.0, 9.0, 2.0, NAN]), torch.tensor([True, False, True, False])
    assert highest(x, 0.2, mask).tolist() == [False, False, True, False]
    assert not highest(x, 0.2, torch.zeros(4, dtype=torch.bool)).any()


def test_highest_is_over_all_ranks(two_ranks):
    # 3 2 1 and 6 5 4, share .2: 5 and 6
    here, there = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    assert two_ranks(_of(highest, 0.2), (here, ON[:3]), (there, ON[:3])).tolist() == [False] * 3
    assert two_ranks(_of(highest, 0.2), (there, ON[:3]), (here, ON[:3])).tolist() == [False, True, True]


def _of(function, share):
    return lambda x, mask, all_sum: function(x, share, mask, all_sum)


def test_covariance_by_hand(two_ranks):
    # A = 3, 0, -3 with mean 0; logp = -1, -2, -6 with mean -3: 3 * 2, 0, -3 * -3
    advantage, log_prob = torch.tensor([3.0, 0.0, -3.0, 99.0]), torch.tensor([-1.0, -2.0, -6.0, NAN])
    mask = torch.tensor([True, True, True, False])
    assert covariance(log_prob, advantage, mask).tolist() == [6.0, 0.0, 9.0, 0.0]
    assert not covariance(log_prob.clone().requires_grad_(), advantage, mask).requires_grad
    here, there = ((log_prob[s], advantage[s], mask[s]) for s in (slice(0, 2), slice(2, 4)))
    assert two_ranks(covariance, here, there).tolist() == [6.0, 0.0]


def test_top_fraction_takes_as_many_as_the_fraction_and_at_least_one(two_ranks):
    x = torch.tensor([1.0, 5.0, 3.0, 4.0, 2.0, NAN])
    mask = torch.tensor([True] * 5 + [False])
    assert top_fraction(x, 0.4, mask).tolist() == [False, True, False, True, False, False]  # 2 of 5
    assert top_fraction(x, 0.59, mask).sum() == 2
    assert top_fraction(x, 2e-4, mask).tolist() == [False, True, False, False, False, False]
    assert top_fraction(x, 1.0, mask).tolist() == mask.tolist()
    here, there = (x[:3], mask[:3]), (x[3:], mask[3:])
    assert two_ranks(_of(top_fraction, 0.4), here, there).tolist() == [False, True, False]
    assert two_ranks(_of(top_fraction, 0.4), there, here).tolist() == [True, False, False]


def test_the_fraction_is_rounded_down_but_not_by_floating_point():
    # .9 of 3 are two; .29 of 100 are 29, though .29 * 100 = 28.999999999999996
    assert top_fraction(torch.arange(3.0), 0.9, ON[:3]).tolist() == [False, True, True]
    assert top_fraction(torch.arange(100.0), 0.29, torch.ones(100, dtype=torch.bool)).sum() == 29


def test_top_fraction_never_takes_what_is_masked_out():
    x, mask = torch.tensor([1.0, 2.0, 99.0, 3.0]), torch.tensor([True, True, False, True])
    assert top_fraction(x, 0.4, mask).tolist() == [False, False, False, True]


def test_top_fraction_takes_nothing_where_nothing_stands_out():
    assert not top_fraction(torch.zeros(6), 0.2, ON).any()
    assert top_fraction(torch.tensor([0.0, 0, 0, 0, 0, 1]), 0.2, ON).tolist() == [False] * 5 + [True]
    # elements are compared in single precision, in which .7 is less and .1 is more
    for value in (0.7, 0.1):
        assert not top_fraction(torch.full((6,), value, dtype=torch.float64), 0.2, ON).any()
        assert highest(torch.full((6,), value, dtype=torch.float64), 0.2, ON).all()


def test_random_fraction_draws_among_the_candidates_only(two_ranks):
    noise = torch.tensor([0.9, 0.1, 0.8, 0.4, 0.6, 0.7])
    candidate = torch.tensor([False, True, True, True, True, False])
    # a third of six: the two candidates of most noise
    assert random_fraction(noise, 0.34, candidate, ON).tolist() == [False, False, True, False, True, False]
    assert random_fraction(noise, 1e-4, candidate, ON).tolist() == [False, False, True, False, False, False]
    assert torch.equal(random_fraction(noise, 1.0, candidate, ON), candidate)
    assert not random_fraction(noise, 0.5, ~ON, ON).any()

    def draw(noise, candidate, mask, all_sum):
        return random_fraction(noise, 0.34, candidate, mask, all_sum)

    here, there = ((noise[s], candidate[s], ON[s]) for s in (slice(0, 3), slice(3, 6)))
    assert two_ranks(draw, here, there).tolist() == [False, False, True]
    assert two_ranks(draw, there, here).tolist() == [False, True, False]


def test_element_noise_golden():
    # splitmix64's first number from seed 0 is 0xE220A8397B1DCDAF; its upper 24 bits are 0xE220A8
    zero = torch.zeros(1, dtype=torch.int64)
    assert element_noise(0, zero).item() == 0xE220A8 / 2**24
    # the bits of the float zero are those of the integer, and there is one zero only
    assert element_noise(0, torch.tensor([-0.0, 0.0])).tolist() == [0xE220A8 / 2**24] * 2
    # the first number from seed 1234567 is 6457827717110365317
    assert element_noise(1234567, zero).item() == (6457827717110365317 >> 40) / 2**24


def test_element_noise_is_uniform_and_follows_each_part_of_the_content():
    step = torch.arange(20_000)
    value = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    noise = element_noise(3, value, step)
    assert 0 <= noise.min() < 0.001
    assert 0.999 < noise.max() < 1
    # of 20,000 uniform numbers: mean within .5 +- 4 / sqrt(12 * 20,000), tenth by tenth within 2,000 +- 4 sqrt(1,800)
    assert abs(noise.mean() - 0.5) < 0.0082
    assert (torch.histc(noise, 10, 0, 1) - 2000).abs().max() < 170
    assert abs(torch.corrcoef(torch.stack([noise[:-1], noise[1:]]))[0, 1]) < 0.03
    for other in (
        element_noise(4, value, step),
        element_noise(3, value, step + 1),
        element_noise(3, value * 1.1, step),
    ):
        assert abs(torch.corrcoef(torch.stack([noise, other]))[0, 1]) < 0.03
    # whatever stands around it
    assert torch.equal(element_noise(3, value[100:200], step[100:200]), noise[100:200])


SEEDS = st.integers(0, 2**31 - 1)
MASK = torch.tensor([True, True, True, False])


def test_explained_variance_by_hand():
    # targets 1, 2, 3: variance 2/3; errors 0, .5, 1 less their mean: -.5, 0, .5, variance 1/6; 1 - (1/6) / (2/3) = .75
    target, value = torch.tensor([1.0, 2.0, 3.0, NAN]), torch.tensor([1.0, 1.5, 2.0, 8.0])
    torch.testing.assert_close(explained_variance(value, target, MASK), torch.tensor(0.75))


def test_explained_variance_of_perfect_constant_and_bad_values():
    target = torch.tensor([1.0, 2.0, 3.0, NAN])
    assert explained_variance(target, target, MASK).item() == 1.0
    assert explained_variance(torch.full((4,), 7.0), target, MASK).item() == 0.0
    # errors double: 1 - 4
    torch.testing.assert_close(explained_variance(-target, target, MASK), torch.tensor(-3.0))


@pytest.mark.parametrize("target", [0.0, 0.1, 1e6 / 3])
def test_explained_variance_of_a_constant_target_is_zero(target):
    mask = torch.ones(999, dtype=torch.bool)
    assert explained_variance(torch.randn(999), torch.full((999,), target), mask).item() == 0.0


def test_zero_variance_groups_by_hand():
    # group 0 all equal, 1 differs, 2 alone, 3 equal but for a non-member, 4 nobody: two of three
    score = torch.tensor([0.1, 0.1, 0.1, 1.0, 2.0, 5.0, 3.0, 3.0, NAN, 7.0])
    group_id = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3, -1])
    member = torch.tensor([True] * 8 + [False, True])
    torch.testing.assert_close(zero_variance_groups(score, group_id, 5, member), torch.tensor(2 / 3))


def test_groups_have_no_variance_if_no_part_of_their_score_has():
    # totals are equal in all three groups, both parts in the second one only
    score = torch.tensor([[1.0, 2.0], [2.0, 1.0], [3.0, 0.5], [3.0, 0.5], [0.0, 1.0], [1.0, 0.0]])
    group_id, member = torch.tensor([0, 0, 1, 1, 2, 2]), torch.ones(6, dtype=torch.bool)
    torch.testing.assert_close(zero_variance_groups(score, group_id, 3, member), torch.tensor(1 / 3))
    torch.testing.assert_close(zero_variance_groups(score[:, :1], group_id, 3, member), torch.tensor(1 / 3))
    assert zero_variance_groups(score.sum(dim=1), group_id, 3, member) == 1.0


def test_nothing_to_look_at_gives_zero():
    x, none, ids = torch.full((3,), NAN), torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.long)
    for out in (explained_variance(x, x, none), zero_variance_groups(x, ids, 1, none)):
        assert out.shape == ()
        assert out.item() == 0.0


def test_diagnostics_hold_no_graph():
    x = torch.tensor([0.5, 1.0, 2.0, 3.0], requires_grad=True)
    assert not explained_variance(x, x, MASK).requires_grad


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS)
def test_diagnostics_over_two_ranks_are_those_of_the_union(two_ranks, seed):
    torch.manual_seed(seed)
    ratio, other, mask, group_id = torch.rand(30) * 2, torch.randn(30), torch.rand(30) < 0.8, torch.arange(30) // 5
    score = torch.randint(0, 2, (30,)).float()
    score[:5] = 0.1

    for function in (
        lambda r, o, m, g, s, *all_sum: explained_variance(r, o, m, *all_sum),
        lambda r, o, m, g, s, *all_sum: zero_variance_groups(s, g, 6, m, *all_sum),
    ):
        union = [ratio, other, mask, group_id, score]
        parts = [x[:10] for x in union], [x[10:] for x in union]
        expected = function(*union)
        torch.testing.assert_close(two_ranks(function, *parts), expected, rtol=1e-4, atol=1e-5)
