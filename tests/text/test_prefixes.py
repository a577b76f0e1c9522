import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.text.policy import find_prefixes


def rows_of(texts, groups, width=None):
    width = width or max(map(len, texts))
    tokens = torch.full((len(texts), width), -7)
    valid, group = torch.zeros_like(tokens, dtype=torch.bool), torch.full_like(tokens, -1)
    for row, (text, number) in enumerate(zip(texts, groups, strict=True)):
        where = slice(0, len(text))
        tokens[row, where], valid[row, where], group[row, where] = torch.tensor(text), True, number
    return tokens, valid, group


def test_by_hand():
    found = find_prefixes(*rows_of([[1, 2, 3, 4], [1, 2, 5], [6, 7], [6, 7, 8]], [0, 0, 4, 4]))
    # the third row is the beginning of the fourth: it keeps its last token for itself
    assert found.number.tolist() == [0, 0, 1, 1]
    assert found.length.tolist() == [2, 2, 1, 1]
    assert found.head[found.head_valid].tolist() == [1, 2, 6]
    assert found.head_valid.tolist() == [[True, True], [False, True]]
    assert [t[v].tolist() for t, v in zip(found.tail, found.tail_valid, strict=True)] == [[3, 4], [5], [7], [7, 8]]


def test_nothing_is_shared_without_members_or_a_common_token():
    assert find_prefixes(*rows_of([[1, 2, 3], [1, 2, 4]], [0, 1])) is None
    assert find_prefixes(*rows_of([[1, 2, 3], [9, 2, 3]], [0, 0])) is None


def test_a_row_without_members_makes_no_head_wider():
    long = [[1, 2, *range(5, 11)], [1, 2, *range(6, 12)]]
    found = find_prefixes(*rows_of([*long, list(range(6))], [0, 0, 1]))
    assert (found.length.tolist(), found.head.shape[1], found.tail.shape[1]) == ([2, 2, 2], 2, 6)


@given(texts=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=6), min_size=1, max_size=6), data=st.data())
def test_the_parts_hold_every_token_of_the_rows_once_in_its_place(texts, data):
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(texts), max_size=len(texts)))
    tokens, valid, group = rows_of(texts, groups, width=7)
    found = find_prefixes(tokens, valid, group)
    if found is None:
        return
    again = found.gather(found.head[..., None].float(), found.tail[..., None].float(), valid)
    assert torch.equal(again[:, 0], tokens[valid])
    assert len(found.head) == len(set(groups))
    assert bool((found.tail_valid.sum(dim=1) > 0).all())
