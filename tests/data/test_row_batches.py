import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.data.minibatch import RowSizes, pack, shuffle_rows


def sizes(*rows):
    """Rows of (group, head, tail)."""
    group, head, tail = (torch.tensor(column, dtype=torch.long) for column in zip(*rows, strict=True))
    return RowSizes(group, head, tail, tail)


def slots(text):
    return torch.tensor([[c == "x" for c in row] for row in text.split()])


def test_sizes_by_hand():
    found = RowSizes.of(
        valid=slots("xxxx. .xxx. xxxxx"),
        loss_mask=slots("..xx. ..xx. ....."),
        group_id=torch.tensor([[1, 1, 1, 1, -1], [-1, 0, 0, 0, -1], [-1, -1, -1, -1, -1]]),
    )
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
    epoch = shuffle_rows(sizes(*rows), num_minibatches=num_minibatches, micro_batch_size=most, generator=generator)
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
    found = RowSizes.of(valid=empty, loss_mask=empty, group_id=torch.zeros(0, 4, dtype=torch.long))
    assert [column.tolist() for column in found] == [[], [], [], []]
    epoch = shuffle_rows(found, num_minibatches=2, micro_batch_size=None, generator=torch.Generator())
    assert epoch.minibatches == [[], []]
