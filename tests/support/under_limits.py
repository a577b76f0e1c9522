"""Runs calls on folders of strangers, each in a process with little time and memory; prints how each ended.

    python under_limits.py CASES.json

A case is ``[name, call, folder]``. Limits hold from a moment at which everything is imported.
"""

import json
import os
import re
import resource
import signal
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401  torch.optim imports it with the first optimizer

import groupwise as gw
from groupwise.comparison.compare import compare
from groupwise.errors import GroupwiseError
from groupwise.run import evaluate, resume

CPU_SECONDS = 2
MEMORY = 200 * 2**20
WAIT_SECONDS = 60
"""For a process that hangs; a busy machine may take long to refuse a file."""

CALLS = {
    "resume": lambda folder: resume(folder, 4096),
    "evaluate": lambda folder: evaluate(folder, 2, checkpoint="best"),
    "compare": lambda folder: compare([folder]),
    "config": lambda folder: gw.load_config(f"{folder}/config.json"),
}


def ending(call, folder):
    """The error, ``accepted``, or the signal that ended the process."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        used = int(re.search(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY, used + MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        signal.alarm(WAIT_SECONDS)
        try:
            CALLS[call](folder)
            answer = "accepted"
        except GroupwiseError as error:
            answer = f"{type(error).__name__}: {error}"
        except BaseException as error:
            answer = f"raw {error!r}"
        os.write(writing, answer.encode(errors="replace")[:4000])
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(process, 0)
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read().decode() or f"ended by {status}"


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    print(json.dumps({name: ending(call, folder) for name, call, folder in cases}))
