"""Processes on this machine, of which one is killed in the middle of a run."""

import os
import signal
import threading
import time
from pathlib import Path


def processes(word):
    """Processes whose command line has these bytes."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if word in line:
            found.append(int(process.name))
    return sorted(found)


class Killer(threading.Thread):
    """Kills the process that ``find`` returns after some iterations of a run, and sees two later ones."""

    def __init__(self, path, iterations, find):
        super().__init__(daemon=True)
        self.path, self.iterations, self.find = path, iterations, find
        self.seconds = 0.0

    def run(self):
        before = self.wait_for(self.iterations)
        os.kill(self.find(), signal.SIGKILL)
        killed = time.monotonic()
        self.wait_for(before + 2)
        self.seconds = time.monotonic() - killed

    def wait_for(self, iteration):
        while True:
            time.sleep(0.02)
            metrics = self.path / "metrics.jsonl"
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            if len(lines) >= iteration:
                return len(lines)
