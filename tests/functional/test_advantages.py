"""Baselines and scales: numbers by hand, and what holds for every choice of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.functional.advantages import (
    batch_scale,
    finished_count,
    group_relative,
    kl_shaping,
)
from groupwise.functional.reduce import local

NAN = float("nan")
SEEDS = st.integers(0, 2**31 - 1)
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])  # mean .25, deviation .46291005, population .43301270
ONE_GROUP = torch.zeros(8, dtype=torch.long)
PLAIN = [(b, s) for b in ("mean", "leave_one_out") for s in ("std", "population_std", "batch_std", "none")]
EVERY = [{"baseline": baseline, "scale": scale} for baseline, scale in PLAIN]
EVERY += [{"baseline": "mean", "scale": scale} for scale in ("mean", "nonzero_share")]
EVERY += [{"baseline": "mean", "scale": scale, "weight": "lengths"} for scale in ("none", "std")]
every_rule = pytest.mark.parametrize("choices", EVERY, ids=str)
plain_rule = pytest.mark.parametrize(("baseline", "scale"), PLAIN)
over_seeds = settings(deadline=None, max_examples=15)


def bools(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def random_batch(seed):
    """Scores, keys 0..4 and -1, members, and lengths."""
    torch.manual_seed(seed)
    score, key = torch.rand(4, 16, dtype=torch.float64), torch.randint(-1, 5, (4, 16))
    return score, key, torch.rand(4, 16) < 0.8, torch.randint(1, 9, (4, 16)).double()


def advantage(choices, score, key, member, lengths, num_keys=5, **more):
    weight = {"weight": lengths} if "weight" in choices else {}
    return group_relative(score, key, num_keys, **choices | weight, member=member, eps=0.0, **more)


def sums_by_key(x, key, num_keys=5):
    return torch.stack([x[key == k].sum() for k in range(num_keys)])


@pytest.mark.parametrize(
    ("baseline", "scale", "eps", "of_one", "of_zero"),
    [
        ("mean", "std", 1e-4, 1.619835, -0.539945),
        ("mean", "population_std", 1e-8, 1.732051, -0.577350),
        ("mean", "none", 1e-4, 0.75, -0.25),
        ("leave_one_out", "none", 1e-4, 0.857143, -0.285714),
        ("leave_one_out", "std", 1e-4, 1.851240, -0.617080),  # 8/7 of the first line
        ("mean", "batch_std", 1e-4, 1.619835, -0.539945),  # one group is the batch
    ],
)
def test_group_relative_golden(baseline, scale, eps, of_one, of_zero):
    out = group_relative(REWARDS, ONE_GROUP, 1, baseline=baseline, scale=scale, eps=eps)
    torch.testing.assert_close(out, torch.where(REWARDS > 0, of_one, of_zero), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        ("mean", "std", 0.70710678),  # 1 / sqrt(2)
        ("mean", "population_std", 1.0),
        ("mean", "batch_std", 0.70710678),
        ("leave_one_out", "none", 2.0),
    ],
)
def test_group_relative_of_a_pair(baseline, scale, expected):
    out = group_relative(torch.tensor([0.0, 2.0]), ONE_GROUP[:2], 1, baseline=baseline, scale=scale, eps=0.0)
    torch.testing.assert_close(out, torch.tensor([-expected, expected]))


def test_population_std_of_nearly_equal_rewards_golden():
    rewards = torch.tensor([0.0, 0.0, 0.0, 1e-6])
    kw = {"baseline": "mean", "scale": "population_std"}
    loud = group_relative(rewards, ONE_GROUP[:4], 1, eps=1e-8, **kw)
    torch.testing.assert_close(loud, torch.tensor([-0.564, -0.564, -0.564, 1.693]), rtol=0, atol=1e-3)
    calm = group_relative(rewards, ONE_GROUP[:4], 1, **kw)
    torch.testing.assert_close(calm, torch.tensor([-0.0025, -0.0025, -0.0025, 0.0075]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("near", [0.1, 1.0, 1e6, 3e30])
def test_scores_one_unit_in_the_last_place_apart_are_told_apart(near):
    # one of four is a unit above: mean 1/4, deviation 1/2 units
    low = torch.tensor(near)
    score = torch.stack([low, torch.nextafter(low, torch.tensor(torch.inf)), low, low])
    out = group_relative(score, ONE_GROUP[:4], 1, baseline="mean", scale="std", eps=0.0)
    torch.testing.assert_close(out, torch.tensor([-0.5, 1.5, -0.5, -0.5]))


def test_nan_of_a_member_is_not_hidden():
    score, key = torch.tensor([NAN, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    out = group_relative(score, key, 2, baseline="mean", scale="none")
    assert out[:2].isnan().all()
    assert out[2:].tolist() == [-0.5, 0.5]


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        # 6 beside 3 and one absorbed 0: mean 3, squares 9 + 0 + 9 = 18
        ("mean", "none", [3.0, 0.0]),
        ("mean", "std", [3 / (3 + 1e-4), 0.0]),
        ("mean", "population_std", [3 / (6**0.5 + 1e-4), 0.0]),
        ("mean", "batch_std", [3 / (3 + 1e-4), 0.0]),
        ("leave_one_out", "none", [6 - 1.5, 3 - 3.0]),
    ],
)
def test_absorbed_members_count_as_zeros(baseline, scale, expected):
    score, key, zeros = torch.tensor([6.0, 3.0]), torch.tensor([1, 1]), torch.tensor([5.0, 1.0])
    out = group_relative(score, key, 2, baseline=baseline, scale=scale, zeros=zeros)
    torch.testing.assert_close(out, torch.tensor(expected))


@plain_rule
@pytest.mark.parametrize(("score", "differs"), [(0.0, False), (2.0, True), (-2.0, True)])
@pytest.mark.parametrize("absorbed", [1.0, 3.0])
def test_one_live_member_beside_absorbed_ones(baseline, scale, score, differs, absorbed):
    key, zeros = torch.tensor([0]), torch.tensor([absorbed])
    out = group_relative(torch.tensor([score]), key, 1, baseline=baseline, scale=scale, eps=0.0, zeros=zeros)
    assert bool(out.item() != 0) == differs
    assert out.item() * score >= 0


def test_batch_std_is_of_raw_scores_over_all_groups():
    # 0, 2, 10, 12: mean 6, squares 36 + 16 + 16 + 36 = 104, deviation sqrt(104 / 3) = 5.8878405
    score, key = torch.tensor([0.0, 2.0, 10.0, 12.0]), torch.tensor([0, 0, 1, 1])
    out = group_relative(score, key, 2, baseline="mean", scale="batch_std", eps=0.0)
    torch.testing.assert_close(out, torch.tensor([-1.0, 1.0, -1.0, 1.0]) / 5.8878405)


def test_equal_scores_are_not_divided_by_0():
    scores, mask, none = torch.full((3,), 2.0), torch.ones(3, dtype=torch.bool), torch.zeros(1)
    assert batch_scale("batch_std", scores, mask, none, 0.0, local).item() == 1
    assert batch_scale("batch_std", scores, mask, none, 1e-4, local).item() == pytest.approx(1e-4)


def test_batch_std_counts_absorbed_members_where_somebody_lives():
    # key 0: 4 and one absorbed 0; key 1 only has absorbed ones: scores 4, 0 -> deviation sqrt(8) = 2.8284271
    score, key, zeros = torch.tensor([4.0]), torch.tensor([0]), torch.tensor([1.0, 9.0])
    out = group_relative(score, key, 2, baseline="mean", scale="batch_std", eps=0.0, zeros=zeros)
    torch.testing.assert_close(out, torch.tensor([2 / 2.8284271]))


@pytest.mark.parametrize("scale", ["batch_std", "nonzero_share"])
@settings(deadline=None, max_examples=20)
@given(seed=SEEDS)
def test_scales_of_the_batch_over_two_ranks_are_those_of_the_union(two_ranks, scale, seed):
    torch.manual_seed(seed)
    score, key, member = torch.randn(30) * 5 + 3, torch.randint(-1, 4, (30,)), torch.rand(30) < 0.9
    score = score * (torch.rand(30) < 0.7)
    zeros = torch.randint(0, 3, (4,)).float()
    # groups 0 and 1 live on one rank, 2 and 3 on the other
    on_first = key < 2

    def advantage(score, key, member, zeros, all_sum):
        return group_relative(score, key, 2, baseline="mean", scale=scale, member=member, zeros=zeros, all_sum=all_sum)

    whole = group_relative(score, key, 4, baseline="mean", scale=scale, member=member, zeros=zeros)
    here = (score[on_first], key[on_first], member[on_first], zeros[:2])
    there = (score[~on_first], key[~on_first] - 2, member[~on_first], zeros[2:])
    torch.testing.assert_close(two_ranks(advantage, here, there), whole[on_first], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(two_ranks(advantage, there, here), whole[~on_first], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", ["mean", "nonzero_share"])
def test_scale_golden(scale):
    # (1 - .25) / .25 = 3 and (0 - .25) / .25 = -1; two of eight are not 0: 2 / 8 is .25, too
    out = group_relative(REWARDS, ONE_GROUP, 1, baseline="mean", scale=scale)
    assert out.tolist() == [3.0, -1.0, -1.0, 3.0, -1.0, -1.0, -1.0, -1.0]


def test_scale_by_the_mean_is_the_keys_own():
    # key 0: 1, 3, mean 2; key 1: 0, 4 and two absorbed zeros, mean 1
    score, key, zeros = torch.tensor([1.0, 3.0, 0.0, 4.0]), torch.tensor([0, 0, 1, 1]), torch.tensor([0.0, 2.0])
    out = group_relative(score, key, 2, baseline="mean", scale="mean", zeros=zeros)
    assert out.tolist() == [-0.5, 0.5, -1.0, 3.0]


@pytest.mark.parametrize("rewards", [[-1.0, 1.0], [-3.0, 1.0]])
def test_scale_by_a_mean_that_is_not_positive_gives_nothing(rewards):
    assert not group_relative(torch.tensor(rewards), ONE_GROUP[:2], 1, baseline="mean", scale="mean").any()


def test_nonzero_share_is_of_the_whole_batch():
    # one of four members is not 0, beside a stranger: share 1/4; the other key is equal and stays 0
    score, key = torch.tensor([1.0, 0.0, 0.0, 0.0, 9.0]), torch.tensor([0, 0, 1, 1, 1])
    member = torch.tensor([True, True, True, True, False])
    out = group_relative(score, key, 2, baseline="mean", scale="nonzero_share", member=member)
    assert out.tolist() == [2.0, -2.0, 0.0, 0.0, 0.0]
    # an absorbed zero counts: 1 of 3, mean 1/3
    out = group_relative(score[:2], key[:2], 1, baseline="mean", scale="nonzero_share", zeros=torch.ones(1))
    torch.testing.assert_close(out, torch.tensor([2.0, -1.0]))


def test_nonzero_share_takes_negative_rewards_for_what_they_are():
    out = group_relative(torch.tensor([-1.0, 0.0]), ONE_GROUP[:2], 1, baseline="mean", scale="nonzero_share")
    assert out.tolist() == [-1.0, 1.0]


def test_weighted_mean_by_hand():
    # key 0: (3 * 3 + 2 * 1) / 5 = 2.2; key 1 has no weight at all: plain mean 5
    score, key = torch.tensor([3.0, 1.0, 4.0, 6.0]), torch.tensor([0, 0, 1, 1])
    out = group_relative(
        score, key, 2, baseline="mean", scale="none", weight=torch.tensor([3.0, 2.0, 0.0, 0.0]), zeros=torch.zeros(2)
    )
    torch.testing.assert_close(out, torch.tensor([0.8, -1.2, -1.0, 1.0]))
    # only the proportion counts: (.6 * 3 + .2 * 1) / .8 = 2.5
    out = group_relative(score[:2], key[:2], 1, baseline="mean", scale="none", weight=torch.tensor([0.6, 0.2]))
    torch.testing.assert_close(out, torch.tensor([0.5, -1.5]))
    # the deviation is about the plain mean: 2, squares 1 + 1, over 1
    out = group_relative(score[:2], key[:2], 1, baseline="mean", scale="std", eps=0.0, weight=torch.tensor([3.0, 2.0]))
    torch.testing.assert_close(out, torch.tensor([0.8, -1.2]) / 2**0.5)


def test_an_absorbed_member_weighs_nothing():
    score, key, weight = torch.tensor([3.0, 1.0]), ONE_GROUP[:2], torch.tensor([3.0, 2.0])
    out = group_relative(score, key, 1, baseline="mean", scale="none", weight=weight, zeros=torch.ones(1))
    torch.testing.assert_close(out, torch.tensor([0.8, -1.2]))


def test_kl_shaping_by_hand():
    # episode 0: 1, 2, 6, mean 3; episode 1: 5 alone, the other of its steps does not count
    distance = torch.tensor([[1.0, 2.0, 6.0], [5.0, 8.0, NAN]])
    episode_id = torch.tensor([[0, 0, 0], [1, 1, -1]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert kl_shaping(distance, episode_id, 2, mask).tolist() == [[2.0, 1.0, -3.0], [0.0, 0.0, 0.0]]


@every_rule
@over_seeds
@given(value=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 300))
def test_equal_scores_and_members_alone_get_exactly_zero(choices, value, size):
    # a group whose mean rounds and which has a stranger, beside one that makes a deviation of the batch
    score = torch.cat([torch.full((size,), value), torch.tensor([0.0, 1.0, 2e6])])
    key = torch.cat([torch.zeros(size, dtype=torch.long), torch.tensor([1, 1, 0])])
    out = advantage(choices, score, key, torch.arange(size + 3) < size + 2, torch.arange(1.0, size + 4), num_keys=2)
    assert not out[:size].any()
    assert out[size + 1] > 0
    assert out[size] < 0


@every_rule
@over_seeds
@given(seed=SEEDS)
def test_order_of_elements_and_names_of_groups_mean_nothing(choices, seed):
    score, key, member, lengths = random_batch(seed)
    out = advantage(choices, score, key, member, lengths).flatten()
    order, names = torch.randperm(64), torch.randperm(5)
    renamed = torch.where(key >= 0, names[key], -1).flatten()[order]
    moved = advantage(choices, score.flatten()[order], renamed, *(x.flatten()[order] for x in (member, lengths)))
    torch.testing.assert_close(moved, out[order])


@every_rule
@over_seeds
@given(seed=SEEDS)
def test_non_members_get_zero_and_leak_nothing(choices, seed):
    score, key, member, lengths = random_batch(seed)
    out = advantage(choices, score, key, member, lengths)
    spoiled = score.masked_fill(~member | (key < 0), NAN)
    torch.testing.assert_close(advantage(choices, spoiled, key, member, lengths), out)
    assert not out[~member | (key < 0)].any()


@every_rule
@over_seeds
@given(seed=SEEDS)
def test_the_better_ones_of_a_group_are_praised(choices, seed):
    """With the plain mean, or that of the others, exactly those above average; with every rule the best."""
    score, key, member, lengths = random_batch(seed)
    out = advantage(choices, score, key, member, lengths)
    for k in range(5):
        mine = (key == k) & member
        if mine.sum() > 1:
            assert out[mine][score[mine].argmax()] > 0
            assert out[mine].max() == out[mine][score[mine].argmax()]
            if (choices["baseline"], choices["scale"]) in PLAIN and "weight" not in choices:
                assert torch.equal(out[mine] > 0, score[mine] > score[mine].mean())


@every_rule
@over_seeds
@given(seed=SEEDS)
def test_sums_to_zero_in_every_group(choices, seed):
    score, key, member, lengths = random_batch(seed)
    out = advantage(choices, score, key, member, lengths)
    weighted = lengths * out if "weight" in choices else out
    torch.testing.assert_close(sums_by_key(weighted, key), torch.zeros(5).double(), rtol=0, atol=1e-9)


@plain_rule
@over_seeds
@given(seed=SEEDS)
def test_sums_to_zero_with_what_absorbed_members_would_get(baseline, scale, seed):
    """An absorbed member gets what a live one with score 0 gets, and stands for it in everything else."""
    score, key, _, _ = random_batch(seed)
    zeros = torch.randint(0, 3, (5,)).double()
    zeros[sums_by_key(torch.ones_like(score), key) == 0] = 0
    out = group_relative(score, key, 5, baseline=baseline, scale=scale, zeros=zeros)
    spelled_key = torch.cat([key.flatten(), torch.repeat_interleave(torch.arange(5), zeros.long())])
    spelled = torch.cat([score.flatten(), torch.zeros(len(spelled_key) - score.numel()).double()])
    expected = group_relative(spelled, spelled_key, 5, baseline=baseline, scale=scale)
    torch.testing.assert_close(out.flatten(), expected[: score.numel()])


@every_rule
@over_seeds
@given(seed=SEEDS)
def test_a_constant_added_to_all_rewards(choices, seed):
    score, key, member, lengths = random_batch(seed)
    score = score * (torch.rand(4, 16) < 0.5)
    out, shifted = (advantage(choices, x, key, member, lengths) for x in (score, score + 3))
    changes = choices["scale"] in ("mean", "nonzero_share") and bool(out.any())
    assert torch.allclose(out, shifted) != changes


@over_seeds
@given(seed=SEEDS)
def test_what_scaling_all_rewards_does(seed):
    score, key, member, lengths = random_batch(seed)
    same = ("mean", "std", "population_std", "batch_std")
    for scale, factor in [(scale, 1.0) for scale in same] + [("nonzero_share", 100.0), ("none", 100.0)]:
        choices = {"baseline": "mean", "scale": scale}
        out, scaled = (advantage(choices, x, key, member, lengths) for x in (score, 100 * score))
        torch.testing.assert_close(scaled, factor * out)


@over_seeds
@given(seed=SEEDS)
def test_equal_weights_are_none(seed):
    score, key, member, lengths = random_batch(seed)
    plain = advantage({"baseline": "mean", "scale": "std"}, score, key, member, lengths)
    even = {"baseline": "mean", "scale": "std", "weight": 1}
    torch.testing.assert_close(advantage(even, score, key, member, torch.full_like(lengths, 0.3)), plain)


def test_finished_count_by_hand():
    # group 0 ends at step 1 (one member) and 2 (the other); group 1 at step 0, while its member was truncated
    step = torch.tensor([[0, 1, 0, 0], [0, 1, 2, -1]])
    group_id = torch.tensor([[0, 0, 1, 1], [0, 0, 0, -1]])
    ended = bools([0, 1, 1, 0], [0, 0, 1, 1])
    out = finished_count(group_id, step, ended, 2, 4)
    assert out.tolist() == [0.0, 0.0, 1.0, 2.0, 0.0, 1.0, 1.0, 1.0]


def test_finished_count_ignores_what_is_outside():
    # steps 3 and 7 of 4 leave no step behind them, -1 is no step, -1 no group; none may reach the next group's counts
    step = torch.tensor([[3, 7, -1, 2]])
    group_id = torch.tensor([[0, 0, 0, -1]])
    assert not finished_count(group_id, step, torch.ones(1, 4).bool(), 2, 4).any()
    last = finished_count(torch.zeros(1, 1).long(), torch.tensor([[2]]), bools([1]), 2, 4)
    assert last.tolist() == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]
