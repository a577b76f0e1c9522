"""Metrics of texts."""

import math
from collections.abc import Sequence


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the text's n-grams that occur earlier in it: 0 if all are new, near 1 in a loop; 0 for fewer than two."""
    count = len(tokens) - n + 1
    if count < 2:
        return 0.0
    return 1 - len({tuple(tokens[i : i + n]) for i in range(count)}) / count


def pass_at_k(completions: int, solved: int, k: int) -> float:
    """Chance that at least one of k completions solves the problem, estimated without bias from ``completions >= k`` of them.

        1 - C(completions - solved, k) / C(completions, k)

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1.
    """
    return 1 - math.comb(completions - solved, k) / math.comb(completions, k)


def pass_rate(rewards: Sequence[float], success_threshold: float, k: int) -> float:
    """``pass_at_k`` of a prompt's completions, of which those with at least the threshold as reward are right."""
    return pass_at_k(len(rewards), sum(reward >= success_threshold for reward in rewards), k)
