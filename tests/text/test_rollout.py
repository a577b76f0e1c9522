import pytest

from groupwise.errors import DataError
from groupwise.text.collector import TextRow, text_rollout

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


@pytest.mark.parametrize(
    "row",
    [
        TextRow([], [1], [0.0], 1.0, True, 0),
        TextRow([1], [], [], 1.0, True, 0),
        TextRow([1], [1, 2], [0.0], 1.0, True, 0),
    ],
)
def test_rows_that_cannot_be(row):
    with pytest.raises(DataError, match=r"row 0 has \d prompt tokens, \d completion tokens and \d log_probs; fix"):
        text_rollout([row])
