"""Statistics over several runs: interquartile mean, probability of improvement, bootstrap intervals, curves.

Scores are arrays whose last axis is the runs (seeds), one array per environment. Environments are the strata of the
bootstrap: their runs are resampled separately.

Source: Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice"
(https://arxiv.org/abs/2108.13264), sections 4.1 to 4.3, and its library rliable.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Number = int | float
Statistic = Callable[..., Array]
"""Arrays with the runs on the last axis, one per stratum -> a number for everything before that axis."""

RESAMPLES = 10_000
"""For the interval of a score: its ends vary by about a hundredth of its width."""
CURVE_RESAMPLES = 2_000
"""For the interval at each point of a curve."""
SEED = 0
"""Of the bootstrap: the same runs give the same interval."""
GRID = 101
"""Points of a curve."""


@dataclass(frozen=True)
class Estimate:
    """A statistic over runs."""

    value: float
    interval: tuple[float, float] | None
    """95 % bootstrap interval; None if an environment has one run only."""


@dataclass(frozen=True)
class Curve:
    """Return against environment steps: interquartile mean over runs, and a 95 % interval at each point."""

    env_steps: tuple[float, ...]
    iqm: tuple[float, ...]
    low: tuple[float, ...] | None
    """Lower ends of the intervals; None with one run only."""
    high: tuple[float, ...] | None


def iqm(*strata: Array) -> Array:
    """Interquartile mean: the mean of the middle half of all runs of all environments.

    A quarter at each end, rounded down to whole runs, is left out, so up to three runs are all used.

    Args:
        strata: scores [..., run], one array per environment, all on one scale.
    """
    pooled = np.sort(np.concatenate(strata, axis=-1), axis=-1)
    count = pooled.shape[-1]
    return np.asarray(pooled[..., count // 4 : count - count // 4].mean(axis=-1))


def probability_of_improvement(*strata: Array) -> Array:
    """Probability that a run of one method scores more than one of the other; ties count one half.

    P(X > Y) = U / (n m) with the statistic U of Mann and Whitney, averaged over the environments.

    Args:
        strata: the scores [..., run] of X in each environment, followed by those of Y in the same order.
    """
    half = len(strata) // 2
    pairs = zip(strata[:half], strata[half:], strict=True)
    signs = [np.sign(x[..., :, None] - y[..., None, :]).mean(axis=(-2, -1)) for x, y in pairs]
    return np.asarray((np.mean(signs, axis=0) + 1) / 2)


def estimate(statistic: Statistic, strata: Sequence[Array], resamples: int = RESAMPLES) -> Estimate:
    """A statistic of scores with its interval.

    Args:
        strata: as ``statistic`` takes them, [run] each.
    """
    ends = bootstrap_interval(statistic, strata, resamples)
    return Estimate(float(statistic(*strata)), None if ends is None else (float(ends[0]), float(ends[1])))


def curve(grid: Array, returns: Array) -> Curve:
    """The interquartile mean of ``returns`` [point, run] at each point of ``grid``; whole runs are resampled."""
    ends = bootstrap_interval(iqm, [returns], CURVE_RESAMPLES)
    low, high = (None, None) if ends is None else (tuple(end.tolist()) for end in ends)
    return Curve(tuple(grid.tolist()), tuple(iqm(returns).tolist()), low, high)


def bootstrap_interval(
    statistic: Statistic, strata: Sequence[Array], resamples: int = RESAMPLES
) -> tuple[Array, Array] | None:
    """95 % interval by the stratified percentile bootstrap; None if a stratum has one run only.

    Args:
        strata: scores [..., run]; the same runs are drawn for everything before the last axis.
    """
    if min(scores.shape[-1] for scores in strata) < 2:
        return None
    rng = np.random.default_rng(SEED)
    drawn = [rng.choice(scores, (resamples, scores.shape[-1]), axis=-1) for scores in strata]
    low, high = np.quantile(statistic(*drawn), (0.025, 0.975), axis=-1)
    return np.asarray(low), np.asarray(high)


def common_grid(steps: Sequence[Sequence[Number]]) -> Array:
    """Evenly spaced steps over the range in which all of these curves have points; one point if there is none."""
    end = min(points[-1] for points in steps)
    start = min(max(points[0] for points in steps), end)
    return np.unique(np.linspace(start, end, GRID))


def mean_height(grid: Array, returns: Array) -> Array:
    """Area under curves [point, run] divided by its width, [run]: the average return over training."""
    if len(grid) == 1:
        return np.asarray(returns[0])
    trapezoids = (returns[1:] + returns[:-1]) / 2 * np.diff(grid)[:, None]
    return np.asarray(trapezoids.sum(axis=0) / (grid[-1] - grid[0]))
