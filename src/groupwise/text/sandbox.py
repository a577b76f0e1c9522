"""Comparison of mathematical answers in a process with limits of time and memory."""

import json
import subprocess
import sys
import threading
from typing import Any

_WARM_UP_LIMIT = 120.0


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

    def _ask(self, process: Any, wanted: str, given: str, limit: float) -> bool:
        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            print(json.dumps([wanted, given]), file=process.stdin, flush=True)
            line = process.stdout.readline()
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
            command = [sys.executable, "-m", "groupwise.text.sandbox_worker"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="utf-8")
            self._ask(self._process, "1/2", "0.5", _WARM_UP_LIMIT)  # imports take long
        return self._process
