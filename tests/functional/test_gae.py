import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.functional.advantages import discounted_sum, episode_return, gae, return_to_go, running_sum

NAN = float("nan")
SEEDS = st.integers(0, 2**31 - 1)


def bools(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def test_gae_truncation_bootstraps_from_the_true_successor():
    # one row, two steps, gamma 0.5, lambda 0.5:
    # t=1 truncated: delta = 1 + 0.5 * 4 - 2 = 1.0 -> A_1 = 1.0
    # t=0: delta = 1 + 0.5 * 2 - 1 = 1.0 -> A_0 = 1.0 + 0.25 * 1.0 = 1.25
    reward, value, next_value = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, 4.0]])
    out = gae(reward, value, next_value, bools([0, 0]), bools([0, 1]), gamma=0.5, gae_lambda=0.5)
    torch.testing.assert_close(out, torch.tensor([[1.25, 1.0]]))


@pytest.mark.parametrize("after", [9e9, NAN])
def test_gae_terminal_value_never_counts(after):
    # t=1 terminated: A_1 = 1 - 2 = -1; t=0: 1 + 0.5 * 2 - 1 + 0.25 * -1 = 0.75
    reward, value, next_value = torch.tensor([[1.0, 1.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[2.0, after]])
    out = gae(reward, value, next_value, bools([0, 1]), bools([0, 0]), gamma=0.5, gae_lambda=0.5)
    torch.testing.assert_close(out, torch.tensor([[0.75, -1.0]]))


def test_gae_unfinished_row_bootstraps_from_what_follows_it():
    # gamma 0.5: 1 + 0.5 * 4 - 2
    one = torch.ones(1, 1)
    out = gae(one, 2 * one, 4 * one, bools([0]), bools([0]), gamma=0.5, gae_lambda=0.9)
    assert out.item() == 1.0


def test_gae_of_an_episode_both_terminated_and_truncated_does_not_bootstrap():
    one = torch.ones(1, 1)
    assert gae(one, 2 * one, 4 * one, bools([1]), bools([1]), gamma=0.5, gae_lambda=0.9).item() == -1.0


class Episodes:
    """Two episodes of 3 and 2 steps in one row, the first ended by ``end``, and the values that a critic gave."""

    def __init__(self, end):
        self.end = end
        self.reward = [[1.0, 2.0, -1.0], [0.5, 3.0]]
        self.value = [[0.3, -0.7, 1.1, 2.0], [0.9, -0.4, 0.6]]  # with that of the observation after the last step

    def row(self, dead_slot):
        """Reward, value, next_value, terminated, truncated, and where the real steps stand."""
        first, second = self.value
        filler = [dead_slot] if dead_slot is not None else []
        reward = [*self.reward[0], *filler, *self.reward[1]]
        value = [*first[:3], *([first[3]] if filler else []), *second[:2]]
        next_value = [*first[1:], *filler, *second[1:]]
        ended = [[step == 2 for step in range(len(reward))]]
        no = [[False] * len(reward)]
        terminated, truncated = (ended, no) if self.end == "terminated" else (no, ended)
        steps = [0, 1, 2, *range(len(reward) - 2, len(reward))]
        row = [torch.tensor([x]) for x in (reward, value, next_value)]
        return row, [torch.tensor(terminated), torch.tensor(truncated)], steps


# SAME_STEP and DISABLED put the next start right after the end, and the final observation's value in next_value alone;
# NEXT_STEP puts the final observation in a dead slot, whose reward and successor mean nothing.
@pytest.mark.parametrize("dead_slot", [None, 0.0, 1e9, NAN])
@pytest.mark.parametrize("end", ["terminated", "truncated"])
class TestGaeLayouts:
    def test_lambda_one_is_discounted_return_less_value(self, end, dead_slot):
        row, ends, steps = Episodes(end).row(dead_slot)
        out = gae(*row, *ends, gamma=0.5, gae_lambda=1.0)[0, steps]
        # first: 1 + 2/2 - 1/4 = 1.75, 2 - 1/2 = 1.5, -1, and V = 2 over 8, 4, 2 if truncated; second: V = .6 follows it
        bootstrap = [0.25, 0.5, 1.0] if end == "truncated" else [0.0, 0.0, 0.0]
        first = [1.75 + bootstrap[0] - 0.3, 1.5 + bootstrap[1] + 0.7, -1 + bootstrap[2] - 1.1]
        second = [0.5 + 3 / 2 + 0.6 / 4 - 0.9, 3 + 0.6 / 2 + 0.4]
        torch.testing.assert_close(out, torch.tensor(first + second))

    def test_lambda_zero_is_the_td_error(self, end, dead_slot):
        row, ends, steps = Episodes(end).row(dead_slot)
        out = gae(*row, *ends, gamma=0.5, gae_lambda=0.0)[0, steps]
        last = -1 + (1.0 if end == "truncated" else 0.0) - 1.1
        expected = [1 - 0.35 - 0.3, 2 + 0.55 + 0.7, last, 0.5 - 0.2 - 0.9, 3 + 0.3 + 0.4]
        torch.testing.assert_close(out, torch.tensor(expected))

    def test_between_it_is_the_weighted_sum_of_td_errors(self, end, dead_slot):
        row, ends, steps = Episodes(end).row(dead_slot)
        out = gae(*row, *ends, gamma=0.5, gae_lambda=0.5)[0, steps]
        error = gae(*row, *ends, gamma=0.5, gae_lambda=0.0)[0, steps].tolist()
        first = [error[0] + error[1] / 4 + error[2] / 16, error[1] + error[2] / 4, error[2]]
        second = [error[3] + error[4] / 4, error[4]]
        torch.testing.assert_close(out, torch.tensor(first + second))


@settings(deadline=None)
@given(seed=SEEDS, gamma=st.floats(0, 1))
def test_gae_of_lambda_one_telescopes(seed, gamma):
    """With the values of a whole row's own returns nothing is left over."""
    torch.manual_seed(seed)
    reward = torch.randn(3, 20, dtype=torch.float64)
    terminated, no = torch.rand(3, 20) < 0.2, torch.zeros(3, 20).bool()
    value = return_to_go(reward, terminated, gamma)
    successor = torch.cat([value[:, 1:], torch.zeros(3, 1)], dim=1)
    out = gae(reward, value, successor, terminated, no, gamma=gamma, gae_lambda=1.0)
    torch.testing.assert_close(out, torch.zeros_like(out))


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
    assert episode_return(reward, episode_id, 3).tolist() == [3.0, 24.0, 0.0]


def test_running_sum_starts_anew_with_each_episode():
    # episode 3: 1, 1 + 2; a dead slot; episode 0: 8, 8 + 16
    x = torch.tensor([[1.0, 2.0, float("nan"), 8.0, 16.0]])
    out = running_sum(x, torch.tensor([[3, 3, -1, 0, 0]]))[0].tolist()
    assert out[:2] + out[3:] == [1.0, 3.0, 8.0, 24.0]
