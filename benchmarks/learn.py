"""Learning claims: greedy return of the final policy over 100 fresh episodes, several seeds, with intervals.

Seeds start at 100; tuning used others, except for PPO's preset of LunarLander. Every run is a process of its own. Results go to
``benchmarks/results/learn.json``, run by run; a run that is there already is not repeated unless ``--fresh``.

    make learn                                   # every row; exit status 1 if a claim fails
    python benchmarks/learn.py --only CartPole   # the rows whose name contains it
    python benchmarks/learn.py --reference       # the same without compiling: learning must not depend on what is fast

With ``--reference`` nothing is compiled, and environments are Gymnasium's, stepped one by one
(``results/learn_reference.json``).
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

RESULT = Path(__file__).parent / "results" / "learn.json"
REFERENCE_RESULT = RESULT.with_name("learn_reference.json")
REFERENCE = ("--speed", "off", "--env.vectorization", "sync")


OVERSHOOT = 0.04
"""Share of the budget by which runs stop early: iterations are finished, and so are GRPO's open groups."""


class Row(NamedTuple):
    """A claim: so many of the seeds reach the score within the steps. Without a score it is a record."""

    env: str
    algorithm: str
    total_steps: int
    seeds: int
    score: float | None = None
    needed: int = 0

    @property
    def name(self) -> str:
        return f"{self.env}-{self.algorithm}-{self.total_steps}"


ROWS = (
    Row("CartPole-v1", "grpo", 100_000, 10, 475, 9),
    Row("CartPole-v1", "ppo", 100_000, 10, 475, 9),
    Row("Pendulum-v1", "ppo", 100_000, 3, -250, 3),
    Row("Acrobot-v1", "ppo", 200_000, 3, -100, 3),
    Row("LunarLander-v3", "ppo", 1_000_000, 3, 200, 3),
    Row("MountainCarContinuous-v0", "ppo", 200_000, 3),
    Row("Pendulum-v1", "grpo", 100_000, 3),
    Row("Acrobot-v1", "grpo", 200_000, 3),
    Row("LunarLander-v3", "grpo", 1_000_000, 3, 200, 3),
    Row("MountainCarContinuous-v0", "grpo", 200_000, 3),
)


def groupwise(*arguments: str) -> str:
    command = [sys.executable, "-m", "groupwise", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout


def run(row: Row, seed: int, more: tuple[str, ...]) -> dict:
    """Train one seed and evaluate the policy it ends with on episodes that training never saw."""
    steps = round(row.total_steps * (1 - OVERSHOOT))
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/run"
        groupwise(
            *("train", row.env, "--algorithm", row.algorithm, "--seed", str(seed), "--run-dir", path),
            *("--total-steps", str(steps), "--logging.progress", "none", *more),
        )
        summary = json.loads(Path(path, "summary.json").read_text())
        result = json.loads(groupwise("eval", path, "--episodes", "100", "--seed", str(10_000 + seed), "--json"))
    return {
        "seed": seed,
        "return_mean": result["return_mean"],
        "env_steps": summary["env_steps"],
        "seconds": summary["seconds"],
    }


def report(row: Row, runs: list[dict]) -> bool:
    """Print one row; True unless its claim failed."""
    scores = [r["return_mean"] for r in runs]
    most = max(r["env_steps"] for r in runs)
    if most > row.total_steps:
        raise RuntimeError(f"{row.name} took {most} steps, beyond its budget; fix: raise OVERSHOOT")
    middle, spread = statistics.mean(scores), statistics.stdev(scores) if len(scores) > 1 else 0.0
    reached = "" if row.score is None else f"{sum(s >= row.score for s in scores)}/{len(scores)} >= {row.score:g}"
    seconds = statistics.median(r["seconds"] for r in runs)
    print(
        f"{row.env:26} {row.algorithm:5} {row.total_steps:>9,} steps  mean {middle:8.1f} +- {spread:6.1f}"
        f"  least {min(scores):8.1f}  {reached:16} {seconds:6.1f} s a run",
        flush=True,
    )
    return row.score is None or sum(s >= row.score for s in scores) >= row.needed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--fresh", action="store_true", help="repeat runs that are recorded already")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--reference", action="store_true", help="without anything that is there for speed")
    parser.add_argument("--out", type=Path, help="results, in place of those in benchmarks/results")
    parser.add_argument("--smallest", action="store_true", help="one seed, few steps and no claim")
    args = parser.parse_args()
    path, more = (REFERENCE_RESULT, REFERENCE) if args.reference else (RESULT, ())
    path = args.out or path
    smallest = {"total_steps": 2_100, "seeds": 1, "score": None} if args.smallest else {}  # PPO's iteration is 2,048
    results = json.loads(path.read_text()) if path.exists() else {}
    claims = []
    for row in (r._replace(**smallest) for r in ROWS if args.only in r.name):
        known = {} if args.fresh else {r["seed"]: r for r in results.get(row.name, [])}
        missing = [seed for seed in range(100, 100 + row.seeds) if seed not in known]
        with ThreadPoolExecutor(args.jobs) as pool:
            known |= {r["seed"]: r for r in pool.map(lambda seed, row=row: run(row, seed, more), missing)}
        results[row.name] = [known[seed] for seed in sorted(known)]
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
        claims.append(report(row, results[row.name]))
    return 0 if all(claims) else 1


if __name__ == "__main__":
    sys.exit(main())
