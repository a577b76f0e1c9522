"""Study of values without a critic: PPO, and GRPO with the baselines ``lstd``, ``knn`` and per time step.

Metric: the greedy return of the policy that a run ends with, over fresh episodes (100, or 50 on MuJoCo's robots);
interquartile mean over seeds with a 95 % bootstrap interval, and the probability that a run ends above one of PPO.
Beside it the mean training return of all iterations, CPU seconds of training and peak memory. Settings are those of the
environments' presets; ``settings`` says what each method changes.
``ppo_shared``, a value head without a network of its own, is a middle way between PPO and no critic, meant for robots.
Seeds start at 3,000. No setting was chosen on them, but for LunarLander's preset and the lambda of robots' presets.
Each run is a process of its own on one thread.

    python benchmarks/study.py                        # every run that results/study.json lacks, two at a time
    python benchmarks/study.py --only Hopper-v5       # of one environment; --methods and --seeds select, too
    python benchmarks/study.py --table                # docs/generated/study_lstd.md from what is there
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

import cells

HERE = Path(__file__).resolve()
RESULT = HERE.parent / "results" / "study.json"
TABLE = HERE.parents[1] / "docs" / "generated" / "study_lstd.md"
FIRST_SEED = 3_000
Tree = dict[str, Any]
PER_STEP: Tree = {"group_key": "group_step", "returns": "return_to_go", "baseline": "mean", "scale": "batch_std"}


class Task(NamedTuple):
    """An environment, as many steps as its preset, and the least number of seeds."""

    steps: int
    seeds: int
    final_episodes: int = 100
    step: Tree | None = None
    """What the preset of the comparison per time step had of its own before ``knn`` or ``lstd`` took its place."""


BY_GROUP: Tree = {"credit": PER_STEP | {"scale": "population_std"}}
TASKS = {
    "CartPole-v1": Task(100_000, 10, step={"learning_rate": 2e-3, "gamma": 0.995, "schedule": "none"}),
    "Pendulum-v1": Task(100_000, 10, step=BY_GROUP | {"schedule": "none"}),
    "Acrobot-v1": Task(200_000, 10, step=BY_GROUP | {"schedule": "none"}),
    "MountainCarContinuous-v0": Task(200_000, 10, step={"gamma": 0.999}),
    "LunarLander-v3": Task(1_000_000, 5, step=BY_GROUP | {"gamma": 0.99}),
    "Hopper-v5": Task(1_000_000, 5, 50),
    "HalfCheetah-v5": Task(1_000_000, 5, 50, step={"gamma": 0.9}),
    "Walker2d-v5": Task(1_000_000, 5, 50),
    "Swimmer-v5": Task(1_000_000, 5, 50),
    "Ant-v5": Task(1_000_000, 5, 50),
}

# Methods: the settings of a run of an environment


def ppo(own: Tree, ppo_own: Tree) -> Tree:
    """PPO's preset."""
    return {"name": "ppo"}


def ppo_long(own: Tree, ppo_own: Tree) -> Tree:
    """PPO's preset at a lambda of 0.99."""
    return {"name": "ppo", "gae_lambda": 0.99}


def ppo_shared(own: Tree, ppo_own: Tree) -> Tree:
    """PPO's preset with a critic that is one layer on the actor's hidden ones."""
    return {"name": "ppo"}


def lstd(own: Tree, ppo_own: Tree) -> Tree:
    """GRPO's preset with ``lstd`` at its defaults; the discount of PPO's preset where GRPO's was chosen per time step."""
    return {"name": "grpo", "gamma": _gamma(own, ppo_own), "credit": _credit("lstd")}


def lstd_long(own: Tree, ppo_own: Tree) -> Tree:
    """``lstd`` with advantages at a lambda of 0.99, as ``ppo_long``."""
    return lstd(own, ppo_own) | {"credit": _credit("lstd") | {"baseline": {"name": "lstd", "gae_lambda": 0.99}}}


def knn(own: Tree, ppo_own: Tree) -> Tree:
    """GRPO's preset with ``knn``; where that is not the preset, at the discount and lambda of PPO's."""
    if _baseline(own) == "knn":
        return {"name": "grpo"}
    baseline = {"name": "knn", "gae_lambda": ppo_own["gae_lambda"]}
    return {"name": "grpo", "gamma": _gamma(own, ppo_own), "credit": _credit("knn") | {"baseline": baseline}}


def step(own: Tree, ppo_own: Tree) -> Tree:
    """GRPO's preset with the comparison per time step."""
    return {"name": "grpo"} | ({} if _baseline(own) == "mean" else {"credit": PER_STEP})


METHODS: dict[str, Callable[[Tree, Tree], Tree]] = {
    f.__name__: f for f in (ppo, lstd, ppo_long, lstd_long, step, knn, ppo_shared)
}


def _credit(preset: str) -> Tree:
    from groupwise.config.load import objective_preset

    return dict(objective_preset(preset).settings["credit"])


def _baseline(own: Tree) -> str:
    baseline = own["credit"]["baseline"]
    return str(baseline if isinstance(baseline, str) else baseline["name"])


def _gamma(own: Tree, ppo_own: Tree) -> float:
    return float(ppo_own["gamma"] if _baseline(own) == "mean" else own["gamma"])


def settings(env: str, method: str, steps: int) -> Tree:
    """Arguments of ``gw.train``."""
    from groupwise.config.load import env_preset

    task = TASKS[env]
    presets = env_preset(env)
    algorithm = METHODS[method](presets["grpo"]["algorithm"], presets["ppo"]["algorithm"])
    preset = presets[algorithm["name"]]
    algorithm = preset["algorithm"] | algorithm
    if method == "step":
        algorithm |= task.step or {}
    return {
        "env": env,
        "algorithm": algorithm,
        "num_envs": preset["env"]["num_envs"],
        "policy": preset.get("policy", {}) | ({"trunk": "shared"} if method == "ppo_shared" else {}),
        "total_steps": steps,
    }


# Cells: a run each


class Cell(NamedTuple):
    """A run of the study."""

    env: str
    method: str
    seed: int


def run(cell: Cell, smallest: bool = False) -> Tree:
    """Train, and evaluate the policy that training ends with. In a process of its own."""
    import numpy as np

    import groupwise as gw

    task = TASKS[cell.env]._replace(**{"steps": 4_000, "final_episodes": 2} if smallest else {})
    with tempfile.TemporaryDirectory() as folder:
        began, cpu = time.perf_counter(), time.process_time()
        run = gw.train(
            **settings(cell.env, cell.method, task.steps),
            seed=cell.seed,
            run_dir=f"{folder}/run",
            logging={"progress": "none"},
            evaluation={"interval": None, "episodes": 1},
        )
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
        rows = [row for row in run.metrics() if row.get("rollout/return_mean") is not None]
        tenths = np.array_split([row["rollout/return_mean"] for row in rows], 10)
        final = gw.evaluate(run, task.final_episodes, seed=100_000 + cell.seed)
        return cell._asdict() | {
            "final": round(final.return_mean, 2),
            "training_mean": round(float(np.mean([row["rollout/return_mean"] for row in rows])), 2),
            "training": [round(float(tenth.mean()), 1) for tenth in tenths],
            "env_steps": run.summary["env_steps"],
            "cpu_seconds": round(cpu, 1),
            "seconds": round(seconds, 1),
            "memory_mib": round(peak / 1024),
        }


def in_process(cell: Cell, smallest: bool = False) -> Tree:
    """The cell's result, from another process on one thread."""
    command = [sys.executable, "-P", "-W", "ignore", str(HERE), "--cell", *map(str, cell), *["--smallest"] * smallest]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    path = os.pathsep.join((str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])))
    env = os.environ | threads | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"{cell}\n{done.stderr[-3000:]}")
    result: Tree = json.loads(done.stdout.splitlines()[-1])
    return result


def plan(envs: list[str], methods: list[str], seeds: int | None) -> Iterator[Cell]:
    """Runs in order: seed after seed, so that every method has as many when the time is up."""
    for number in range(max(TASKS[env].seeds for env in envs)):
        for env in envs:
            if number < (seeds or TASKS[env].seeds):
                yield from (Cell(env, method, FIRST_SEED + number) for method in methods)


# Table


def table(found: cells.Cells) -> str:
    """Interquartile means with intervals, and probabilities of improvement on PPO, as Markdown."""
    import numpy as np

    from groupwise.comparison.results import estimate, figure, iqm, probability_of_improvement, shown

    def whole(number: float) -> str:
        return f"{number:,.0f}" if abs(number) >= 1000 else figure(number)

    def middle(runs: cells.Cells, key: str) -> float:
        return statistics.median(run[key] for run in runs)

    head = ("environment", "method", "runs", "final return, IQM", "each run", "training mean, IQM", "ends above PPO")
    head += ("CPU s", "MiB")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for env in TASKS:
        by_method = {m: [c for c in found if (c["env"], c["method"]) == (env, m)] for m in METHODS}
        scores = {m: np.array([c["final"] for c in runs]) for m, runs in by_method.items() if runs}
        for method, own in scores.items():
            runs = by_method[method]
            means = np.array([c["training_mean"] for c in runs])
            above = ""
            if method != "ppo" and "ppo" in scores:
                above = shown(estimate(probability_of_improvement, [own, scores["ppo"]]), "{:.2f}".format)
            row = (
                *(env, f"`{method}`", str(len(runs)), shown(estimate(iqm, [own]), whole)),
                ", ".join(f"{value:,.0f}" for value in sorted(own)),
                *(whole(float(iqm(means))), above),
                *(f"{middle(runs, 'cpu_seconds'):,.0f}", f"{middle(runs, 'memory_mib'):,.0f}"),
            )
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS), metavar="ENV")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, help="fewer or more than planned")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="write the table, run nothing")
    parser.add_argument("--cell", nargs=3, metavar=("ENV", "METHOD", "SEED"), help="one run, printed and not kept")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="runs of a few thousand steps")
    args = parser.parse_args()
    if args.cell:
        env, method, seed = args.cell
        print(json.dumps(run(Cell(env, method, int(seed)), args.smallest)))
        return
    done = cells.load(args.out)
    if args.table:
        TABLE.write_text(table(done))
        return
    known = {Cell(c["env"], c["method"], c["seed"]) for c in done}
    missing = [cell for cell in plan(args.only, args.methods, args.seeds) if cell not in known]
    print(f"{len(missing)} runs are missing", flush=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        for job in as_completed([pool.submit(in_process, cell, args.smallest) for cell in missing]):
            done.append(job.result())
            cells.save(args.out, done)
            cell = done[-1]
            print(
                f"{cell['env']} {cell['method']} {cell['seed']}: {cell['final']} in {cell['cpu_seconds']} s", flush=True
            )


if __name__ == "__main__":
    main()
