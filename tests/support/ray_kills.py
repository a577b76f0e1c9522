"""Processes on this machine, of which one is killed in the middle of a run."""

import os
import signal
import threading
import time
from pathlib import Path


def processes(*words, without=b"\n"):
    """Processes whose command line has all of these bytes, but not the last."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line = (process / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if all(word in line for word in words) and without not in line:
            found.append(int(process.name))
    return sorted(found)


def parent(process):
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition("PPid:")[2].split()[0])


class Killer(threading.Thread):
    """Kills the process that ``find`` returns, or its ``victim``, after some iterations of a run, and sees two later ones."""

    def __init__(self, path, iterations, find, victim=lambda process: process):
        super().__init__(daemon=True)
        self.path, self.iterations, self.find, self.victim = path, iterations, find, victim
        self.seconds, self.killed, self.later = 0.0, 0, 0

    def run(self):
        before = self.wait_for(self.iterations)
        self.killed = self.find()
        os.kill(self.victim(self.killed), signal.SIGKILL)
        killed = time.monotonic()
        self.wait_for(before + 2)
        self.seconds = time.monotonic() - killed
        self.later = self.find()

    def wait_for(self, iteration):
        while True:
            time.sleep(0.02)
            metrics = self.path / "metrics.jsonl"
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            if len(lines) >= iteration:
                return len(lines)
