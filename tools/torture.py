"""The long versions of the tests of faults: kills, signals, broken environments, memory, random input. Half an hour on two cores; Linux.

    python tools/torture.py                      # what `make torture` runs
    python tools/torture.py --kills 6 --minutes 1

Results go to ``benchmarks/results/torture.json``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUPPORT = ROOT / "tests" / "support"
RESULT = ROOT / "benchmarks" / "results" / "torture.json"
PYTEST = (sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")


def kills(kind: str, count: int) -> str:
    """Kill runs at changes of files and at random moments, half of the runs each; what was wrong."""
    with tempfile.TemporaryDirectory() as folder:
        at_changes = count // 2
        words = [kind, f"{folder}/runs", str(at_changes), str(count - at_changes)]
        done = run([sys.executable, str(SUPPORT / "killed_runs.py"), *words])
    if done.returncode:
        return done.stderr[-500:]
    return "; ".join(json.loads(done.stdout.splitlines()[-1]))


def fuzz(minutes: float) -> tuple[int, str]:
    """Random input with ever new seeds until the time is over; the rounds, and what was wrong."""
    begin, seed = time.monotonic(), 0
    while time.monotonic() - begin < 60 * minutes:
        seed += 1
        profile = ["--hypothesis-profile=torture", f"--hypothesis-seed={seed}"]
        done = run([*PYTEST, str(ROOT / "tests" / "test_fuzz.py"), *profile])
        if done.returncode:
            return seed, f"seed {seed}: {done.stdout[-500:]}"
    return seed, ""


def tests(name: str, chosen: str, rounds: int) -> str:
    """The tests of a file, in their long version; what was wrong."""
    done = run(
        [*PYTEST, "-m", "", str(ROOT / "tests" / "training" / name), "-k", chosen], {"TORTURE_ROUNDS": str(rounds)}
    )
    return done.stdout[-500:] if done.returncode else ""


def run(words: list[str], more: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(SUPPORT)]), **more}
    return subprocess.run(words, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="runs that are killed, of control and of texts each")
    parser.add_argument("--minutes", type=float, default=10.0, help="of random input")
    args = parser.parse_args()
    rows = []

    def add(what: str, count: str, wrong: str, begin: float) -> None:
        rows.append({"test": what, "count": count, "wrong": wrong, "seconds": round(time.monotonic() - begin)})
        print(f"{what:24} {count:24} {wrong or 'passed'}", flush=True)

    for kind in ("control", "text"):
        begin = time.monotonic()
        add(f"kills and signals, {kind}", f"{args.kills} runs", kills(kind, args.kills), begin)
    count, begin = max(1, args.kills // 10), time.monotonic()
    add(
        "broken environments",
        f"{3200 * count:,} steps",
        tests("test_env_faults.py", "whatever_fails", 2 * count),
        begin,
    )
    begin = time.monotonic()
    add("memory growth", "1,000 iterations", tests("test_memory.py", "does_not_grow", 1), begin)
    begin = time.monotonic()
    rounds, wrong = fuzz(args.minutes)
    add("random input", f"{rounds} rounds of 13,400", wrong, begin)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
