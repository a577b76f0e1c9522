import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_updates import make_policy

from groupwise.data.minibatch import Rows, RowSizes, Steps, pack, shuffle_items, shuffle_rows, take


def shuffled(count, parts, micro, seed=0):
    """An epoch of transitions."""
    elements = {"loss_mask": torch.ones(count).bool(), "episode_id": torch.zeros(count).long()}
    return Steps(make_policy(actor_only=True), "transition").shuffle(elements, parts, micro, generator(seed))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def covered(slices: list[slice]) -> list[int]:
    return [i for s in slices for i in range(s.start, s.stop)]


@given(count=st.integers(1, 200), parts=st.integers(1, 20), micro=st.none() | st.integers(1, 50))
def test_transitions_are_each_used_once_in_even_parts(count, parts, micro):
    epoch = shuffled(count, parts, micro)
    assert sorted(epoch.order.tolist()) == list(range(count))
    assert [i for part in epoch.minibatches for i in covered(part)] == list(range(count))
    sizes = [len(covered(part)) for part in epoch.minibatches]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
    if micro is not None:
        assert all(s.stop - s.start <= micro for part in epoch.minibatches for s in part)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    parts=st.integers(1, 6),
    micro=st.none() | st.integers(1, 12),
    seed=st.integers(0, 5),
)
def test_items_are_never_parted(sizes, parts, micro, seed):
    # elements of the items stand interleaved, as episodes of several rows do
    item = torch.cat([torch.full((n,), k) for k, n in enumerate(sizes)])
    item = item[torch.randperm(len(item), generator=generator(seed))]
    epoch = shuffle_items(item, torch.ones_like(item), parts, micro, generator(seed))
    assert sorted(epoch.order.tolist()) == list(range(len(item)))
    assert [i for part in epoch.minibatches for i in covered(part)] == list(range(len(item)))
    owners = [{int(i) for i in item[epoch.order][s]} for part in epoch.minibatches for s in part]
    assert sum(len(owner) for owner in owners) == len(sizes)
    for part in epoch.minibatches:
        for s in part:
            whole = len({int(i) for i in item[epoch.order][s]}) == 1
            assert micro is None or s.stop - s.start <= micro or whole
        # no part is further from its even share than the largest item
        assert abs(len(covered(part)) - len(item) / parts) <= max(sizes)


@pytest.mark.parametrize("micro", [None, 3])
def test_a_rank_without_any_steps_has_empty_minibatches(micro):
    nothing = torch.zeros(0, dtype=torch.int64)
    for epoch in (shuffle_items(nothing, nothing, 3, micro, generator()), shuffled(0, 3, micro)):
        assert (len(epoch.order), epoch.minibatches) == (0, [[], [], []])


def test_rows_are_balanced_by_what_they_hold():
    # rows of 1, 1, 1 and 3 steps in two halves: whatever the order, the row of 3 stands against the others or nearly so
    size = torch.tensor([1, 1, 1, 3])
    for seed in range(8):
        epoch = shuffle_items(torch.arange(4), size, 2, None, generator(seed))
        halves = [int(size[epoch.order][part[0]].sum()) for part in epoch.minibatches]
        assert sorted(halves) in ([3, 3], [2, 4])


def test_order_follows_the_seed():
    a, b, c = (shuffled(50, 2, None, seed).order for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_what_a_micro_batch_must_not_cut():
    policy = make_policy(actor_only=True)
    assert [Steps(policy, unit).item for unit in ("transition", "episode")] == ["transition", "episode"]
    assert Rows(policy, "episode").item == "row"


def test_slices_are_views():
    batch = {"obs": torch.arange(6.0)}
    assert take(batch, slice(2, 4))["obs"].data_ptr() == batch["obs"][2:].data_ptr()


def sizes(*rows):
    """Rows of (group, head, tail)."""
    group, head, tail = (torch.tensor(column, dtype=torch.long) for column in zip(*rows, strict=True))
    return RowSizes(group, head, tail, tail)


def slots(text):
    return torch.tensor([[c == "x" for c in row] for row in text.split()])


def test_sizes_by_hand():
    group = torch.tensor([[1, 1, 1, 1, -1], [-1, 0, 0, 0, -1], [-1, -1, -1, -1, -1]])
    rows = {"valid": slots("xxxx. .xxx. xxxxx"), "loss_mask": slots("..xx. ..xx. ....."), "group_id": group}
    found = RowSizes.of(rows, shared=True)
    assert RowSizes.of(rows, shared=False).group.tolist() == [0, 1, 2]
    # the third row belongs to no group, so it is one of its own; nothing of it counts, so none of it is head
    assert [column.tolist() for column in found] == [[1, 0, 4], [2, 1, 0], [2, 2, 5], [2, 2, 0]]


def test_the_longest_group_comes_first_and_members_stand_together():
    rows = sizes((0, 3, 2), (1, 4, 1), (0, 3, 9), (1, 4, 5), (2, 1, 1))
    order, slices = pack(rows, torch.arange(5), None)
    assert order.tolist() == [2, 0, 3, 1, 4]
    assert slices == [slice(0, 5)]


def test_a_shared_head_counts_once():
    rows = sizes(*[(0, 10, 2)] * 4)
    # 10 + 4 * 2 = 18 tokens; with 17, the fourth row stands alone
    assert pack(rows, torch.arange(4), 18)[1] == [slice(0, 4)]
    assert pack(rows, torch.arange(4), 17)[1] == [slice(0, 3), slice(3, 4)]


def test_padding_counts():
    rows = sizes((0, 1, 8), (1, 5, 1))
    # heads 2 * 5 and tails 2 * 8
    assert pack(rows, torch.arange(2), 26)[1] == [slice(0, 2)]
    assert pack(rows, torch.arange(2), 25)[1] == [slice(0, 1), slice(1, 2)]


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=20)


@given(ROWS, st.integers(1, 4), st.none() | st.integers(1, 40), st.integers(0, 9))
def test_every_row_once_in_slices_that_fit(rows, num_minibatches, most, seed):
    generator = torch.Generator().manual_seed(seed)
    epoch = shuffle_rows(sizes(*rows), num_minibatches, most, generator)
    assert sorted(epoch.order.tolist()) == list(range(len(rows)))
    assert len(epoch.minibatches) == num_minibatches
    covered = [i for parts in epoch.minibatches for part in parts for i in range(part.start, part.stop)]
    assert covered == list(range(len(rows)))
    for part in (part for parts in epoch.minibatches for part in parts):
        chosen = [rows[i] for i in epoch.order[part].tolist()]
        heads = len({group for group, _, _ in chosen}) * max(head for _, head, _ in chosen)
        tokens = heads + len(chosen) * max(tail for _, _, tail in chosen)
        assert most is None or tokens <= most or len(chosen) == 1


def test_a_rank_without_rows_has_nothing_to_pack():
    empty = torch.zeros(0, 4, dtype=torch.bool)
    rows = {"valid": empty, "loss_mask": empty, "group_id": torch.zeros(0, 4, dtype=torch.long)}
    found = RowSizes.of(rows, shared=True)
    assert [column.tolist() for column in found] == [[], [], [], []]
    epoch = shuffle_rows(found, 2, None, torch.Generator())
    assert epoch.minibatches == [[], []]
