import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from groupwise.contrib.torch_tasks import TwoLinks, absolute, relative, runge_kutta


def column(first, second):
    return torch.tensor([[first], [second]])


def test_acceleration_by_hand():
    # lean: cos .6, sin .8. 3 a1 + .6 a2 + .8 * 9 = 5 and 2 a2 + .6 a1 - .8 * 4 = 1, so
    # 3 a1 + .6 a2 = -2.2 and .6 a1 + 2 a2 = 4.2; with 3 * 2 - .36 = 5.64:
    # a1 = (-2.2 * 2 - .6 * 4.2) / 5.64 = -6.92 / 5.64, a2 = (3 * 4.2 + .6 * 2.2) / 5.64 = 13.92 / 5.64
    links = TwoLinks((3.0, 2.0), 1.0)
    angle = column(math.atan2(0.8, 0.6) + 0.4, 0.4)
    out = links.acceleration(angle, column(2.0, 3.0), column(5.0, 1.0))
    torch.testing.assert_close(out, column(-1.2269504, 2.4680851))


def test_the_coupling_scales_what_the_links_do_to_each_other():
    # stretched, at rest, coupling 2: 3 a1 + 2 a2 = 1 and 2 a1 + 2 a2 = 0, so a1 = 1, a2 = -1
    out = TwoLinks((3.0, 2.0), 2.0).acceleration(column(0.7, 0.7), column(0.0, 0.0), column(1.0, 0.0))
    torch.testing.assert_close(out, column(1.0, -1.0))
    # a right angle, coupling 2: 3 a1 + 2 * 1 * 2^2 = 0, 2 a2 - 2 * 1 * 3^2 = 0
    out = TwoLinks((3.0, 2.0), 2.0).acceleration(column(math.pi / 2, 0.0), column(3.0, 2.0), column(0.0, 0.0))
    torch.testing.assert_close(out, column(-8 / 3, 9.0))


def test_links_turn_rigidly_when_stretched():
    links = TwoLinks((3.0, 2.0), 1.5)
    out = links.acceleration(column(0.3, 0.3), column(4.0, 4.0), column(0.0, 0.0))
    assert torch.equal(out, column(0.0, 0.0))


def test_joints_and_links_by_hand():
    assert torch.equal(absolute(column(1.0, 0.5)), column(1.0, 1.5))
    assert torch.equal(relative(column(1.0, 1.5)), column(1.0, 0.5))


NUMBERS = st.floats(-8, 8, width=32)


@given(NUMBERS, NUMBERS)
def test_rates_of_links_give_back_those_of_joints(turn, bend):
    rate = column(turn, bend)
    torch.testing.assert_close(relative(absolute(rate)), rate, rtol=0, atol=1e-5)


def test_runge_kutta_by_hand():
    # x'' = -x from 1 at rest, h = .1: k1 = k2 = -1, k3 = -(1 - .0025), k4 = -(1 - .005)
    # x = 1 - .01 / 6 * (1 + 1 + .9975), v = -.1 / 6 * (1 + 2 + 2 * .9975 + .995)
    x, v = runge_kutta(lambda x, _: -x, torch.tensor([1.0]), torch.tensor([0.0]), 0.1)
    torch.testing.assert_close(x, torch.tensor([0.99500417]))
    torch.testing.assert_close(v, torch.tensor([-0.09983333]))
    # v' = -v from 1: the exponential's series to the fourth power, and its integral
    x, v = runge_kutta(lambda _, v: -v, torch.tensor([0.0]), torch.tensor([1.0]), 0.1)
    torch.testing.assert_close(v, torch.tensor([1 - 0.1 + 0.005 - 0.001 / 6 + 0.0001 / 24]))
    torch.testing.assert_close(x, torch.tensor([0.1 - 0.005 + 0.001 / 6 - 0.0001 / 24]))


def test_runge_kutta_is_of_fourth_order():
    """With a step of half the length, the error of a swing with friction is a sixteenth."""

    def swing(steps):
        x, v = torch.tensor([1.2], dtype=torch.float64), torch.tensor([-2.0], dtype=torch.float64)
        for _ in range(steps):
            x, v = runge_kutta(lambda x, v: -4 * x.sin() - 0.3 * v, x, v, 2.0 / steps)
        return torch.cat([x, v])

    exact = swing(4096)
    ratio = (swing(64) - exact).norm() / (swing(128) - exact).norm()
    assert float(ratio) == pytest.approx(16, rel=0.1)


def test_free_links_keep_their_energy():
    """1/2 I_1 v_1^2 + 1/2 I_2 v_2^2 + k cos(p_1 - p_2) v_1 v_2, within 1 in 5,000 after 100 steps of 0.005 s."""
    links = TwoLinks((0.5, 0.25), 0.3)

    def energy(angle, rate):
        lean = angle[0] - angle[1]
        return 0.25 * rate[0] ** 2 + 0.125 * rate[1] ** 2 + 0.3 * lean.cos() * rate[0] * rate[1]

    random = torch.Generator().manual_seed(0)
    angle, rate = 8 * torch.rand(2, 2, 1000, generator=random) - 4
    before = energy(angle, rate)
    for _ in range(100):
        angle, rate = runge_kutta(lambda p, v: links.acceleration(p, v, torch.zeros_like(v)), angle, rate, 0.005)
    torch.testing.assert_close(energy(angle, rate), before, rtol=2e-4, atol=1e-5)
