"""Success of robot arms before and after reinforcement learning, on Meta-World and FetchPush.

For each task and seed: demonstrations of the scripted expert, a clone of them, then GRPO with shared starts, GRPO without
them (``start_mode="none"``: members of a group have only the task in common), and PPO with a value head, each from that clone,
with equal settings and environment steps. ``FetchPushDense-v4`` starts from random weights instead. Success is that of the
deterministic actions in 100 episodes with starts that no training saw, the same for all. Policies read states and decide on chunks
of actions; the reward is success, but for ``FetchPushDense-v4``.

Settings were chosen on seed 0 of ``push-v3`` in runs of 150,000 steps, and for Fetch on seed 0 of ``FetchPush-v4`` in runs of
250,000 steps; seeds here start at 1. Results go to ``benchmarks/results/robot_learning.json``, run by run; what is there already
is not repeated.

    python benchmarks/robot_learning.py                           # everything, several hours on two cores
    python benchmarks/robot_learning.py --only push-v3 --arms grpo ppo --seeds 1
    python benchmarks/robot_learning.py --table                   # print what is there
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"

import groupwise as gw
from groupwise.embodied.demos import record_demos
from groupwise.report.folder import wilson_95

RESULT = Path(__file__).parent / "results" / "robot_learning.json"
EPISODES = 100
META_WORLD = {"num_steps": 16, "minibatch_size": 256, "num_epochs": 8, "learning_rate": 3e-4}
FETCH = {"num_steps": 50, "minibatch_size": 640, "num_epochs": 5, "learning_rate": 3e-4}


class Task(NamedTuple):
    """What is trained on, and how."""

    env: str
    demos: int
    """So many that the clone solves 20 to 60 %; 0: no clone, random weights."""
    steps: int
    """At least 10,000 episodes of GRPO."""
    settings: dict[str, Any] = META_WORLD
    chunk: int = 5
    """Actions of a decision."""
    label_noise: float = 0.1
    cloned_steps: int = 100_000
    num_envs: int = 64


TASKS = {
    "push-v3": Task("MetaWorld/push-v3", 5, 800_000),
    "plate-slide-v3": Task("MetaWorld/plate-slide-v3", 2, 650_000),
    "dial-turn-v3": Task("MetaWorld/dial-turn-v3", 3, 800_000),
    "lever-pull-v3": Task("MetaWorld/lever-pull-v3", 4, 950_000),
    "FetchPush-v4": Task("FetchPush-v4", 100, 1_000_000, FETCH, chunk=2, label_noise=0.05, cloned_steps=200_000),
    "FetchPushDense-v4": Task("FetchPushDense-v4", 0, 1_000_000, FETCH, chunk=2),
}
ARMS = {
    "grpo": ("grpo", "auto"),
    "grpo_unshared": ("grpo", "none"),
    "ppo": ("ppo", "auto"),
}
"""Algorithm and how members share their start."""
NETWORK = {"hidden_sizes": [128, 128]}


def success(run: Any, seed: int, episodes: int) -> float:
    return gw.evaluate(run, episodes=episodes, seed=10_000 + seed).success_rate


def clone(task: Task, seed: int, folder: Path) -> Path:
    """The run folder of a clone."""
    env = gw.EnvCfg(id=task.env, action_chunk=task.chunk)
    demos = record_demos(env, episodes=task.demos, out=folder / "demos", seed=seed, noise=0.1)
    policy = {"log_std_init": -1.0, **NETWORK}
    cfg = gw.config.BCCfg(data=demos.path, holdout=0.0, label_noise=task.label_noise)
    return gw.train(env, cfg, total_steps=task.cloned_steps, seed=seed, policy=policy, run_dir=folder / "clone").path


def one(name: str, seed: int, arm: str, task: Task, episodes: int) -> dict[str, Any]:
    """One arm of one task and seed, from its own copy of the clone."""
    algorithm, start_mode = ARMS[arm]
    with tempfile.TemporaryDirectory() as folder:
        start = clone(task, seed, Path(folder)) if task.demos else None
        began = time.perf_counter()
        run = gw.train(
            gw.EnvCfg(id=task.env, action_chunk=task.chunk, num_envs=task.num_envs, start_mode=start_mode),
            {"name": algorithm, **task.settings},
            total_steps=task.steps,
            seed=seed,
            policy={"init_from": str(start)} if start else NETWORK,
            evaluation={"interval": task.steps // 5, "episodes": episodes},
            run_dir=Path(folder, "run"),
        )
        metrics = run.metrics()
        return {
            "task": name,
            "seed": seed,
            "arm": arm,
            "before": success(start, seed, episodes) if start else None,
            "after": success(run, seed, episodes),
            "curve": [[m["env_steps"], m["eval/success_rate"]] for m in metrics if "eval/success_rate" in m],
            "episodes": round(sum(m.get("rollout/episodes", 0) for m in metrics)),
            "env_steps": metrics[-1]["env_steps"],
            "seconds": round(time.perf_counter() - began),
        }


def table(results: list[dict[str, Any]]) -> None:
    """Success in %: mean over seeds with least and greatest, and the 95 % interval of all episodes together."""
    for task in TASKS:
        for arm in ARMS:
            if runs := [r for r in results if (r["task"], r["arm"]) == (task, arm)]:
                before = "" if runs[0]["before"] is None else f"before {spread([r['before'] for r in runs])}"
                rate = statistics.mean(r["after"] for r in runs)
                low, high = (100 * end for end in wilson_95(rate, EPISODES * len(runs)))
                episodes = statistics.mean(r["episodes"] for r in runs)
                print(
                    f"{task:18} {arm:14} {len(runs)} seeds  {before}  after {spread([r['after'] for r in runs])}"
                    f"  [{low:.0f}, {high:.0f}]  {episodes:,.0f} episodes  {statistics.median(r['seconds'] for r in runs):.0f} s"
                )


def spread(rates: list[float]) -> str:
    return f"{100 * statistics.mean(rates):4.1f} ({100 * min(rates):.0f} to {100 * max(rates):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="only print what is there")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="as few steps as a run can have")
    args = parser.parse_args()
    smallest = {"demos": 1, "steps": 5, "cloned_steps": 100, "num_envs": 8} if args.smallest else {}
    tasks = {name: task._replace(**smallest) for name, task in TASKS.items()}
    results = json.loads(args.out.read_text()) if args.out.exists() else []
    known = {(r["task"], r["seed"], r["arm"]) for r in results}
    jobs = [(task, seed, arm) for seed in range(1, args.seeds + 1) for arm in args.arms for task in args.only]
    missing = [] if args.table else [job for job in jobs if job not in known]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        episodes = 2 if args.smallest else EPISODES
        for done in as_completed([pool.submit(one, *job, tasks[job[0]], episodes) for job in missing]):
            results.append(done.result())
            args.out.write_text(json.dumps(results, indent=1) + "\n")
            print(results[-1], flush=True)
    table(results)


if __name__ == "__main__":
    main()
