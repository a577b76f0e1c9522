import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_updates import make_policy

from groupwise.data.minibatch import Rows, Steps, shuffle_items, shuffle_transitions, take


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def covered(slices: list[slice]) -> list[int]:
    return [i for s in slices for i in range(s.start, s.stop)]


@given(count=st.integers(1, 200), parts=st.integers(1, 20), micro=st.none() | st.integers(1, 50))
def test_transitions_are_each_used_once_in_even_parts(count, parts, micro):
    epoch = shuffle_transitions(count, num_minibatches=parts, micro_batch_size=micro, generator=generator())
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
    epoch = shuffle_items(
        item, torch.ones_like(item), num_minibatches=parts, micro_batch_size=micro, generator=generator(seed)
    )
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
    for epoch in (
        shuffle_items(nothing, nothing, num_minibatches=3, micro_batch_size=micro, generator=generator()),
        shuffle_transitions(0, num_minibatches=3, micro_batch_size=micro, generator=generator()),
    ):
        assert (len(epoch.order), epoch.minibatches) == (0, [[], [], []])


def test_rows_are_balanced_by_what_they_hold():
    # rows of 1, 1, 1 and 3 steps in two halves: whatever the order, the row of 3 stands against the others or nearly so
    size = torch.tensor([1, 1, 1, 3])
    for seed in range(8):
        epoch = shuffle_items(
            torch.arange(4), size, num_minibatches=2, micro_batch_size=None, generator=generator(seed)
        )
        halves = [int(size[epoch.order][part[0]].sum()) for part in epoch.minibatches]
        assert sorted(halves) in ([3, 3], [2, 4])


def test_order_follows_the_seed():
    kwargs = {"num_minibatches": 2, "micro_batch_size": None}
    a, b, c = (shuffle_transitions(50, generator=generator(seed), **kwargs).order for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_what_a_micro_batch_must_not_cut():
    policy = make_policy(actor_only=True)
    assert [Steps(policy, unit).unit for unit in ("transition", "episode")] == ["transition", "episode"]
    assert Rows(policy, "episode").unit == "row"


def test_slices_are_views():
    batch = {"obs": torch.arange(6.0)}
    assert take(batch, slice(2, 4))["obs"].data_ptr() == batch["obs"][2:].data_ptr()
