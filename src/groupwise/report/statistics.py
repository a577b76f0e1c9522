"""Statistics of scores."""

import math


def half_width_95(std: float, count: int) -> float:
    """Half of Student's 95 % confidence interval of a mean; NaN for a single score, which gives no interval.

    Args:
        std: unbiased deviation of the scores.
        count: how many scores.
    """
    if count <= 1:
        return math.nan
    from scipy.special import stdtrit  # a third of a second, which only reports need to pay

    return float(stdtrit(count - 1, 0.975)) * std / math.sqrt(count)
