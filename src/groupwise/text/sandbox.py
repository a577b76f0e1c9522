"""Comparison of mathematical answers in a process with limits of time, memory, files, processes and network.

Run as a script, this module is that process: a pair of answers in, ``true`` or ``false`` out, one line of JSON each. It
imports nothing else of groupwise.
"""

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

_WARM_UP_LIMIT = 120.0
_CLOCK = 5.0
"""Times the limit of CPU time that a comparison may take by the clock: other processes may be busy."""
_MEMORY = 4 * 2**30
"""Bytes that the process may have; ``9**9**9`` wants more."""
_FILE_SIZE = 2**20
"""Bytes of a file that it may write."""
_KEPT = ("PYTHONHOME", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""All that it gets of the environment, besides ``PYTHONPATH``: what Python needs to start."""

# linux/sched.h, linux/mount.h
_NEW_USER, _NEW_MOUNTS, _NEW_NETWORK = 0x10000000, 0x00020000, 0x40000000
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1


class MathVerifier:
    """Compares answers by math-verify in another process, which ends at the time limit and is started again.

    A fresh interpreter: a fork would copy locks that torch's threads hold, and ``multiprocessing`` would run the user's
    script again. It works in an empty temporary folder, and imports nothing from the current one.

    Args:
        limit: seconds of CPU time for each comparison.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def same(self, wanted: str, given: str) -> bool:
        """Whether both are mathematically the same; False where that takes too much memory.

        Raises:
            TimeoutError: it takes too much CPU time.
            ChildProcessError: the process gave no answer for another reason.
            RewardError: the process does not start.
        """
        process = self._running()
        answer = self._ask(process, wanted, given, _CLOCK * self._limit)
        if answer is not None:
            return answer
        if sys.platform != "win32" and process.returncode == -signal.SIGPROF:
            raise TimeoutError(f"comparing {given!r:.80} takes more than {self._limit:g} s of CPU time")
        raise ChildProcessError(
            f"the process that compares answers gave none in {_CLOCK * self._limit:g} s, or died, at {given!r:.80}"
        )

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()

    def _ask(self, process: "subprocess.Popen[str]", wanted: str, given: str, limit: float) -> bool | None:
        """The process's answer; None if it gives none in ``limit`` seconds."""
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
        if line:
            return bool(json.loads(line))
        self.close()
        return None

    def _running(self) -> "subprocess.Popen[str]":
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._process = self._start()
        return self._process

    def _start(self) -> "subprocess.Popen[str]":
        from groupwise.errors import RewardError

        self._folder = tempfile.TemporaryDirectory(prefix="groupwise-")
        path = os.pathsep.join(map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))))
        env = {name: os.environ[name] for name in _KEPT if name in os.environ} | ({"PYTHONPATH": path} if path else {})
        # -P: nothing is imported from the folder of this file or the current one; -B: no bytecode is written
        command = [sys.executable, "-P", "-B", str(Path(__file__).absolute()), str(self._limit)]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(  # noqa: S603  this file
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                env=env,
                cwd=self._folder.name,
                start_new_session=True,  # Ctrl-C in the terminal must not end a comparison
            )
            self._process = process
            if not self._ask(process, "1/2", "0.5", _WARM_UP_LIMIT):  # imports take long
                self.close()
                errors.seek(0)
                why = errors.read().decode(errors="replace").strip().splitlines() or ["it gave no answer"]
                raise RewardError(f"the process that compares answers does not start: {why[-1]}; fix: its cause")
        return process


def confine() -> None:
    """Take network and processes from this process, make all files read-only, and limit memory and the size of files.

    Where the system allows no new namespaces, network and files stay.
    """
    if sys.platform == "win32":
        return
    import resource

    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEW_USER | _NEW_MOUNTS | _NEW_NETWORK) == 0:
            attributes = (ctypes.c_uint64 * 4)(_READ_ONLY)
            libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    for kind, limit in (
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_FSIZE, _FILE_SIZE),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (limit, limit))


def _allow_cpu(seconds: float) -> None:
    """End this process by SIGPROF after that much more CPU time, also when its caller has stopped waiting."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _same_mathematics(gold: str, answer: str) -> bool:
    """Whether both are the same number, set or expression, read as LaTeX."""
    from math_verify import LatexExtractionConfig, parse, verify

    # math_verify's other parser uses sympy's parse_expr, which is eval
    wanted, given = (
        parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None, fallback_mode="no_fallback")
        for text in (gold, answer)
    )
    return bool(wanted and given and verify(wanted, given, timeout_seconds=None))


def _main(limit: float) -> None:
    confine()
    import math_verify  # noqa: F401  before standard error is closed: a failure shows there

    logging.disable()  # math_verify warns that it has no time limit; the other process has one
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # keep the output of libraries apart from the results
        os.dup2(nowhere, stream)
    for line in sys.stdin:
        _allow_cpu(limit)
        try:
            same = _same_mathematics(*json.loads(line))
        except Exception:  # an answer that cannot be read, or is too large
            same = False
        print(json.dumps(same), file=results, flush=True)


if __name__ == "__main__":
    _main(float(sys.argv[1]))
