"""Comparison of mathematical answers in a process with limits of time, memory, files and processes.

Run as a script, this module is that process: a pair of answers in, ``true`` or ``false`` out, one line of JSON each.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading

_WARM_UP_LIMIT = 120.0
_CLOCK = 5.0
"""Times the limit of CPU time that a comparison may take by the clock: other processes may be busy."""
_MEMORY = 4 * 2**30
"""Bytes that the process may have; ``9**9**9`` wants more."""
_KEPT = ("PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""The whole environment of the process: variables that Python needs to start."""


class MathVerifier:
    """Compares answers by math-verify in a fresh interpreter, which ends at ``limit`` seconds of CPU time."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._process: subprocess.Popen[str] | None = None

    def same(self, wanted: str, given: str) -> bool:
        """Whether both are mathematically the same; False where that takes too much memory.

        Raises:
            TimeoutError: it takes too much CPU time.
            ChildProcessError: the process gave no answer for another reason.
            RewardError: the process does not start.
        """
        if self._process is not None and self._process.poll() is not None:
            self.close()
        process = self._process or self._start()
        answer, _ = self._ask(process, wanted, given, _CLOCK * self._limit)
        if answer is not None:
            return answer
        if sys.platform != "win32" and process.returncode == -signal.SIGPROF:
            raise TimeoutError(f"comparing {given!r:.80} takes more than {self._limit:g} s of CPU time")
        raise ChildProcessError(f"the process that compares answers gave none, or died, at {given!r:.80}")

    def close(self) -> str:
        """End the process; returns its standard error."""
        process, self._process = self._process, None
        if process is None:
            return ""
        process.kill()
        return process.communicate()[1]

    def _start(self) -> "subprocess.Popen[str]":
        from groupwise.errors import RewardError

        # -P: nothing is imported from the folder of this file or the current one; -B: no bytecode is written
        process = self._process = subprocess.Popen(  # noqa: S603  this file
            [sys.executable, "-P", "-B", os.path.abspath(__file__), str(self._limit)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", cwd=os.sep,
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            start_new_session=True,  # Ctrl-C in the terminal must not end a comparison
        )  # fmt: skip
        answer, errors = self._ask(process, "1/2", "0.5", _WARM_UP_LIMIT)  # imports take long
        if not answer:
            why = (errors.strip().splitlines() or ["it gave no answer"])[-1]
            raise RewardError(f"the process that compares answers does not start: {why}; fix: its cause")
        return process

    def _ask(self, process: "subprocess.Popen[str]", wanted: str, given: str, limit: float) -> tuple[bool | None, str]:
        """The process's answer; or None and its errors if it gives none in ``limit`` seconds."""
        timer = threading.Timer(limit, process.kill)
        timer.start()
        try:
            print(json.dumps([wanted, given]), file=process.stdin, flush=True)
            line = process.stdout.readline() if process.stdout else ""
        except BrokenPipeError:
            line = ""
        except BaseException:  # interrupted: an unread answer would be taken for that to the next question
            self.close()
            raise
        finally:
            timer.cancel()
        return (bool(json.loads(line)), "") if line else (None, self.close())


def _main(limit: float) -> None:
    if sys.platform != "win32":
        import resource

        for kind, most in (("AS", _MEMORY), ("FSIZE", 0), ("NPROC", 0), ("CORE", 0)):
            resource.setrlimit(getattr(resource, f"RLIMIT_{kind}"), (most, most))
    # before standard error is closed: a failure shows there
    from math_verify import LatexExtractionConfig, parse, verify

    logging.disable()  # math_verify warns that it has no time limit; this process has one
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # keep the output of libraries apart from the results
        os.dup2(nowhere, stream)
    for line in sys.stdin:
        if sys.platform != "win32":
            signal.setitimer(signal.ITIMER_PROF, limit)  # ends by SIGPROF, also when its caller has stopped waiting
        try:
            # math_verify's other parser uses sympy's parse_expr, which is eval
            wanted, given = (
                parse(
                    f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None, fallback_mode="no_fallback"
                )
                for text in json.loads(line)
            )
            same = bool(wanted and given and verify(wanted, given, timeout_seconds=None))
        except Exception:  # an answer that cannot be read, or is too large
            same = False
        print(json.dumps(same), file=results, flush=True)


if __name__ == "__main__":
    _main(float(sys.argv[1]))
