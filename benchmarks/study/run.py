"""Runs the study's missing cells, several at once, each into a file of its own: ``results/study/ENV/METHOD/SEED.json``.

A cell that is there already is not repeated; interrupt it and start it again as you like.

    python benchmarks/study/run.py                                         # everything that is missing
    python benchmarks/study/run.py --envs CartPole-v1 --methods ppo        # some of it
    python benchmarks/study/run.py --list                                  # what is there
    python benchmarks/study/run.py --again 3                               # three random cells once more, compared with their files
"""

import argparse
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from plan import FIRST_SEED, METHODS, TASKS

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "study"
TUNED = HERE / "tuned.json"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


class Cell(NamedTuple):
    """A run of the study."""

    env: str
    method: str
    seed: int

    @property
    def path(self) -> Path:
        return RESULTS / self.env / self.method / f"{self.seed}.json"


def cells(envs: list[str], methods: list[str]) -> list[Cell]:
    """All of the plan, seed after seed, so that every method has as many when the time is up."""
    tasks = [task for task in TASKS if task.env in envs]
    return [
        Cell(task.env, method, FIRST_SEED + number)
        for task in tasks
        for number in range(task.seeds)
        for method in task.methods
        if method in methods
    ]


def run(cell: Cell, factors: dict[str, Any] | None = None) -> dict[str, Any]:
    """The cell's result, from a process of its own, with what tuning chose for the method or with other factors."""
    if factors is None:
        factors = json.loads(TUNED.read_text()).get(cell.method, {})
    command = [sys.executable, "-W", "ignore", str(HERE / "cell.py"), "--env", cell.env, "--method", cell.method]
    command += ["--seed", str(cell.seed), "--tuned", json.dumps(factors)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ONE_THREAD, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def keep(cell: Cell) -> None:
    """Run it, and write its file at once."""
    result = run(cell)
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    cell.path.write_text(json.dumps(result) + "\n")
    print(f"{cell.env} {cell.method} {cell.seed}: {result['final']:.1f} in {result['cpu_seconds']:.0f} s", flush=True)


def again(count: int, jobs: int) -> None:
    """Repeat random cells; raises where one does not give what its file says."""
    there = [cell for cell in cells([task.env for task in TASKS], list(METHODS)) if cell.path.exists()]
    chosen = random.Random().sample(there, min(count, len(there)))
    with ThreadPoolExecutor(jobs) as pool:
        for cell, found in zip(chosen, pool.map(run, chosen), strict=True):
            recorded = json.loads(cell.path.read_text())
            same = all(found[key] == recorded[key] for key in ("steps", "returns", "final", "env_steps"))
            print(f"{cell.env} {cell.method} {cell.seed}: {'the same' if same else 'DIFFERS'}", flush=True)
            if not same:
                raise SystemExit(f"recorded {recorded}\nfound    {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", nargs="+", choices=[task.env for task in TASKS], default=[t.env for t in TASKS])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--again", type=int, metavar="COUNT")
    args = parser.parse_args()
    if args.again:
        again(args.again, args.jobs)
        return
    planned = cells(args.envs, args.methods)
    missing = [cell for cell in planned if not cell.path.exists()]
    print(f"{len(planned) - len(missing)} of {len(planned)} cells are there", flush=True)
    if args.list:
        return
    with ThreadPoolExecutor(args.jobs) as pool:
        for job in [pool.submit(keep, cell) for cell in missing]:
            job.result()


if __name__ == "__main__":
    main()
