"""Success on Meta-World before and after reinforcement learning: a clone of few demonstrations, then GRPO or PPO.

For each task and seed: demonstrations of the scripted expert, a clone of them, then GRPO with shared starts, GRPO without
them (``start_mode="none"``: members of a group have only the task in common), and PPO with a value head, each from that clone,
with equal settings and environment steps. Success is that of the likeliest actions in 100 episodes with starts that no
training saw, the same for all. Policies read states and decide on chunks of 5 actions; the reward is success.

Settings were chosen on seed 0 of ``push-v3`` in runs of 150,000 steps; seeds here start at 1. Results go to
``benchmarks/results/metaworld.json``, run by run; what is there already is not repeated.

    python benchmarks/metaworld_table.py                           # everything, several hours on two cores
    python benchmarks/metaworld_table.py --only push-v3 --arms grpo ppo --seeds 1
    python benchmarks/metaworld_table.py --table                   # print what is there
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

RESULT = Path(__file__).parent / "results" / "metaworld.json"
EPISODES = 100
CHUNK = 5
CLONED_STEPS = 100_000


class Task(NamedTuple):
    """So many demonstrations, of which the clone solves 20 to 60 %, and steps for 10,000 episodes of GRPO."""

    demos: int
    steps: int


TASKS = {
    "push-v3": Task(5, 800_000),
    "plate-slide-v3": Task(2, 650_000),
    "dial-turn-v3": Task(3, 800_000),
    "lever-pull-v3": Task(4, 950_000),
}
ARMS = {
    "grpo": ("grpo", "auto"),
    "grpo_unshared": ("grpo", "none"),
    "ppo": ("ppo", "auto"),
}
"""Algorithm and how members share their start."""
SETTINGS = {"num_steps": 16, "minibatch_size": 256, "num_epochs": 8, "learning_rate": 3e-4}


def success(run: Any, seed: int) -> float:
    return gw.evaluate(run, episodes=EPISODES, seed=10_000 + seed).success_rate


def clone(task: str, seed: int, folder: Path) -> Path:
    """The run folder of a clone."""
    env = gw.EnvCfg(id=f"MetaWorld/{task}", action_chunk=CHUNK)
    demos = gw.record_demos(env.id, episodes=TASKS[task].demos, out=folder / "demos", seed=seed, noise=0.1)
    policy = {"log_std_init": -1.0, "hidden_sizes": [128, 128]}
    cfg = gw.BCCfg(data=demos.path, holdout=0.0)
    return gw.train(env, cfg, total_steps=CLONED_STEPS, seed=seed, policy=policy, run_dir=folder / "clone").path


def one(job: tuple[str, int, str]) -> dict[str, Any]:
    """One arm of one task and seed, from its own copy of the clone."""
    task, seed, arm = job
    algorithm, start_mode = ARMS[arm]
    with tempfile.TemporaryDirectory() as name:
        start = clone(task, seed, Path(name))
        began = time.perf_counter()
        run = gw.train(
            gw.EnvCfg(id=f"MetaWorld/{task}", action_chunk=CHUNK, num_envs=64, start_mode=start_mode),
            {"name": algorithm, **SETTINGS},
            total_steps=TASKS[task].steps,
            seed=seed,
            policy={"init_from": str(start)},
            evaluation={"interval": TASKS[task].steps // 5, "episodes": EPISODES},
            run_dir=Path(name, "run"),
        )
        metrics = run.metrics()
        return {
            "task": task,
            "seed": seed,
            "arm": arm,
            "before": success(start, seed),
            "after": success(run, seed),
            "curve": [[m["env_steps"], m["eval/success_rate"]] for m in metrics if "eval/success_rate" in m],
            "episodes": round(sum(m.get("rollout/episodes", 0) for m in metrics)),
            "env_steps": metrics[-1]["env_steps"],
            "seconds": round(time.perf_counter() - began),
        }


def table(results: list[dict[str, Any]]) -> None:
    """Success in % over seeds: mean, least and greatest."""
    for task in TASKS:
        for arm in ARMS:
            runs = [r for r in results if (r["task"], r["arm"]) == (task, arm)]
            if not runs:
                continue
            before, after = ([100 * r[key] for r in runs] for key in ("before", "after"))
            print(
                f"{task:16} {arm:14} {len(runs)} seeds  before {statistics.mean(before):5.1f} ({min(before):.0f} to {max(before):.0f})"
                f"  after {statistics.mean(after):5.1f} ({min(after):.0f} to {max(after):.0f})"
                f"  {statistics.mean(r['episodes'] for r in runs):,.0f} episodes  {statistics.median(r['seconds'] for r in runs):.0f} s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="only print what is there")
    args = parser.parse_args()
    results = json.loads(RESULT.read_text()) if RESULT.exists() else []
    known = {(r["task"], r["seed"], r["arm"]) for r in results}
    jobs = [(task, seed, arm) for seed in range(1, args.seeds + 1) for arm in args.arms for task in args.only]
    missing = [] if args.table else [job for job in jobs if job not in known]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(one, job) for job in missing]):
            results.append(done.result())
            RESULT.write_text(json.dumps(results, indent=1) + "\n")
            print(results[-1], flush=True)
    table(results)


if __name__ == "__main__":
    main()
