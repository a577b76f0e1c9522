"""What a run reached, read from its metrics."""

import math
from typing import Any

from groupwise.report.statistics import half_width_95


def scores_of(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """What was reached: by the last evaluation, the best one, and in training."""
    if not metrics:
        return {"env_steps": 0, "iterations": 0, "seconds": 0.0}
    last = metrics[-1]
    scores = {"env_steps": last["env_steps"], "iterations": last["iteration"], "seconds": last["time/total_seconds"]}
    evaluations = [entry for entry in metrics if "eval/return_mean" in entry]
    if evaluations:
        final, best = evaluations[-1], max(evaluations, key=lambda entry: float(entry["eval/return_mean"]))
        mean, episodes = final["eval/return_mean"], int(final["eval/episodes"])
        half = half_width_95(final["eval/return_std"], episodes)
        interval = None if math.isnan(half) else [mean - half, mean + half]
        scores |= {"return_mean": mean, "ci95": interval, "episodes": episodes}
        scores |= {"best_return_mean": best["eval/return_mean"], "best_env_steps": best["env_steps"]}
    return scores | {"training_return_mean": last.get("rollout/return_mean")}
