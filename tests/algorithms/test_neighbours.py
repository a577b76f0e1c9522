"""Values from near states, worked out by hand and held to what must be true of them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from groupwise.algorithms import advantages as neighbours
from groupwise.algorithms.advantages import anchors


def near_values(state, score, episode, *, k, pool=None):
    """Mean scores of the nearest states among the pooled ones."""
    pool = torch.arange(len(score)) if pool is None else pool
    return neighbours.nearest(state, episode, pool, k=k)(score[pool])


STATE = torch.tensor([[0.0], [1.0], [2.5], [10.0], [11.5]])
SCORE = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])
ALONE = torch.arange(5)


@pytest.mark.parametrize(
    ("k", "episode", "expected"),
    [
        (1, ALONE, [2.0, 1.0, 2.0, 16.0, 8.0]),
        (2, ALONE, [3.0, 2.5, 1.5, 10.0, 6.0]),
        (9, ALONE, [7.5, 7.25, 6.75, 5.75, 3.75]),  # all others
        (1, torch.tensor([0, 0, 1, 1, 2]), [4.0, 4.0, 2.0, 16.0, 8.0]),  # not those of the own episode
        (2, torch.tensor([0, 0, 0, 0, 1]), [16.0, 16.0, 16.0, 16.0, 6.0]),  # fewer than k
        (2, torch.zeros(5, dtype=torch.int64), [0.0] * 5),  # nobody else
    ],
)
def test_by_hand(k, episode, expected):
    torch.testing.assert_close(near_values(STATE, SCORE, episode, k=k), torch.tensor(expected))


def test_only_the_pool_is_looked_at():
    found = near_values(STATE, SCORE, ALONE, k=1, pool=torch.tensor([0, 3]))
    torch.testing.assert_close(found, torch.tensor([8.0, 1.0, 1.0, 1.0, 8.0]))


def test_features_count_by_their_deviation():
    """In raw units the second feature would decide, in which all states but one are close."""
    state = torch.tensor([[0.0, 100.0], [1.0, 130.0], [0.1, 900.0], [5.0, 101.0]])
    found = near_values(state, torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.arange(4), k=1)
    assert found.tolist() == [2.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "flat", [torch.full((5, 1), 3.7), torch.tensor([[1e3], [1e3], [1e3 + 1e-4], [1e3], [1e3 - 1e-4]])]
)
def test_a_feature_that_never_changes_but_for_rounding_means_nothing(flat):
    state = torch.cat([STATE, flat], dim=1)
    torch.testing.assert_close(near_values(state, SCORE, ALONE, k=2), near_values(STATE, SCORE, ALONE, k=2))


def test_a_state_far_from_all_others_does_not_blur_them():
    generator = torch.Generator().manual_seed(0)
    state = torch.randn(300, 3, generator=generator)
    score, alone = torch.arange(300.0), torch.arange(300)
    found = near_values(
        torch.cat([state, torch.full((1, 3), 1e4)]), torch.cat([score, score[:1]]), torch.arange(301), k=1
    )
    exact = torch.cdist(state.double(), state.double(), compute_mode="donot_use_mm_for_euclid_dist")
    expected = score[exact.fill_diagonal_(torch.inf).argmin(dim=1)]
    assert (found[:-1] == expected).float().mean() > 0.99  # features are scaled by other deviations
    assert near_values(state, score, alone, k=1).shape == (300,)


@given(st.integers(2, 60), st.integers(1, 4), st.integers(1, 8), st.integers(0, 2**20))
@settings(max_examples=40)
def test_values_are_those_of_a_loop_and_blocks_mean_nothing(count, features, k, seed):
    generator = torch.Generator().manual_seed(seed)
    state, score = torch.randn(count, features + 1, generator=generator, dtype=torch.float64).tensor_split(
        [features], dim=1
    )
    episode = torch.randint(0, 5, (count,), generator=generator)
    scaled, values = (state / state.std(dim=0, correction=0)).tolist(), score[:, 0].tolist()
    expected = []
    for place, own in zip(scaled, episode.tolist(), strict=True):
        others = zip(scaled, values, episode.tolist(), strict=True)
        near = sorted((math.dist(place, there), value) for there, value, whose in others if whose != own)[:k]
        expected.append(sum(value for _, value in near) / max(len(near), 1))
    for block in (neighbours._BLOCK, 7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(neighbours, "_BLOCK", block)
            found = near_values(5 * state + 3, score[:, 0], episode, k=k)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_anchors_are_of_one_group_and_of_members_only():
    group_id = torch.tensor([[0, 0, 1, 1], [0, 0, 1, -1]])
    obs = torch.tensor([[1, 2, 1, 2], [2, 2, 1, 1]])[..., None]
    member = torch.ones(2, 4).bool()
    member[1, 1], member[1, 3] = False, False
    ids, number = anchors(obs, group_id, member)
    assert number == 4
    assert ids.tolist() == [[0, 1, 2, 3], [1, -1, 2, -1]]
    nested = TensorDict({"b": obs, "a": {"image": torch.zeros(2, 4, 3, 3)}}, batch_size=[2, 4])
    assert torch.equal(anchors(nested, group_id, member)[0], ids)
    nested["a", "image"][1, 0, 2, 2] = 1.0
    assert anchors(nested, group_id, member)[0].tolist() == [[0, 1, 2, 3], [4, -1, 2, -1]]
    assert anchors(torch.tensor([[1e-9, 2e-9, 1e-9]]), torch.zeros(1, 3).long(), torch.ones(1, 3).bool())[1] == 2
    nobody, number = anchors(nested, group_id, member & False)
    assert (number, nobody.tolist()) == (0, [[-1] * 4] * 2)
