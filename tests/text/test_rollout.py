import pytest
import torch

from groupwise.errors import DataError
from groupwise.text.rollout import TextRow, text_rollout

ROWS = [
    TextRow([7, 8], [4, 5, 3], [-0.5, -1.0, -1.5], 2.0, True, 0),
    TextRow([9], [6, 6], [-0.25, -0.75], None, False, 1),
]


def test_rows_by_hand():
    rollout = text_rollout(ROWS)
    assert rollout.shape == (2, 5)
    assert rollout["obs"].tolist() == [[7, 8, 4, 5, 3], [9, 6, 6, 0, 0]]
    assert rollout["action"].tolist() == [[8, 4, 5, 3, 0], [6, 6, 0, 0, 0]]
    assert rollout["valid"].int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]]
    # the prompt's tokens were not chosen; nobody could score the second row
    assert rollout["loss_mask"].int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 0, 0, 0]]
    assert rollout["sample_log_prob"].tolist() == [[0, -0.5, -1.0, -1.5, 0], [-0.25, -0.75, 0, 0, 0]]
    assert rollout["reward"].tolist() == [[0, 0, 0, 2, 0], [0, 0, 0, 0, 0]]
    assert rollout["terminated"].int().tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]
    assert rollout["truncated"].int().tolist() == [[0, 0, 0, 0, 0], [0, 1, 0, 0, 0]]
    assert rollout["group_id"].tolist() == [[0, 0, 0, 0, -1], [1, 1, -1, -1, -1]]
    assert rollout["episode_id"].tolist() == [[0, 0, 0, 0, -1], [1, 1, -1, -1, -1]]
    assert rollout["step"].tolist() == [[0, 1, 2, 3, 0], [0, 1, 0, 0, 0]]


def test_rewards_of_single_tokens_stand_where_the_tokens_are():
    rows = [ROWS[0]._replace(reward=(0.5, -1.0, 2.0)), ROWS[1]._replace(reward=[0.25, 0.0])]
    assert text_rollout(rows)["reward"].tolist() == [[0, 0.5, -1.0, 2.0, 0], [0.25, 0, 0, 0, 0]]
    assert text_rollout(rows, padding="left")["reward"].tolist() == [[0, 0.5, -1.0, 2.0, 0], [0, 0, 0.25, 0, 0]]


def test_padding_on_the_left_moves_rows_and_changes_nothing_in_them():
    right, left = text_rollout(ROWS), text_rollout(ROWS, padding="left")
    for key in right.keys():  # noqa: SIM118  iterating goes over rows
        assert torch.equal(left[key][0], right[key][0])
        # three tokens of five slots: the text moves by two
        assert torch.equal(left[key][1, 2:], right[key][1, :3])
    assert not left["valid"][1, :2].any()
    assert left["group_id"][1, :2].tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (TextRow([], [1], [0.0], 1.0, True, 0), "row 0 has no prompt"),
        (TextRow([1], [], [], 1.0, True, 0), "row 0 has no completion"),
        (TextRow([1], [1, 2], [0.0], 1.0, True, 0), "1 log-probabilities for 2 tokens"),
        (TextRow([1], [1, 2], [0.0, 0.0], [1.0], True, 0), "1 rewards for 2 tokens"),
    ],
)
def test_rows_that_cannot_be(row, message):
    with pytest.raises(DataError, match=message):
        text_rollout([row])
