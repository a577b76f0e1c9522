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


def wilson_95(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share of ``count`` trials; also for means of numbers in [0, 1], whose variance is no larger.

    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference", eq. 6.
    """
    z = 1.959964
    centre = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
