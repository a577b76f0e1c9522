import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.functional import reduce
from groupwise.functional.reduce import (
    gather_segments,
    local,
    loss_weights,
    masked_mean,
    segment_mean,
    segment_min_max,
    segment_sum,
    token_mean_weights,
    whiten,
    whiten_segments,
)

NAN = float("nan")
AGGREGATIONS = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant", "seq_mean_token_sum_norm"]
SEEDS = st.integers(0, 2**31 - 1)

FLOATS = st.floats(-100, 100, width=32)


@settings(deadline=None)
@given(seed=SEEDS, masked=st.booleans())
def test_segments_and_masks_are_those_of_a_loop(seed, masked):
    """What is absent, or outside the mask, is NaN."""
    torch.manual_seed(seed)
    x, segment, mask = torch.randn(3, 5, dtype=torch.float64), torch.randint(-1, 4, (3, 5)), torch.rand(3, 5) < 0.7
    counts = (segment >= 0) & mask if masked else segment >= 0
    x[~counts] = NAN
    given_mask = (mask,) if masked else ()
    parts = [x[counts & (segment == k)].tolist() for k in range(4)]
    sums = torch.tensor([sum(part) for part in parts]).double()
    means = torch.tensor([sum(part) / max(len(part), 1) for part in parts]).double()
    torch.testing.assert_close(segment_sum(x, segment, 4, *given_mask), sums)
    torch.testing.assert_close(segment_mean(x, segment, 4, counts), means)
    lowest, highest = segment_min_max(x, segment, 4, *given_mask)
    assert lowest.tolist() == [min(part, default=float("inf")) for part in parts]
    assert highest.tolist() == [max(part, default=-float("inf")) for part in parts]
    torch.testing.assert_close(masked_mean(x, counts), x[counts].sum() / counts.sum().clamp(min=1))
    for value, number in zip(gather_segments(means, segment).flatten(), segment.flatten(), strict=True):
        assert value == (means[number] if number >= 0 else 0)


@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_ordered_sums_are_those_in_the_order_of_elements(data, dtype):
    count, num_segments = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 5))
    x = torch.tensor(data.draw(st.lists(FLOATS, min_size=count, max_size=count)), dtype=dtype)
    ids = st.integers(0, num_segments)  # the last one is of elements that do not count, and may hold anything
    bins = torch.tensor(data.draw(st.lists(ids, min_size=count, max_size=count)), dtype=torch.int64)
    x[bins == num_segments] = torch.nan
    expected = [torch.zeros((), dtype=dtype) for _ in range(num_segments)]
    for element, bin in zip(x, bins.tolist(), strict=True):
        if bin < num_segments:
            expected[bin] = expected[bin] + element
    assert torch.equal(reduce._ordered_sum(x, bins, num_segments), torch.stack(expected))


@pytest.mark.parametrize("num_segments", [2**15 - 1, 2**15, 70_000])
def test_ordered_sums_of_many_segments(num_segments):
    # 1 and 4 in the last one, 2 in the first one, and one that does not count
    bins = torch.tensor([num_segments - 1, 0, num_segments, num_segments - 1])
    sums = reduce._ordered_sum(torch.tensor([1.0, 2.0, NAN, 4.0]), bins, num_segments)
    assert (sums[0].item(), sums[-1].item(), sums.sum().item()) == (2.0, 5.0, 7.0)


def test_segment_sum_passes_gradient_to_counted_elements_only():
    x = torch.tensor([1.0, NAN, 4.0], requires_grad=True)
    segment_sum(x, torch.tensor([0, -1, 0]), 1).sum().backward()
    assert x.grad.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("count", [0, 1])
def test_statistics_of_nothing_to_spread_are_zero(count):
    x, mask = torch.tensor([3.0, NAN]), torch.tensor([count == 1, False])
    assert masked_mean(x, mask).item() == 3.0 * count
    assert whiten(x, mask).tolist() == [0.0, 0.0]


def test_whiten_by_hand():
    # 1, 2, 6: less 3, over sqrt(7) = 2.6457513; the mean is not added back
    x, mask = torch.tensor([1.0, 2.0, NAN, 6.0]), torch.tensor([True, True, False, True])
    torch.testing.assert_close(whiten(x, mask), torch.tensor([-0.755929, -0.377964, 0.0, 1.133893]))
    # eps joins the deviation: 2.6457513 + 0.3542487 = 3
    torch.testing.assert_close(whiten(x, mask, eps=0.3542487), torch.tensor([-2 / 3, -1 / 3, 0.0, 1.0]))
    assert whiten(torch.full((3,), 7.0), torch.tensor([True, True, False]), eps=0.0).tolist() == [0.0] * 3


def test_whiten_segments_by_hand():
    # 1, 3: less 2, over sqrt(2); 1, 2, 6: as above; a lone element has no deviation; -1 is absent
    x = torch.tensor([[1.0, 1.0, NAN, 3.0], [2.0, 7.0, 6.0, 5.0]])
    segment = torch.tensor([[0, 1, 1, 0], [1, 2, 1, -1]])
    mask = torch.tensor([[True, True, False, True], [True, True, True, True]])
    expected = torch.tensor([[-0.707107, -0.755929, 0.0, 0.707107], [-0.377964, 0.0, 1.133893, 0.0]])
    torch.testing.assert_close(whiten_segments(x, segment, 4, mask), expected, atol=1e-6, rtol=0)


@settings(deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 40), num_segments=st.integers(1, 5))
def test_each_segment_is_whitened_by_itself(seed, rows, num_segments):
    generator = torch.Generator().manual_seed(seed)
    x, mask = 3 + 2 * torch.randn(rows, generator=generator), torch.rand(rows, generator=generator) < 0.8
    segment = torch.randint(num_segments, (rows,), generator=generator)
    out = whiten_segments(x, segment, num_segments, mask)
    for number in range(num_segments):
        chosen = segment == number
        torch.testing.assert_close(out[chosen], whiten(x[chosen], mask[chosen]), atol=1e-4, rtol=1e-4)


def test_token_mean_weights_by_hand():
    # segment 0 has two elements that count, segment 1 one, segment 2 none
    mask = torch.tensor([True, True, False, True, False])
    segment = torch.tensor([0, 1, 0, 0, 2])
    assert token_mean_weights(mask, segment, 3).tolist() == [0.5, 1.0, 0.0, 0.5, 0.0]


def test_segments_are_one_over_two_ranks(two_ranks):
    # this rank has 1, 3 in segment 0 and 2 in segment 1; the other 6 in segment 1, of which this rank knows no more
    here = torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0, 0, 1])
    there = torch.tensor([6.0]), torch.tensor([1])

    def weights(x, segment, all_sum):
        return token_mean_weights(torch.ones(len(x)).bool(), segment, 2, all_sum=all_sum)

    def whitened(x, segment, all_sum):
        return whiten_segments(x, segment, 2, torch.ones(len(x)).bool(), all_sum=all_sum)

    assert two_ranks(weights, here, there).tolist() == [0.5, 0.5, 0.5]
    assert two_ranks(weights, there, here).tolist() == [0.5]
    torch.testing.assert_close(two_ranks(whitened, here, there), torch.tensor([-0.707107, 0.707107, -0.707107]))
    torch.testing.assert_close(two_ranks(whitened, there, here), torch.tensor([0.707107]))


def test_whiten_leaves_tiny_deviations_their_size():
    # 1e-6 and 3e-6: deviation 1.4142136e-6 dwarfs eps 1e-8 by 141; 0.7071068 / (1 + 1e-8 / 1.4142136e-6) = 0.7021416
    x, mask = torch.tensor([1e-6, 3e-6]), torch.ones(2).bool()
    for out in (whiten(x, mask), whiten_segments(x, torch.zeros(2).long(), 1, mask)):
        torch.testing.assert_close(out, torch.tensor([-0.7021416, 0.7021416]), rtol=1e-4, atol=0)


@settings(deadline=None)
@given(value=st.floats(-1e6, 1e6, width=32), count=st.integers(1, 3000))
def test_equal_elements_have_no_deviation_however_the_mean_rounds(value, count):
    x, mask = torch.full((count,), value), torch.ones(count, dtype=torch.bool)
    assert not whiten(x, mask, eps=1e-30).any()
    halves = (torch.arange(count) >= count // 2).long()
    assert not whiten_segments(x, halves, 2, mask).any()


@settings(deadline=None, max_examples=20)
@given(seed=SEEDS)
def test_statistics_over_two_ranks_are_those_of_the_union(two_ranks, seed):
    torch.manual_seed(seed)
    x, mask = torch.randn(40) * 3 + 5, torch.rand(40) < 0.8
    here, there = (x[:13], mask[:13]), (x[13:], mask[13:])
    for of_union, of_rank in [
        (masked_mean(x, mask), masked_mean),
        (whiten(x, mask)[:13], lambda x, m, s: whiten(x, m, all_sum=s)),
        (whiten(x, mask)[:13], lambda x, m, s: whiten_segments(x, torch.zeros(len(x)).long(), 1, m, all_sum=s)),
    ]:
        torch.testing.assert_close(two_ranks(of_rank, here, there), of_union, rtol=1e-4, atol=1e-5)


# Episode 0: three elements, one masked out; episode 1: one; episode 2: fully masked; the last element belongs to none.
MASK = torch.tensor([[True, False, True], [True, False, True]])
EPISODE = torch.tensor([[0, 0, 0], [1, 2, -1]])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 3, 0, 1 / 3, 1 / 3, 0, 0]),  # three elements count
        ("seq_mean_token_mean", [1 / 4, 0, 1 / 4, 1 / 2, 0, 0]),  # two episodes, of two elements and one
        ("seq_mean_token_sum", [1 / 2, 0, 1 / 2, 1 / 2, 0, 0]),
        ("constant", [1 / 20, 0, 1 / 20, 1 / 20, 0, 0]),  # two episodes of at most 10
        ("seq_mean_token_sum_norm", [1 / 10, 0, 1 / 10, 1 / 10, 0, 0]),  # however many episodes
    ],
)
def test_loss_weights_by_hand(aggregation, expected):
    out = loss_weights(MASK, EPISODE, 3, aggregation, max_length=10)
    torch.testing.assert_close(out.flatten(), torch.tensor(expected))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_weights_of_an_empty_mask_are_zero(aggregation):
    out = loss_weights(torch.zeros_like(MASK), EPISODE, 3, aggregation, max_length=10)
    assert torch.equal(out, torch.zeros(2, 3))


@pytest.mark.parametrize("aggregation", ["constant", "seq_mean_token_sum_norm"])
def test_loss_weights_by_a_constant_need_it(aggregation):
    with pytest.raises(ValueError, match=rf"'{aggregation}' got max_length None; fix: give the most steps"):
        loss_weights(MASK, EPISODE, 3, aggregation)


@settings(deadline=None)
@given(seed=SEEDS, lengths=st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_loss_weights_sum_to_what_the_aggregation_means(seed, lengths):
    torch.manual_seed(seed)
    episode_id = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = torch.rand(episode_id.shape) < 0.7
    counted = {int(e) for e, m in zip(episode_id, mask, strict=True) if m}
    total = {a: loss_weights(mask, episode_id, len(lengths), a, max_length=6).sum().item() for a in AGGREGATIONS}
    if not counted:
        assert set(total.values()) == {0.0}
        return
    mean_length = int(mask.sum()) / len(counted)
    assert total["token_mean"] == pytest.approx(1)
    assert total["seq_mean_token_mean"] == pytest.approx(1)
    assert total["seq_mean_token_sum"] == pytest.approx(mean_length)
    assert total["constant"] == pytest.approx(mean_length / 6)
    assert total["seq_mean_token_sum_norm"] == pytest.approx(int(mask.sum()) / 6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(deadline=None, max_examples=20)
@given(seed=SEEDS, cut=st.integers(1, 3))
def test_loss_does_not_depend_on_ranks(two_ranks, aggregation, seed, cut):
    """Four episodes of 5 elements on one rank, or some on each of two, with ids dense on every rank."""
    torch.manual_seed(seed)
    term, mask = torch.randn(4, 5), torch.rand(4, 5) < 0.6
    ids = torch.arange(4)[:, None].expand(4, 5)

    def loss(mask, ids, count, all_sum=local):
        return loss_weights(mask, ids, count, aggregation, max_length=5, all_sum=all_sum)

    whole = (loss(mask, ids, 4) * term).sum()
    here, there = (mask[:cut], ids[:cut], cut), (mask[cut:], ids[cut:] - cut, 4 - cut)
    parts = (two_ranks(loss, here, there) * term[:cut]).sum() + (two_ranks(loss, there, here) * term[cut:]).sum()
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_weights_do_not_depend_on_padding_or_packing(aggregation):
    # two episodes of 2 and 3 elements: padded left, padded right, or both in one row
    layouts = {"left": [[-1, 0, 0], [1, 1, 1]], "right": [[0, 0, -1], [1, 1, 1]], "packed": [[0, 0, 1, 1, 1]]}
    weights = []
    for ids in map(torch.tensor, layouts.values()):
        weights.append(loss_weights(ids >= 0, ids, 2, aggregation, max_length=3)[ids >= 0])
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
