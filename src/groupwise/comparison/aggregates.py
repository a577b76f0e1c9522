"""Statistics of several runs: what stands for them all, how sure that is, which of two methods is ahead.

Scores are arrays whose last axis is the runs (seeds), one array per environment: environments are strata, whose runs are
drawn again separately. Knows arrays only, so that whatever recorded the scores can use it.

Source: Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice"
(https://arxiv.org/abs/2108.13264), sections 4.1 to 4.3, and its library rliable.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Number = int | float
Statistic = Callable[..., Array]
"""Arrays, one a stratum, runs on the last axis -> a number for everything before that axis."""

RESAMPLES = 10_000
"""Of a score's interval: its ends vary by about a hundredth of its width."""
BAND_RESAMPLES = 2_000
"""Of the interval at each point of a curve."""
SEED = 0
"""Of the bootstrap: the same runs give the same interval."""
GRID = 101
"""Points of a curve."""


@dataclass(frozen=True)
class Estimate:
    """A statistic of some runs."""

    value: float
    interval: tuple[float, float] | None
    """95 % bootstrap interval; None where an environment has one run only, which tells nothing about others."""


class Band(NamedTuple):
    """A statistic at each point of a curve."""

    value: tuple[float, ...]
    low: tuple[float, ...] | None
    """Lower ends of the 95 % intervals; None with one run only."""
    high: tuple[float, ...] | None


def iqm(*strata: Array) -> Array:
    """Interquartile mean: the mean of the middle half of all runs of all environments.

    The lowest and the highest quarter, rounded down to whole runs, are left out, so that up to three runs are all used.
    Environments count alike: where one has fewer runs, its runs count more often.

    Args:
        strata: scores [..., run], one array an environment, all on one scale.
    """
    common = math.lcm(*(scores.shape[-1] for scores in strata))
    pooled = np.concatenate(strata, axis=-1)
    counts = np.concatenate([np.full(scores.shape[-1], common // scores.shape[-1]) for scores in strata])
    total = common * len(strata)
    cut = total // 4
    order = np.argsort(pooled, axis=-1)
    end = np.cumsum(counts[order], axis=-1)  # as if each run stood there as often as it counts
    kept = end.clip(cut, total - cut) - (end - counts[order]).clip(cut, total - cut)
    return np.asarray((np.take_along_axis(pooled, order, axis=-1) * kept).sum(axis=-1) / (total - 2 * cut))


def probability_of_improvement(*strata: Array) -> Array:
    """Probability that a run of one method scores more than one of the other; ties count one half.

    P(X > Y) = U / (n m) with the statistic U of Mann and Whitney, averaged over the environments.

    Args:
        strata: the scores [..., run] of X in each environment, followed by those of Y in the same order.
    """
    half = len(strata) // 2
    return np.asarray(np.mean([_superiority(x, y) for x, y in zip(strata[:half], strata[half:], strict=True)], axis=0))


def _superiority(x: Array, y: Array) -> Array:
    x, y = x[..., :, None], y[..., None, :]
    return np.asarray((np.mean(x > y, axis=(-2, -1)) + np.mean(x >= y, axis=(-2, -1))) / 2)


def estimate(statistic: Statistic, strata: Sequence[Array], resamples: int = RESAMPLES) -> Estimate:
    """A statistic of scores with its interval.

    Args:
        strata: as ``statistic`` takes them, [run] each.
    """
    ends = bootstrap_interval(statistic, strata, resamples)
    return Estimate(float(statistic(*strata)), None if ends is None else (float(ends[0]), float(ends[1])))


def band(curves: Array) -> Band:
    """The interquartile mean of curves [point, run] at each point; whole runs are drawn again."""
    ends = bootstrap_interval(iqm, [curves], BAND_RESAMPLES)
    low, high = (None, None) if ends is None else (tuple(end.tolist()) for end in ends)
    return Band(tuple(iqm(curves).tolist()), low, high)


def bootstrap_interval(
    statistic: Statistic, strata: Sequence[Array], resamples: int = RESAMPLES
) -> tuple[Array, Array] | None:
    """95 % interval by the stratified percentile bootstrap: runs of each stratum are drawn again from that stratum.

    Args:
        strata: scores [..., run]; of whatever is before the runs, the same ones are drawn.

    Returns:
        Lower and upper end; None if a stratum has one run only.
    """
    if min(scores.shape[-1] for scores in strata) < 2:
        return None
    rng = np.random.default_rng(SEED)
    drawn = []
    for scores in strata:
        count = scores.shape[-1]
        drawn.append(scores[..., rng.integers(count, size=(resamples, count))])
    low, high = np.quantile(statistic(*drawn), (0.025, 0.975), axis=-1)
    return np.asarray(low), np.asarray(high)


def common_grid(steps: Sequence[Sequence[Number]]) -> Array:
    """Evenly spaced env steps over the range in which each of these curves has points; one point if there is no such range."""
    end = min(points[-1] for points in steps)
    start = min(max(points[0] for points in steps), end)
    return np.unique(np.linspace(start, end, GRID))


def on_grid(grid: Array, steps: Sequence[Number], values: Sequence[Number]) -> Array:
    """A curve through points, read off at ``grid``: straight between them, constant before the first and after the last."""
    return np.asarray(np.interp(grid, steps, values))


def mean_height(grid: Array, curves: Array) -> Array:
    """Area under curves [point, run] divided by its width, [run]: what a run scored on average over its training."""
    if len(grid) == 1:
        return np.asarray(curves[0])
    trapezoids = (curves[1:] + curves[:-1]) / 2 * np.diff(grid)[:, None]
    return np.asarray(trapezoids.sum(axis=0) / (grid[-1] - grid[0]))


def normalized(scores: Array, low: Number, high: Number) -> Array:
    """Scores on the scale where ``low`` is 0 and ``high`` is 1."""
    return np.asarray((scores - low) / (high - low))
