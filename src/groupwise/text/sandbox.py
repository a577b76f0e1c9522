"""Comparison of mathematical answers in a process with limits of time and memory.

Run as a script, this module is that process: a pair of answers in, ``true`` or ``false`` out, one line of JSON each.
"""

import json
import logging
import os
import subprocess
import sys
import threading

_WARM_UP_LIMIT = 120.0
_MEMORY = 4 * 2**30
"""Bytes that the process may have; ``9**9**9`` wants more."""


class MathVerifier:
    """Compares answers by math-verify in another process, which is killed at the time limit and started again.

    A fresh interpreter: a fork would copy locks that torch's threads hold, and ``multiprocessing`` would run the user's
    script again.

    Args:
        limit: seconds for each comparison.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._process: subprocess.Popen[str] | None = None

    def same(self, wanted: str, given: str) -> bool:
        """Whether both are mathematically the same; False where that takes too much time or memory."""
        return self._ask(self._running(), wanted, given, self._limit)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, process: subprocess.Popen[str], wanted: str, given: str, limit: float) -> bool:
        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            print(json.dumps([wanted, given]), file=process.stdin, flush=True)
            line = process.stdout.readline() if process.stdout else ""
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            self.close()
        return bool(line) and bool(json.loads(line))

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            command = [sys.executable, "-m", "groupwise.text.sandbox"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
            self._ask(self._process, "1/2", "0.5", _WARM_UP_LIMIT)  # imports take long
        return self._process


def _same_mathematics(gold: str, answer: str) -> bool:
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
            same = _same_mathematics(*json.loads(line))
        except Exception:  # an answer that cannot be read, or is too large
            same = False
        print(json.dumps(same), file=results, flush=True)


if __name__ == "__main__":
    _main()
