"""The baselines and scales of ``functional.advantages`` beyond the mean and the deviation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.functional.advantages import (
    baseline_relative,
    choice_variance,
    group_relative,
    kl_shaping,
    next_average,
)

NAN = float("nan")
SEEDS = st.integers(0, 2**31 - 1)
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])
ONE_GROUP = torch.zeros(8, dtype=torch.long)
EVERY = pytest.mark.parametrize(
    "choices",
    [
        {"baseline": "second_best", "scale": "none"},
        {"baseline": "second_best", "scale": "std"},
        {"baseline": "mean", "scale": "mean"},
        {"baseline": "mean", "scale": "nonzero_share"},
        {"baseline": "mean", "scale": "none", "weight": "lengths"},
        {"baseline": "mean", "scale": "std", "weight": "lengths"},
        {"baseline": "leave_one_out", "scale": "none"},
        {"baseline": "leave_one_out", "scale": "population_std"},
        {"baseline": "mean", "scale": "batch_std"},
    ],
    ids=str,
)


def over_seeds(test):
    return settings(deadline=None, max_examples=10)(given(seed=SEEDS)(test))


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


@pytest.mark.parametrize(
    ("score", "scale", "expected"),
    [
        ([5.0, 2.0, 4.0, 2.0], "none", [1.0, 0.0, 0.0, 0.0]),
        # mean 3.25, squares 3.0625 + 1.5625 + .5625 + 1.5625 = 6.75, deviation sqrt(2.25) = 1.5
        ([5.0, 2.0, 4.0, 2.0], "std", [1 / 1.5, 0.0, 0.0, 0.0]),
        ([5.0, 2.0, 5.0, 2.0], "none", [0.0, 0.0, 0.0, 0.0]),
        ([-5.0, -2.0, -4.0], "none", [0.0, 2.0, 0.0]),
        ([7.0], "none", [0.0]),
    ],
)
def test_second_best_by_hand(score, scale, expected):
    out = group_relative(torch.tensor(score), ONE_GROUP[: len(score)], 1, baseline="second_best", scale=scale, eps=0.0)
    torch.testing.assert_close(out, torch.tensor(expected))


def test_second_best_does_not_look_at_strangers_and_other_keys():
    score, key = torch.tensor([1.0, 3.0, 2.5, 9.0, NAN]), torch.tensor([0, 0, 0, 1, -1])
    member = torch.tensor([True, True, False, True, True])
    out = group_relative(score, key, 2, baseline="second_best", scale="none", member=member)
    assert out.tolist() == [0.0, 2.0, 0.0, 0.0, 0.0]


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


def test_baseline_relative_by_hand():
    # scores 4, 1, 1 of members: mean 2, squares 4 + 1 + 1, deviation sqrt(3); 2 of 3 ... all three are not 0
    score, member = torch.tensor([4.0, 1.0, 1.0, NAN]), torch.tensor([True, True, True, False])
    baseline = torch.tensor([1.0, 1.0, 3.0, 3.0])
    kw = {"member": member, "eps": 0.0}
    assert baseline_relative(score, baseline, scale="none", **kw).tolist() == [3.0, 0.0, -2.0, 0.0]
    out = baseline_relative(score, baseline, scale="batch_std", **kw)
    torch.testing.assert_close(out, torch.tensor([3.0, 0.0, -2.0, 0.0]) / 3**0.5)
    score = torch.tensor([4.0, 0.0, 0.0, 5.0])
    out = baseline_relative(score, torch.tensor(1.0), scale="nonzero_share", **kw)
    torch.testing.assert_close(out, torch.tensor([9.0, -3.0, -3.0, 0.0]))
    out = baseline_relative(score, torch.tensor(1.0), scale="batch_std", member=member)
    torch.testing.assert_close(out, torch.tensor([3.0, -1.0, -1.0, 0.0]) / (16 / 3 + 0.0) ** 0.5, rtol=1e-4, atol=0)
    assert out[0] < 3 / (16 / 3) ** 0.5  # eps is 1e-4 unless told


def test_next_average_by_hand():
    score, member = torch.tensor([1.0, 5.0, NAN]), torch.tensor([True, True, False])
    assert next_average(None, score, member, 0.5) == 3.0
    # two episodes of mean 3: 1/4 of the old 11 and 3/4 of 3
    assert next_average(torch.tensor(11.0), score, member, 0.5) == 5.0
    assert next_average(torch.tensor(11.0), score, ~member & member, 0.5) == 11.0


@settings(deadline=None)
@given(value=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 300))
def test_the_average_of_equal_scores_is_exactly_that_score(value, size):
    score = torch.full((size,), value)
    average = next_average(None, score, score == score, 0.95)
    assert average == score[0]
    assert next_average(average, score, score == score, 0.95) == score[0]


def test_choice_variance_by_hand():
    # probabilities .5 .25 .25: 1 - 2 * .5 + .375, and 1 - 2 * .25 + .375
    logits = torch.tensor([0.5, 0.25, 0.25]).log().expand(2, 3)
    torch.testing.assert_close(choice_variance(logits, torch.tensor([0, 1])), torch.tensor([0.375, 0.875]))


def test_choice_variance_is_the_square_of_the_score_function():
    torch.manual_seed(0)
    logits, action = torch.randn(5, 4, requires_grad=True), torch.tensor([0, 3, 1, 1, 2])
    logits.log_softmax(-1).gather(1, action[:, None]).sum().backward()
    torch.testing.assert_close(choice_variance(logits.detach(), action), logits.grad.square().sum(-1))


def test_a_certain_choice_has_no_variance_and_none_that_is_negative():
    logits = torch.tensor([[40.0, -40.0], [12.0, -12.0]])
    out = choice_variance(logits, torch.tensor([0, 0]))
    assert out[0] == 0.0
    assert (out >= 0).all()


def test_kl_shaping_by_hand():
    # episode 0: 1, 2, 6, mean 3; episode 1: 5 alone, the other of its steps does not count
    distance = torch.tensor([[1.0, 2.0, 6.0], [5.0, 8.0, NAN]])
    episode_id = torch.tensor([[0, 0, 0], [1, 1, -1]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert kl_shaping(distance, episode_id, 2, mask).tolist() == [[2.0, 1.0, -3.0], [0.0, 0.0, 0.0]]


@EVERY
class TestProperties:
    @over_seeds
    def test_order_of_elements_and_names_of_groups_mean_nothing(self, choices, seed):
        score, key, member, lengths = random_batch(seed)
        out = advantage(choices, score, key, member, lengths).flatten()
        order, names = torch.randperm(64), torch.randperm(5)
        renamed = torch.where(key >= 0, names[key], -1).flatten()[order]
        moved = advantage(
            choices, *(x.flatten()[order] for x in (score,)), renamed, *(x.flatten()[order] for x in (member, lengths))
        )
        torch.testing.assert_close(moved, out[order])

    @over_seeds
    def test_equal_scores_and_members_alone_get_exactly_zero(self, choices, seed):
        torch.manual_seed(seed)
        value = float(torch.rand(()) * 10)
        score = torch.tensor([value] * 7 + [3.0, 0.0, 1.0])
        key = torch.tensor([0] * 7 + [1, 2, 2])
        lengths = torch.randint(1, 9, (10,)).float()
        out = advantage(choices, score, key, key >= 0, lengths, num_keys=3)
        assert not out[:8].any()
        assert out[9] > 0

    @over_seeds
    def test_non_members_get_zero_and_leak_nothing(self, choices, seed):
        score, key, member, lengths = random_batch(seed)
        out = advantage(choices, score, key, member, lengths)
        spoiled = score.masked_fill(~member | (key < 0), NAN)
        torch.testing.assert_close(advantage(choices, spoiled, key, member, lengths), out)
        assert not out[~member | (key < 0)].any()

    @over_seeds
    def test_the_best_of_a_group_is_never_blamed(self, choices, seed):
        score, key, member, lengths = random_batch(seed)
        out = advantage(choices, score, key, member, lengths)
        for k in range(5):
            mine = (key == k) & member
            if mine.sum() > 1:
                assert out[mine][score[mine].argmax()] > 0
                assert out[mine].max() == out[mine][score[mine].argmax()]


def is_shift_invariant(choices):
    return choices["scale"] not in ("mean", "nonzero_share")


@EVERY
@over_seeds
def test_a_constant_added_to_all_rewards(choices, seed):
    score, key, member, lengths = random_batch(seed)
    score = score * (torch.rand(4, 16) < 0.5)
    out, shifted = (advantage(choices, x, key, member, lengths) for x in (score, score + 3))
    assert torch.allclose(out, shifted) == (is_shift_invariant(choices) or not out.any())


@over_seeds
def test_what_scaling_all_rewards_does(seed):
    score, key, member, lengths = random_batch(seed)
    same = ("mean", "std", "population_std", "batch_std")
    for scale, factor in [(scale, 1.0) for scale in same] + [("nonzero_share", 100.0), ("none", 100.0)]:
        choices = {"baseline": "mean", "scale": scale}
        out, scaled = (advantage(choices, x, key, member, lengths) for x in (score, 100 * score))
        torch.testing.assert_close(scaled, factor * out)


@over_seeds
def test_sums_to_zero_in_every_group(seed):
    score, key, member, lengths = random_batch(seed)
    for scale in ("mean", "nonzero_share"):
        out = advantage({"baseline": "mean", "scale": scale}, score, key, member, lengths)
        torch.testing.assert_close(sums_by_key(out, key), torch.zeros(5).double(), rtol=0, atol=1e-9)
    weighted = advantage({"baseline": "mean", "scale": "none", "weight": 1}, score, key, member, lengths)
    torch.testing.assert_close(sums_by_key(lengths * weighted, key), torch.zeros(5).double(), rtol=0, atol=1e-9)


@over_seeds
def test_equal_weights_are_none(seed):
    score, key, member, lengths = random_batch(seed)
    plain = advantage({"baseline": "mean", "scale": "std"}, score, key, member, lengths)
    even = {"baseline": "mean", "scale": "std", "weight": 1}
    torch.testing.assert_close(advantage(even, score, key, member, torch.full_like(lengths, 0.3)), plain)


@over_seeds
def test_nonzero_share_over_two_ranks_is_that_of_the_union(two_ranks, seed):
    score, key, member, _ = (x.flatten() for x in random_batch(seed))
    score = score * (torch.rand(64) < 0.5)
    choices = {"baseline": "mean", "scale": "nonzero_share"}
    whole, first = group_relative(score, key, 5, **choices, member=member), key < 2

    def on_rank(score, key, member, all_sum):
        return group_relative(score, key, 3, **choices, member=member, all_sum=all_sum)

    here = (score[first], key[first], member[first])
    there = (score[~first], key[~first] - 2, member[~first])
    torch.testing.assert_close(two_ranks(on_rank, here, there), whole[first])
    torch.testing.assert_close(two_ranks(on_rank, there, here), whole[~first])


@pytest.mark.parametrize("average", [None, torch.tensor(7.0, dtype=torch.float64)])
@over_seeds
def test_the_average_over_two_ranks_is_that_of_the_union(two_ranks, average, seed):
    score, _, member, _ = (x.flatten() for x in random_batch(seed))

    def on_rank(score, member, all_sum):
        return next_average(average, score, member, 0.9, all_sum=all_sum)

    whole = next_average(average, score, member, 0.9)
    parts = (score[:20], member[:20]), (score[20:], member[20:])
    torch.testing.assert_close(two_ranks(on_rank, *parts), whole)


@over_seeds
def test_the_average_is_near_that_of_one_episode_after_another(seed):
    """The order of episodes means nothing here; their mean in a row is what all orders give on average."""
    torch.manual_seed(seed)
    score = torch.rand(3, dtype=torch.float64)
    averages = []
    for order in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]):
        average = 5.0
        for i in order:
            average = 0.9 * average + 0.1 * float(score[i])
        averages.append(average)
    out = next_average(torch.tensor(5.0, dtype=torch.float64), score, score >= 0, 0.9)
    assert abs(float(out) - sum(averages) / 6) < 1e-12


@over_seeds
def test_kl_shaping_moves_credit_within_each_episode_only(seed):
    distance, episode_id, mask, _ = random_batch(seed)
    out = kl_shaping(distance, episode_id, 5, mask)
    torch.testing.assert_close(sums_by_key(out, episode_id), torch.zeros(5).double(), rtol=0, atol=1e-9)
    torch.testing.assert_close(
        kl_shaping(distance + 2, episode_id, 5, mask)[mask & (episode_id >= 0)], out[mask & (episode_id >= 0)]
    )
