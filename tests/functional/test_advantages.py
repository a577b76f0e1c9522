import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.functional.advantages import finished_count, group_relative

NAN = float("nan")
SEEDS = st.integers(0, 2**31 - 1)
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0])  # mean .25, deviation .46291005, population .43301270
ONE_GROUP = torch.zeros(8, dtype=torch.long)


def bools(*rows):
    return torch.tensor(rows, dtype=torch.bool)


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


SCALES = ["std", "population_std", "batch_std", "none"]
BASELINES = ["mean", "leave_one_out"]
every_rule = pytest.mark.parametrize(("baseline", "scale"), [(b, s) for b in BASELINES for s in SCALES])


@every_rule
@settings(deadline=None)
@given(value=st.floats(-1e6, 1e6, width=32), size=st.integers(1, 300))
def test_equal_scores_give_exactly_zero(baseline, scale, value, size):
    # a group whose mean rounds and which has a stranger, beside one that makes a deviation of the batch
    score = torch.cat([torch.full((size,), value), torch.tensor([0.0, 1.0, 2e6])])
    key = torch.cat([torch.zeros(size, dtype=torch.long), torch.tensor([1, 1, 0])])
    member = torch.arange(size + 3) < size + 2
    out = group_relative(score, key, 2, baseline=baseline, scale=scale, eps=0.0, member=member)
    assert not out[:size].any()
    assert out[size : size + 2].all()


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


@every_rule
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


def test_batch_std_counts_absorbed_members_where_somebody_lives():
    # key 0: 4 and one absorbed 0; key 1 only has absorbed ones: scores 4, 0 -> deviation sqrt(8) = 2.8284271
    score, key, zeros = torch.tensor([4.0]), torch.tensor([0]), torch.tensor([1.0, 9.0])
    out = group_relative(score, key, 2, baseline="mean", scale="batch_std", eps=0.0, zeros=zeros)
    torch.testing.assert_close(out, torch.tensor([2 / 2.8284271]))


@settings(deadline=None)
@given(seed=SEEDS)
def test_batch_std_over_two_ranks_is_that_of_the_union(two_ranks, seed):
    torch.manual_seed(seed)
    score, key, member = torch.randn(30) * 5 + 3, torch.randint(-1, 4, (30,)), torch.rand(30) < 0.9
    zeros = torch.randint(0, 3, (4,)).float()
    # groups 0 and 1 live on one rank, 2 and 3 on the other
    on_first = key < 2

    def advantage(score, key, member, zeros, all_sum):
        return group_relative(
            score, key, 2, baseline="mean", scale="batch_std", member=member, zeros=zeros, all_sum=all_sum
        )

    whole = group_relative(score, key, 4, baseline="mean", scale="batch_std", member=member, zeros=zeros)
    here = (score[on_first], key[on_first], member[on_first], zeros[:2])
    there = (score[~on_first], key[~on_first] - 2, member[~on_first], zeros[2:])
    torch.testing.assert_close(two_ranks(advantage, here, there), whole[on_first], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(two_ranks(advantage, there, here), whole[~on_first], rtol=1e-4, atol=1e-5)


def random_batch(seed):
    torch.manual_seed(seed)
    key = torch.randint(-1, 5, (4, 16))
    return torch.randn(4, 16, dtype=torch.float64), key, torch.rand(4, 16) < 0.8, key.ge(0)


def sums_by_key(x, key, num_keys):
    return torch.stack([x[key == k].sum() for k in range(num_keys)])


def over_seeds(test):
    return settings(deadline=None, max_examples=30)(given(seed=SEEDS)(test))


@every_rule
class TestGroupRelativeProperties:
    @over_seeds
    def test_sums_to_zero_in_every_group(self, baseline, scale, seed):
        score, key, member, _ = random_batch(seed)
        out = group_relative(score, key, 5, baseline=baseline, scale=scale, member=member)
        torch.testing.assert_close(sums_by_key(out, key, 5), torch.zeros(5).double(), rtol=0, atol=1e-9)

    @over_seeds
    def test_sums_to_zero_with_what_absorbed_members_would_get(self, baseline, scale, seed):
        """An absorbed member gets what a live one with score 0 gets, and stands for it in everything else."""
        score, key, _, present = random_batch(seed)
        zeros = torch.randint(0, 3, (5,)).double()
        zeros[sums_by_key(present.double(), key, 5) == 0] = 0
        out = group_relative(score, key, 5, baseline=baseline, scale=scale, zeros=zeros)
        spelled_key = torch.cat([key.flatten(), torch.repeat_interleave(torch.arange(5), zeros.long())])
        spelled = torch.cat([score.flatten(), torch.zeros(len(spelled_key) - score.numel()).double()])
        expected = group_relative(spelled, spelled_key, 5, baseline=baseline, scale=scale)
        torch.testing.assert_close(out.flatten(), expected[: score.numel()])

    @over_seeds
    def test_is_above_zero_exactly_for_the_better_than_average(self, baseline, scale, seed):
        score, key, member, present = random_batch(seed)
        out = group_relative(score, key, 5, baseline=baseline, scale=scale, member=member)
        for k in range(5):
            mine = (key == k) & member & present
            if mine.sum() > 1:
                assert torch.equal(out[mine] > 0, score[mine] > score[mine].mean())


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
