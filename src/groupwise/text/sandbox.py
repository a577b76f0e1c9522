"""A process of its own for what is done to completions and might never end, nor let another thread run.

A fresh interpreter, and no fork: that would copy locks that torch's threads hold, and ``multiprocessing`` would run the
user's script again.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

_WORKER = "groupwise.text.sandbox_worker"
_WARM_UP_LIMIT = 120.0
_NOTHING = ("matches", "", "search", "")


class TooSlowError(Exception):
    """A call was ended at its limit, or needed more memory than there may be."""


class Sandbox:
    """Calls of ``sandbox_worker``'s functions, one at a time, with a time limit that holds whatever they do.

    Args:
        limit: seconds for each call.
        warm_up: a call that a new process answers first, unhurried, because starting and importing takes long.
    """

    def __init__(self, limit: float, warm_up: Sequence[str] = _NOTHING) -> None:
        self._limit = limit
        self._warm_up = warm_up
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def call(self, name: str, *arguments: Any) -> Any:
        """What the function returns.

        Raises:
            TooSlowError: it took longer than the limit; the process was ended, and the next call gets another.
            ValueError: it raised an error; says which.
        """
        with self._lock:
            answer = self._ask(self._running(), [name, *arguments], self._limit)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["value"]

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, process: subprocess.Popen[str], question: Sequence[Any], limit: float) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            self.close()
            raise TooSlowError
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            command = [sys.executable, "-m", _WORKER]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="utf-8")
            self._ask(self._process, self._warm_up, _WARM_UP_LIMIT)
        return self._process
