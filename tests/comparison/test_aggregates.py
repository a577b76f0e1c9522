"""Statistics of several runs: literals, properties, and the numbers of others' implementations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from groupwise.comparison.results import (
    GRID,
    bootstrap_interval,
    common_grid,
    curve,
    estimate,
    iqm,
    mean_height,
    probability_of_improvement,
)

NUMBER = st.integers(-1000, 1000).map(float)
SCORES = st.lists(NUMBER, min_size=1, max_size=30).map(np.array)
SEVERAL = st.lists(NUMBER, min_size=2, max_size=12).map(np.array)

X = np.array([
    [0.10, 0.92, 0.55], [0.31, 0.88, 0.40], [0.27, 0.95, 0.61], [0.45, 0.60, 0.58],
    [0.18, 0.91, 0.12], [0.39, 0.97, 0.66], [0.22, 0.85, 0.50],
])  # fmt: skip
Y = np.array([[0.20, 0.81, 0.55], [0.11, 0.79, 0.30], [0.25, 0.88, 0.41], [0.33, 0.90, 0.62], [0.18, 0.70, 0.22]])
"""Runs x environments."""


def test_iqm_leaves_out_a_quarter_on_each_side():
    assert iqm(np.array([100.0, 2.0, 3.0, -50.0])) == 2.5  # (2 + 3) / 2
    assert iqm(np.array([9.0, 1.0, 2.0, 3.0, 4.0])) == 3.0  # 5 // 4 = 1 left out: (2 + 3 + 4) / 3
    assert iqm(np.array([0.0, 1.0, 5.0])) == 2.0  # of three, none


@given(SCORES)
def test_iqm_is_the_trimmed_mean_of_scipy(scores):
    assert iqm(scores) == pytest.approx(stats.trim_mean(scores, 0.25))


def test_probability_by_counting_pairs():
    # (3 > 1), (3 > 2), (3 = 3) | (1 = 1), (1 < 2), (1 < 3): (1 + 1 + 1/2 + 1/2) / 6
    assert probability_of_improvement(np.array([3.0, 1.0]), np.array([1.0, 2.0, 3.0])) == 0.5
    assert probability_of_improvement(np.array([2.0]), np.array([2.0, 3.0])) == 0.25


@given(SCORES, SCORES)
def test_probability_is_mann_whitney_over_the_pairs(x, y):
    u = stats.mannwhitneyu(x, y, method="asymptotic" if np.ptp(np.concatenate([x, y])) else "exact").statistic
    assert probability_of_improvement(x, y) == pytest.approx(u / (len(x) * len(y)))


@given(SEVERAL)
def test_a_method_above_all_of_another_is_surely_better(scores):
    above = scores + np.ptp(scores) + 1
    found = estimate(probability_of_improvement, [above, scores], 100)
    assert (found.value, found.interval) == (1.0, (1.0, 1.0))
    assert probability_of_improvement(scores, scores) == 0.5


def test_probability_is_the_mean_over_environments():
    better, worse = np.array([2.0, 3.0]), np.array([0.0, 1.0])
    assert probability_of_improvement(better, better, worse, better) == 0.75  # 1 and 1/2
    assert probability_of_improvement(better, worse, worse, better) == 0.5  # 1 and 0


def test_numbers_of_rliable():
    """rliable 1.2.0 (arch 7.2.0): ``get_interval_estimates`` of X and Y and of their first columns, for ``aggregate_iqm``
    and ``probability_of_improvement``, 50,000 resamples, ``RandomState(0)``.
    """
    found = [estimate(iqm, list(scores.T), 50_000) for scores in (X, Y, X[:, :1])]
    assert [one.value for one in found] == pytest.approx([0.5363636363636364, 0.4633333333333333, 0.274], abs=1e-12)
    assert found[0].interval == pytest.approx((0.45363636, 0.60272727), abs=0.004)
    assert found[1].interval == pytest.approx((0.38555556, 0.54), abs=0.004)
    assert found[2].interval == pytest.approx((0.18, 0.374), abs=0.004)
    both, first = [X.T, Y.T], [X.T[:1], Y.T[:1]]
    found = [estimate(probability_of_improvement, [*x, *y], 50_000) for x, y in (both, first)]
    assert [one.value for one in found] == pytest.approx([0.6714285714285714, 0.6428571428571429], abs=1e-12)
    assert found[0].interval == pytest.approx((0.48571429, 0.84761905), abs=0.011)  # in steps of 1 / 105
    assert found[1].interval == pytest.approx((0.31428571, 0.94285714), abs=0.03)  # in steps of 1 / 35


def test_runs_of_an_environment_are_drawn_from_it_alone():
    """Drawn from all at once, the mean of two environments would vary; drawn from each, it cannot."""
    assert estimate(iqm, [X[:, 0]]) == estimate(iqm, [X[:, 0]])  # the same runs give the same
    constant = [np.full(4, 0.0), np.full(4, 1.0)]
    assert estimate(iqm, constant, 200).interval == (0.5, 0.5)


@given(SEVERAL)
def test_interval_is_within_the_scores_and_holds_for_shifted_ones(scores):
    low, high = estimate(iqm, [scores], 200).interval
    assert scores.min() - 1e-9 <= low <= high <= scores.max() + 1e-9
    moved = estimate(iqm, [scores + 1000.0], 200).interval
    assert moved == pytest.approx((low + 1000, high + 1000))


@given(st.lists(NUMBER, min_size=4, max_size=12, unique=True).map(np.array))
def test_more_runs_alike_narrow_the_interval(scores):
    width = np.ptp(estimate(iqm, [scores], 500).interval)
    assert np.ptp(estimate(iqm, [np.tile(scores, 9)], 500).interval) < width


def test_a_single_run_has_no_interval():
    assert estimate(iqm, [np.array([5.0]), np.array([5.0, 6.0])]).interval is None
    found = curve(np.array([0.0, 1.0]), np.array([[1.0], [2.0]]))
    assert (found.iqm, found.low, found.high) == ((1.0, 2.0), None, None)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    found = [bootstrap_interval(iqm, [rng.normal(size=30)], 400) for _ in range(200)]
    # 95 % of 200, a little less for the percentile bootstrap
    assert 178 <= sum(low <= 0 <= high for low, high in found) <= 198


def test_curves_are_read_where_all_of_them_have_points():
    grid = common_grid([(100, 1000), (200, 1200), (150, 1100)])
    assert (grid[0], grid[-1], len(grid)) == (200, 1000, GRID)
    assert np.allclose(np.diff(grid), 8)
    assert common_grid([(900, 1000), (1100,)]).tolist() == [1000]


def test_mean_height_is_area_over_width():
    grid = np.array([0.0, 2.0, 3.0])
    curves = np.array([[1.0, 7.0], [1.0, 5.0], [1.0, 3.0]])
    # second: (7 + 5) / 2 * 2 + (5 + 3) / 2 * 1 = 16, over 3
    assert mean_height(grid, curves).tolist() == pytest.approx([1.0, 16 / 3])
    assert mean_height(np.array([5.0]), np.array([[1.0, 2.0]])).tolist() == [1.0, 2.0]


def test_band_holds_whole_runs_together():
    """The second point is the first plus one, in each draw, too."""
    runs = np.array([1.0, 4.0, 9.0, 2.0])
    found = curve(np.array([0.0, 1.0]), np.stack([runs, runs + 1]))
    assert found.iqm == (3.0, 4.0)
    assert np.allclose(np.subtract(found.low[1], found.low[0]), 1)
    assert found.low[0] < found.iqm[0] < found.high[0]
