"""What a run reached, read from its metrics, and confidence intervals."""

import math
from collections.abc import Mapping
from typing import Any

from groupwise.config.run import EvaluationMetric

SCORES: dict[EvaluationMetric, str] = {"return": "return_mean", "success_rate": "success_rate"}
"""Names of scores in metrics and summaries."""


def scores_of(metrics: list[dict[str, Any]], metric: EvaluationMetric = "return") -> dict[str, Any]:
    """Scores of the last evaluation, of the best one by ``metric``, and of training; and its updates that changed nothing."""
    if not metrics:
        return {"env_steps": 0, "iterations": 0, "seconds": 0.0}
    last = metrics[-1]
    scores = {"env_steps": last.get("env_steps", 0), "iterations": last["iteration"]}
    scores["seconds"] = last.get("time/total_seconds", 0.0)
    if without_gradient := sum(entry.get("train/grad_norm") == 0 for entry in metrics):
        scores["updates_without_gradient"] = without_gradient
    evaluations = [entry for entry in metrics if "eval/return_mean" in entry]
    if evaluations:
        key = f"eval/{SCORES[metric]}"
        final, best = evaluations[-1], max(evaluations, key=lambda entry: float(entry.get(key, -math.inf)))
        mean, episodes = final["eval/return_mean"], int(final.get("eval/episodes", 0))
        interval = interval_of(final)
        scores |= {"return_mean": mean, "ci95": None if interval is None else list(interval), "episodes": episodes}
        if cut := int(final.get("eval/cut_episodes", 0)):
            scores["cut_episodes"] = cut
        scores |= {"best_return_mean": best["eval/return_mean"], "best_env_steps": best.get("env_steps", 0)}
        if "eval/success_rate" in final:
            rate = final["eval/success_rate"]
            interval = interval_of(final, "success_rate")
            scores |= {"success_rate": rate, "success_ci95": None if interval is None else list(interval)}
            scores["best_success_rate"] = best.get("eval/success_rate")
    if "rollout/success_rate" in last:
        scores["training_success_rate"] = last["rollout/success_rate"]
    return scores | {"training_return_mean": last.get("rollout/return_mean")}


def interval_of(entry: Mapping[str, Any], score: str = "return_mean") -> tuple[float, float] | None:
    """95 % confidence interval of an evaluation's score; None for a return of one episode, and where an entry does not tell."""
    value, episodes = float(entry[f"eval/{score}"]), int(entry.get("eval/episodes", 0))
    if score == "success_rate":
        return wilson_95(value, episodes) if episodes else None
    return mean_ci95(value, float(entry.get("eval/return_std", math.nan)), episodes)


def mean_ci95(mean: float, std: float, count: int) -> tuple[float, float] | None:
    """Student's 95 % confidence interval of a mean; None for a single score. Arguments as of ``half_width_95``."""
    half = half_width_95(std, count)
    return None if math.isnan(half) else (mean - half, mean + half)


def half_width_95(std: float, count: int) -> float:
    """Half of Student's 95 % confidence interval of a mean; NaN for a single score.

    Args:
        std: unbiased standard deviation of the scores.
        count: how many scores.
    """
    if count <= 1:
        return math.nan
    from scipy.special import stdtrit  # slow to import

    return float(stdtrit(count - 1, 0.975)) * std / math.sqrt(count)


def wilson_95(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share of ``count`` trials; also for means of numbers in [0, 1], whose variance is no larger.

    Source: Wilson 1927, "Probable Inference, the Law of Succession, and Statistical Inference", eq. 6.
    """
    z = 1.959964
    centre = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    low, high = (centre - half) / scale, (centre + half) / scale
    return max(0.0, min(share, low)), min(1.0, max(share, high))  # rounding may leave out shares of 0 and 1
