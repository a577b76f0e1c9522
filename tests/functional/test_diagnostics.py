import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.functional.reduce import (
    explained_variance,
    zero_variance_groups,
)

NAN = float("nan")
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
    for out in (
        explained_variance(x, x, none),
        zero_variance_groups(x, ids, 1, none),
    ):
        assert out.shape == ()
        assert out.item() == 0.0


def test_diagnostics_hold_no_graph():
    x = torch.tensor([0.5, 1.0, 2.0, 3.0], requires_grad=True)
    assert not explained_variance(x, x, MASK).requires_grad


@settings(deadline=None)
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
