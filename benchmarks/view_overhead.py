"""What a page of ``groupwise view`` that follows a run costs the run.

Two runs of the same seed differ by a fifth on a shared machine, so one run is compared with itself: the viewer and the reader of
its page are stopped and continued every few seconds while it trains. Counted are seconds of collection and update.
The page is read as its script reads it: at each event.

    python benchmarks/view_overhead.py         # about 3 minutes on 2 cores; needs the extra view
"""

import itertools
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import groupwise as gw
from groupwise.report.scores import half_width_95

RESULT = Path(__file__).parent / "results" / "view_overhead.json"
SECONDS = 3.0
"""With the page, and without it."""
STEPS = 2_000_000


class Times(gw.Callback):
    """When iterations end, and their seconds of collection and update."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []

    def on_iteration_end(self, trainer: gw.Trainer, rollout: Any, metrics: dict[str, float]) -> None:
        self.ends.append((time.perf_counter(), metrics["time/collect_seconds"] + metrics["time/update_seconds"]))


class Turns(threading.Thread):
    """Stops and continues processes in turns."""

    def __init__(self, processes: list["subprocess.Popen[str]"]) -> None:
        super().__init__(daemon=True)
        self.processes, self.turns, self.over = processes, [(time.perf_counter(), True)], threading.Event()

    def run(self) -> None:
        viewed = True
        while not self.over.wait(SECONDS):
            viewed = not viewed
            for process in self.processes:
                process.send_signal(signal.SIGCONT if viewed else signal.SIGSTOP)
            self.turns.append((time.perf_counter(), viewed))
        for process in self.processes:
            process.send_signal(signal.SIGCONT)


@contextmanager
def viewing(folder: Path) -> Iterator[list["subprocess.Popen[str]"]]:
    """The viewer of a folder, and a reader of the page of its run."""
    command = [sys.executable, "-m", "groupwise", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as viewer:
        assert viewer.stdout is not None
        address = viewer.stdout.readline().strip()
        with subprocess.Popen([sys.executable, __file__, address], stdout=subprocess.PIPE, text=True) as reader:
            try:
                yield [viewer, reader]
            finally:
                reader.terminate()
                viewer.terminate()


def follow(address: str) -> None:
    """Read the list until the run is there, then its page at each change; prints a line for each page."""
    root = str(re.match("http://[^/]+", address)[0])  # type: ignore[index]
    page, url = read(address), address
    while True:
        events = re.search('data-events="([^"]+)"', page)
        assert events is not None
        with urllib.request.urlopen(root + events[1].replace("&amp;", "&")) as stream:  # noqa: S310  of this machine
            for line in stream:
                if not line.startswith(b"data:"):
                    continue
                page = read(url)
                if url != address:
                    print(len(page), flush=True)
                elif "runs/run" in page:
                    url = f"{address}runs/run"
                    page = read(url)
                    break


def read(url: str) -> str:
    with urllib.request.urlopen(url) as answer:  # noqa: S310  of this machine
        return str(answer.read().decode())


def compared(ends: list[tuple[float, float]], turns: list[tuple[float, bool]]) -> list[float]:
    """Seconds of an iteration with the page over those without it, of each pair of turns."""
    found = []
    for (begin, viewed), (end, _) in itertools.pairwise(turns):
        # what was begun in the turn before may last a moment
        inside = [seconds for at, seconds in ends if begin + 0.3 <= at - seconds and at <= end]
        found.append((viewed, mean(inside) if inside else None))
    pairs = zip(found[::2], found[1::2], strict=False)
    return [w / wo for (_, w), (_, wo) in pairs if w is not None and wo is not None]


def main() -> None:
    times = Times()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with viewing(folder) as processes:
            turns = Turns(processes)
            turns.start()
            gw.train(
                "CartPole-v1",
                "ppo",
                total_steps=STEPS,
                compile="off",
                run_dir=folder / "run",
                callbacks=[times],
                evaluation={"interval": 20_000, "episodes": 1},
                logging={"progress": "none"},
            )
            turns.over.set()
            turns.join()
            reader = processes[1]
            reader.terminate()
            assert reader.stdout is not None
            pages = len(reader.stdout.read().splitlines())
    ratios = compared(times.ends, turns.turns)
    half = half_width_95(stdev(ratios), len(ratios))
    result = {"mean": mean(ratios), "half of the 95 % interval": half, "pages": pages, "ratios": ratios}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(f"with the page {mean(ratios):.3f} +- {half:.3f} times as long; {len(ratios)} pairs, {pages} pages read")


if __name__ == "__main__":
    follow(sys.argv[1]) if len(sys.argv) > 1 else main()
