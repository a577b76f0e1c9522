"""``gw.evolve`` beside AgileRL's evolution, both with their own PPO: seconds until the best member reaches a score.

Both have four members, at least 10,240 environment steps of each in a round, 16 environments, tournaments of two with
elitism, the same ranges and the settings of AgileRL's PPO configuration (``peers/evolution_watch.py``), on the same two cores. AgileRL trains its
members one after another in one process, we train two at once.

After each round the best member, as its library ranks it, plays 100 greedy episodes, the same for both. The search ends when
their mean is the score, or after 12 rounds. These episodes count nowhere. What a search itself evaluates (16 episodes of each
member in a round) counts, and so does its set-up after the imports, with our worker processes and their imports. Searches take
turns, each in a process of its own. Cells go to ``benchmarks/results/agilerl.json`` one by one; one that is there already is
not repeated.

- ``seconds``: of the wall, from the end of the imports to the end of the round that reached the score.
- ``process_seconds``: the same from the start of the process.
- ``cpu_seconds``: of the processor, from the start of the process, of all its processes and threads.
- ``env_steps``: that all members trained, without evaluations.

    make .venv-peers-agilerl/.done
    python benchmarks/populations_agilerl.py                  # needs psutil
    python benchmarks/populations_agilerl.py --report         # the table, nothing is run
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cells as cells_of

HERE = Path(__file__).parent
RESULT = HERE / "results" / "agilerl.json"
THEIRS = "AgileRL"
WORKERS = {THEIRS: "evolution_agilerl.py", "groupwise": "evolution_ours.py"}
FIRST_SEED = 5000
CORES = 2
Cell = dict[str, Any]


def run(method: str, seed: int, python: Path) -> Cell:
    """A finished cell."""
    interpreter = str(python) if method == THEIRS else sys.executable
    command = [interpreter, str(HERE / "peers" / WORKERS[method]), "--seed", str(seed)]
    load = os.getloadavg()[0]
    # one thread in each process: with two, AgileRL is many times slower wherever a core is taken
    environ = os.environ | {"PEERS_STARTED": str(time.time()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True)
    return {"method": method, "load": round(load, 1)} | json.loads(done.stdout.splitlines()[-1])


def spread(values: Iterable[float], digits: int = 1) -> str:
    """Median, least and most; a search that did not reach the score is slower than any other."""
    found = sorted(values)
    shown = [
        "never" if math.isinf(value) else f"{value:,.{digits}f}"
        for value in (statistics.median(found), found[0], found[-1])
    ]
    return f"{shown[0]} ({shown[1]} to {shown[2]})"


def to_score(cell: Cell, clock: str) -> float:
    return float(cell[clock]) if cell["reached"] else math.inf


def ratios(cells: list[Cell], theirs: list[Cell], clock: str) -> list[float]:
    """Of ours to theirs, seed by seed, where at least one of the two reached the score."""
    other = {cell["seed"]: to_score(cell, clock) for cell in theirs}
    pairs = [(to_score(cell, clock), other[cell["seed"]]) for cell in cells if cell["seed"] in other]
    return [
        0.0 if math.isinf(their) else our / their for our, their in pairs if not (math.isinf(our) and math.isinf(their))
    ]


def report(cells: list[Cell]) -> None:
    by_method = {method: [cell for cell in cells if cell["method"] == method] for method in WORKERS}
    for method, found in by_method.items():
        print(f"{method}: {sum(cell['reached'] for cell in found)} of {len(found)} reached the score")
        for clock in ("seconds", "process_seconds", "cpu_seconds", "env_steps"):
            line = spread((to_score(cell, clock) for cell in found), 0 if clock == "env_steps" else 1)
            beside = ratios(found, by_method[THEIRS], clock) if method != THEIRS else []
            print(f"  {clock:16} {line}" + (f"   to AgileRL {spread(beside, 2)}" if beside else ""))
        print(f"  final score      {spread(cell['score'] for cell in found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--python", type=Path, default=HERE.parent / ".venv-peers-agilerl" / "bin" / "python")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    cells = cells_of.load(RESULT)
    if args.report:
        report(cells)
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    for seed in range(FIRST_SEED, FIRST_SEED + args.seeds):
        for method in sorted(WORKERS, reverse=seed % 2 == 1):  # each begins in every other pair
            if any((cell["method"], cell["seed"]) == (method, seed) for cell in cells):
                continue
            cells.append(run(method, seed, args.python))
            cells_of.save(RESULT, cells)
            print({name: value for name, value in cells[-1].items() if name != "rounds"}, flush=True)
    report(cells)


if __name__ == "__main__":
    main()
