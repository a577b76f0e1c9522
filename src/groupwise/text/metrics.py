"""What is told of the texts of a rollout."""

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

from groupwise.functional.texts import pass_at_k, repeated_ngrams
from groupwise.text.transcripts import Attempt


class Scored(NamedTuple):
    """An attempt, and what it is worth."""

    attempt: Attempt
    text: str
    reward: float | None
    """None: nobody can say."""
    parts: Sequence[float | None]
    """What each reward function says."""


def text_metrics(scored: Sequence[Scored], reward_names: Sequence[str], success_threshold: float) -> dict[str, float]:
    """Numbers of the attempts that were sampled: what they are worth, how long they are and why they ended, how they repeat."""
    sampled = [member for member in scored if not member.attempt.greedy]
    worth = [member for member in sampled if member.reward is not None]
    lengths = [member.attempt.written for member in sampled]
    count = len(sampled)
    metrics = {
        "rollout/unscorable": count - float(len(worth)),
        "rollout/length_max": float(max(lengths)),
        "rollout/length_min": float(min(lengths)),
        "rollout/turns_mean": fmean(member.attempt.turns for member in sampled),
        "rollout/repeated_ngrams": fmean(repeated_ngrams(member.attempt.tokens) for member in sampled),
    }
    for stop, name in (
        ("eos", "rollout/ended_by_eos"),
        ("stop", "rollout/ended_by_stop"),
        ("length", "completions/clipped_ratio"),
    ):
        metrics[name] = sum(member.attempt.stop == stop for member in sampled) / count
    for number, name in enumerate(reward_names):
        values = [value for member in sampled if (value := member.parts[number]) is not None]
        if values:
            metrics[f"reward/{name}_mean"] = fmean(values)
    groups = _groups(worth)
    if groups:
        metrics["rollout/reward_std"] = fmean(pstdev(group) for group in groups)
        metrics |= {f"rollout/{name}": value for name, value in pass_rates(groups, success_threshold).items()}
    return metrics


def pass_rates(groups: Sequence[Sequence[float]], success_threshold: float) -> dict[str, float]:
    """pass@1, and pass@k for the size of the smallest group, averaged over the groups of rewards."""
    size = min(map(len, groups))
    return {
        f"pass_at_{k}": fmean(pass_at_k(len(g), sum(reward >= success_threshold for reward in g), k) for g in groups)
        for k in sorted({1, size})
    }


def _groups(worth: Sequence[Scored]) -> list[list[float]]:
    groups: dict[int, list[float]] = {}
    for member in worth:
        groups.setdefault(member.attempt.group, []).append(member.reward or 0.0)
    return list(groups.values())
