"""The process of ``sandbox.MathVerifier``: a pair of answers in, ``true`` or ``false`` out, one line of JSON each."""

import json
import logging
import os
import sys

_MEMORY = 4 * 2**30
"""Bytes that the process may have; ``9**9**9`` wants more."""


def same_mathematics(gold: str, answer: str) -> bool:
    """Whether both are the same number, set or expression, read as LaTeX."""
    from math_verify import LatexExtractionConfig, parse, verify

    # math_verify's other parser uses sympy's parse_expr, which is eval
    wanted, given = (
        parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None, fallback_mode="no_fallback")
        for text in (gold, answer)
    )
    return bool(wanted and given and verify(wanted, given, timeout_seconds=None))


def _main() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    logging.disable()  # math_verify warns that it has no time limit; the other process has one
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keep the output of libraries apart from the results
    for line in sys.stdin:
        try:
            same = same_mathematics(*json.loads(line))
        except Exception:  # an answer that cannot be read, or is too large
            same = False
        print(json.dumps(same), file=results, flush=True)


if __name__ == "__main__":
    _main()
