"""Numbers that tell what became of written texts."""

import math
from collections.abc import Sequence


def repeated_ngrams(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the text's n-grams that stood in it before: 0 if all are new, near 1 in a loop; 0 for fewer than two."""
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
