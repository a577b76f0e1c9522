"""What a page of ``groupwise view`` that follows a run costs the run.

The viewer is busy only while it makes a page. So iterations that overlap the making of a page are compared with those
just before and after it, where the machine's drift is small. The cost is the time lost in them over the time of the run.
The page is asked for as its script does it.

    python benchmarks/view_overhead.py         # about 5 minutes on 2 cores; needs the extra view
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple
from urllib.error import HTTPError

import groupwise as gw
from groupwise.report.folder import mean_ci95

RESULT = Path(__file__).parent / "results" / "view_overhead.json"
AROUND = 6.0
"""Seconds before and after a page whose iterations it is compared with."""
STEPS = 3_000_000


class Span(NamedTuple):
    """From when to when, in seconds of the machine's monotonic clock."""

    begin: float
    end: float

    def overlap(self, other: "Span") -> float:
        return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


class Times(gw.Callback):
    """Collection and update of each iteration."""

    def __init__(self) -> None:
        self.iterations: list[Span] = []

    def on_iteration_end(self, trainer: gw.Trainer, rollout: Any, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        self.iterations.append(Span(now - metrics["time/collect_seconds"] - metrics["time/update_seconds"], now))


@contextmanager
def viewing(folder: Path, pauses: float) -> Iterator[list["subprocess.Popen[str]"]]:
    """The viewer of a folder, and a reader of the page of its run."""
    command = [sys.executable, "-m", "groupwise", "view", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as viewer:
        assert viewer.stdout is not None
        address = viewer.stdout.readline().strip()
        command = [sys.executable, __file__, "--follow", address, "--pauses", str(pauses)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            reader.stdout.readline()  # it has imported what it needs
            try:
                yield [viewer, reader]
            finally:
                reader.terminate()
                viewer.terminate()


def follow(address: str, pauses: float) -> None:
    """Read the list until the run is there, then its page at each change; prints when each page was asked for and read."""
    print(flush=True)
    url, version = address, ""
    while True:
        begin = time.monotonic()
        with suppress(HTTPError):  # 304: nothing has changed
            with urllib.request.urlopen(urllib.request.Request(url, headers={"If-None-Match": version})) as answer:  # noqa: S310  of this machine
                page, version = answer.read().decode(), answer.headers["ETag"]
            if url != address:
                print(begin, time.monotonic(), flush=True)
            elif "runs/run" in page:
                url, version = f"{address}runs/run", ""
        time.sleep(pauses * min(max(2.0, 25 * (time.monotonic() - begin)), 60.0))  # as live.js


def slowdowns(iterations: list[Span], pages: list[Span]) -> list[float]:
    """Seconds of iterations that overlap a page over those of iterations around it, of each page."""
    found = []
    for page in pages:
        window = Span(page.begin - AROUND, page.end + AROUND)
        near = [one for one in iterations if window.overlap(one) == one.end - one.begin]
        # an iteration that overlaps little says little about either
        during = [one.end - one.begin for one in near if page.overlap(one) > 0.5 * (one.end - one.begin)]
        apart = [one.end - one.begin for one in near if not any(other.overlap(one) for other in pages)]
        if during and apart:
            found.append(mean(during) / mean(apart))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="a short run, whose page is asked for more often")
    parser.add_argument("--follow", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--pauses", type=float, default=1.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.follow:
        follow(args.follow, args.pauses)
        return
    steps, pauses = (40_000, 0.02) if args.smallest else (STEPS, 1.0)
    times = Times()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with viewing(folder, pauses) as (_, reader):
            gw.train(
                "CartPole-v1",
                "ppo",
                total_steps=steps,
                speed="off",
                run_dir=folder / "run",
                callbacks=[times],
                evaluation={"interval": 20_000, "episodes": 1},
                logging={"progress": "none"},
            )
            reader.terminate()
            assert reader.stdout is not None
            pages = [Span(*map(float, line.split())) for line in reader.stdout.read().splitlines()]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # the viewer and the reader have ended
    run = times.iterations[-1].end - times.iterations[0].begin
    ratios = slowdowns(times.iterations, pages)
    share = sum(page.end - page.begin for page in pages) / run
    low, _ = mean_ci95(mean(ratios), stdev(ratios), len(ratios)) or (0.0, 0.0)
    half = mean(ratios) - low
    result = {
        "run, seconds": run,
        "pages": len(pages),
        "share of the run in which a page was made": share,
        "processor seconds of viewer and reader": used.ru_utime + used.ru_stime,
        "slowdown while a page is made": mean(ratios),
        "half of its 95 % interval": half,
        # of the time during pages, 1 - 1 / slowdown is lost
        "cost, percent": [round(100 * share * (1 - 1 / slow), 2) for slow in (mean(ratios), mean(ratios) - half, mean(ratios) + half)],
        "slowdowns": ratios,
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "slowdowns"}, indent=1))


if __name__ == "__main__":
    main()
