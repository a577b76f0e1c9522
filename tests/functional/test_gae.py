import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.functional.advantages import discounted_sum, episode_return, gae, return_to_go

NAN = float("nan")
SEEDS = st.integers(0, 2**31 - 1)


def bools(*rows):
    return torch.tensor(rows, dtype=torch.bool)


@pytest.mark.parametrize("after", [9e9, NAN])
def test_gae_terminal_value_never_counts(after):
    # t=1 terminated: A_1 = 1 - 2 = -1; t=0: 1 + 0.5 * 2 - 1 + 0.25 * -1 = 0.75
    reward, value, next_value = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, after]])
    out = gae(reward, value, next_value, bools([0, 1]), bools([0, 0]), gamma=0.5, gae_lambda=0.5)
    torch.testing.assert_close(out, torch.tensor([[0.75, -1.0]]))


@pytest.mark.parametrize(
    ("value", "next_value", "terminated", "truncated", "expected"),
    [
        # truncated: A_1 = 1 + 0.5 * 4 - 2 = 1; A_0 = 1 + 0.5 * 2 - 1 + 0.25 * 1 = 1.25
        pytest.param([1.0, 2.0], [2.0, 4.0], [0, 0], [0, 1], [1.25, 1.0], id="truncated"),
        # unfinished: 1 + 0.5 * 4 - 2
        pytest.param([2.0], [4.0], [0], [0], [1.0], id="unfinished"),
        # 1 - 2
        pytest.param([2.0], [4.0], [1], [1], [-1.0], id="both ends at once"),
    ],
)
def test_gae_by_hand(value, next_value, terminated, truncated, expected):
    rows = torch.ones(1, len(value)), torch.tensor([value]), torch.tensor([next_value])
    out = gae(*rows, bools(terminated), bools(truncated), gamma=0.5, gae_lambda=0.5)
    torch.testing.assert_close(out, torch.tensor([expected]))


@settings(deadline=None)
@given(seed=SEEDS, gamma=st.floats(0, 1), gae_lambda=st.sampled_from([0.0, 0.5, 1.0]))
def test_gae_is_that_of_a_loop_over_each_row(seed, gamma, gae_lambda):
    """Episodes end either way, or both at once; behind ends some rows have a dead slot, whose numbers mean nothing."""
    torch.manual_seed(seed)
    reward, value, next_value = torch.randn(3, 2, 20, dtype=torch.float64)
    terminated, truncated = torch.rand(2, 2, 20) < 0.2
    done = terminated | truncated
    dead = torch.zeros(2, 20, dtype=torch.bool)
    dead[1, 1:] = done[1, :-1] & ~done[1, 1:]
    reward[dead], next_value[dead], terminated[dead], truncated[dead] = NAN, NAN, False, False
    expected = torch.zeros(2, 20, dtype=torch.float64)
    for row in range(2):
        running = 0.0
        for t in reversed(range(20)):
            ahead = 0.0 if terminated[row, t] else float(next_value[row, t])
            running = 0.0 if done[row, t] else running
            running = float(reward[row, t]) + gamma * ahead - float(value[row, t]) + gamma * gae_lambda * running
            expected[row, t] = running
    out = gae(reward, value, next_value, terminated, truncated, gamma=gamma, gae_lambda=gae_lambda)
    torch.testing.assert_close(out[~dead], expected[~dead])


def test_discounted_sum_by_hand():
    # y_2 = 4, y_1 = 2 + 0.5 * 4 = 4, y_0 = 1 + 0.25 * 4 = 2
    out = discounted_sum(torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.25, 0.5, 9.0]]))
    assert out.tolist() == [[2.0, 4.0, 4.0]]


@settings(deadline=None)
@given(seed=st.integers(0, 2**31 - 1), rows=st.integers(1, 3), steps=st.integers(1, 40))
def test_discounted_sum_solves_its_recurrence(seed, rows, steps):
    torch.manual_seed(seed)
    x = torch.randn(rows, steps, dtype=torch.float64)
    discount = torch.rand(rows, steps, dtype=torch.float64).masked_fill(torch.rand(rows, steps) < 0.2, 0)
    y = discounted_sum(x, discount)
    torch.testing.assert_close(y[:, -1], x[:, -1])
    torch.testing.assert_close(y[:, :-1] - discount[:, :-1] * y[:, 1:], x[:, :-1])


def test_discount_zero_stops_nan():
    out = discounted_sum(torch.tensor([[1.0, 2.0, float("nan"), 4.0, 5.0]]), torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0]]))
    assert out[0, :2].tolist() == [3.0, 2.0]
    assert out[0, 3:].tolist() == [9.0, 5.0]


def test_return_to_go_by_hand():
    # gamma 0.5, episode ends at t=1: R_1 = 2, R_0 = 1 + 0.5 * 2; then R_3 = 8, R_2 = 4 + 0.5 * 8
    done = torch.tensor([[False, True, False, False]])
    out = return_to_go(torch.tensor([[1.0, 2.0, 4.0, 8.0]]), done, 0.5)
    assert out.tolist() == [[2.0, 2.0, 8.0, 8.0]]


def test_return_to_go_counts_the_steps_left_without_discount():
    out = return_to_go(torch.ones(2, 500), torch.zeros(2, 500).bool(), 1.0)
    assert torch.equal(out, torch.arange(500.0, 0.0, -1.0).expand(2, 500))


def test_return_to_go_is_bitwise_the_same_wherever_an_episode_stands_in_its_row():
    torch.manual_seed(0)
    episode = torch.randn(100)
    reward, done = torch.randn(3, 300), torch.zeros(3, 300).bool()
    for row, start in enumerate((0, 37, 200)):
        reward[row, start : start + 100] = episode
        done[row, start + 99] = True
    out = return_to_go(reward, done, 0.99)
    assert torch.equal(out[0, :100], out[1, 37:137])
    assert torch.equal(out[0, :100], out[2, 200:])


def test_return_to_go_keeps_double_precision():
    # 1 + 0.9 = 1.9, exact to 1e-15 only if gamma is never rounded to float32
    out = return_to_go(torch.ones(1, 2, dtype=torch.float64), torch.zeros(1, 2).bool(), 0.9)
    assert abs(out[0, 0].item() - 1.9) < 1e-15


def test_episode_return_by_hand():
    # episode 0: 1 + 2, episode 1: 8 + 16, episode 2: nothing; 4 stands in a dead slot
    reward = torch.tensor([[1.0, 2.0, 4.0, 8.0], [16.0, float("nan"), 0.0, 0.0]])
    episode_id = torch.tensor([[0, 0, -1, 1], [1, -1, -1, -1]])
    out = episode_return(reward, episode_id, 3)
    assert out.tolist() == [3.0, 24.0, 0.0]
    assert out.dtype == torch.float32


def test_episode_return_does_not_depend_on_the_order_of_rewards():
    # in single precision 2^24 + 1 is 2^24
    reward = torch.tensor([[2.0**24, 1.0, -(2.0**24)], [2.0**24, -(2.0**24), 1.0]])
    episode_id = torch.tensor([[0, 0, 0], [1, 1, 1]])
    assert episode_return(reward, episode_id, 2).tolist() == [1.0, 1.0]
