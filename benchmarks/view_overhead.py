"""What a page of ``groupwise view`` that follows a run costs the run.

Pairs of trainings of the same seed, in turns with the page open and without it; the order changes with each pair. Counted are
seconds of training and seconds of processor time of the training process. The page is read as its script reads it: once at
first, and again at each event.

    python benchmarks/view_overhead.py --pairs 8         # about 6 minutes on 2 idle cores; needs the extra view
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

RESULT = Path(__file__).parent / "results" / "view_overhead.json"
TRAIN = (
    "CartPole-v1",
    "--algorithm",
    "ppo",
    "--total-steps",
    "100000",
    "--compile",
    "off",
    "--logging.progress",
    "none",
)


class Cost(NamedTuple):
    """Of a training."""

    seconds: float
    processor_seconds: float


def train(folder: Path) -> Cost:
    """Train in ``folder / "run"``."""
    command = [sys.executable, "-m", "groupwise", "train", *TRAIN, "--run-dir", str(folder / "run")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"training failed with exit code {process.returncode}")
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return Cost(summary["seconds"], usage.ru_utime + usage.ru_stime)


@contextmanager
def viewing(folder: Path) -> Iterator[list[int]]:
    """Follow the run that will be in ``folder``; collects the sizes of the pages that were read."""
    command = [sys.executable, "-m", "groupwise", "view", str(folder)]
    sizes: list[int] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as viewer:
        try:
            assert viewer.stdout is not None
            address = viewer.stdout.readline().strip()
            threading.Thread(target=follow, args=(address, sizes), daemon=True).start()
            yield sizes
        finally:
            viewer.terminate()


def follow(address: str, sizes: list[int]) -> None:
    """Read the list until the run is there, then its page at each change."""
    root = re.match("http://[^/]+", address)
    assert root is not None
    try:
        page, url = read(address), address
        while True:
            events = re.search('data-events="([^"]+)"', page)
            assert events is not None
            with urllib.request.urlopen(root[0] + events[1].replace("&amp;", "&")) as stream:  # noqa: S310  of this machine
                for line in stream:
                    if not line.startswith(b"data:"):
                        continue
                    page = read(url)
                    if url != address:
                        sizes.append(len(page))
                    elif "runs/run" in page:
                        url = f"{address}runs/run"
                        page = read(url)
                        break
    except (OSError, ValueError):  # the viewer has ended
        return


def read(url: str) -> str:
    with urllib.request.urlopen(url) as answer:  # noqa: S310  of this machine
        return str(answer.read().decode())


def pair(viewed_first: bool) -> tuple[Cost, Cost, int]:
    """Costs without and with the page, and how often it was read."""
    costs = {}
    for viewed in (viewed_first, not viewed_first):
        with tempfile.TemporaryDirectory() as folder:
            if not viewed:
                costs[viewed] = train(Path(folder))
                continue
            with viewing(Path(folder)) as sizes:
                costs[viewed] = train(Path(folder))
            count = len(sizes)
    return costs[False], costs[True], count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=8)
    args = parser.parse_args()
    pairs = []
    for number in range(args.pairs):
        pairs.append(pair(viewed_first=number % 2 == 1))
        print(pairs[-1], flush=True)
    result = {"pairs": [{"without": list(a), "with": list(b), "pages": count} for a, b, count in pairs]}
    for index, name in enumerate(Cost._fields):
        ratios = sorted(b[index] / a[index] for a, b, _ in pairs)
        result[f"ratio of {name}"] = {"median": median(ratios), "all": ratios}
        print(f"{name}: with the page {median(ratios):.3f} times as many ({ratios[0]:.3f} to {ratios[-1]:.3f})")
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
