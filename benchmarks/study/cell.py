"""One cell of the study: an environment, a method, a seed, in a process of its own.

python benchmarks/study/cell.py --env CartPole-v1 --method step_mask --seed 1200      # prints the result as JSON
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from plan import EPISODES, EVALUATIONS, FINAL_EPISODES, METHODS, OVERSHOOT, TASKS, Task, algorithm_options, task_of

Result = dict[str, Any]


def ours(task: Task, method: str, seed: int, tuned: dict[str, Any]) -> Result:
    """A run of ``gw.train`` as a user makes it, and 100 fresh episodes of the policy that it ends with."""
    import groupwise as gw
    from groupwise import config

    told = round(task.steps * (1 - OVERSHOOT))
    cfg = config.resolve(task.env, algorithm_options(method, task), seed=seed, total_steps=told)
    cfg = scaled(cfg, tuned)
    with tempfile.TemporaryDirectory() as folder:
        cfg = cfg.model_copy(
            update={
                "run_dir": Path(folder, "run"),
                "logging": cfg.logging.model_copy(update={"progress": "none"}),
                "evaluation": cfg.evaluation.model_copy(
                    update={"interval": task.steps // EVALUATIONS, "episodes": EPISODES}
                ),
            }
        )
        run = gw.train(cfg)
        points = [(row["env_steps"], row["eval/return_mean"]) for row in run.metrics() if "eval/return_mean" in row]
        final = gw.evaluate(run.path, FINAL_EPISODES, seed=100_000 + seed)
        return {
            "steps": [steps for steps, _ in points],
            "returns": [round(value, 3) for _, value in points],
            "final": round(final.return_mean, 3),
            "env_steps": run.summary["env_steps"],
            "seconds": round(run.summary["seconds"], 2),
        }


def scaled(cfg: Any, tuned: dict[str, Any]) -> Any:
    """The preset's settings times what tuning found (``tune.SPACE``)."""
    algorithm = cfg.algorithm
    update = {
        "learning_rate": algorithm.learning_rate * tuned.get("learning_rate", 1.0),
        "num_epochs": max(1, round(algorithm.num_epochs * tuned.get("num_epochs", 1.0))),
        "minibatch_size": round(algorithm.minibatch_size * tuned.get("minibatch_size", 1.0)),
    }
    if "schedule" in tuned:
        update["schedule"] = algorithm.schedule.model_copy(update={"name": tuned["schedule"]})
    if hasattr(algorithm, "gae_lambda"):
        update["gae_lambda"] = 1 - (1 - algorithm.gae_lambda) * tuned.get("one_minus_lambda", 1.0)
        return cfg.model_copy(update={"algorithm": algorithm.model_copy(update=update)})
    update["group_size"] = algorithm.group_size * tuned.get("group_size", 1)
    rows = max(cfg.env.num_envs, update["group_size"])
    env = cfg.env.model_copy(update={"num_envs": rows})
    return cfg.model_copy(update={"algorithm": algorithm.model_copy(update=update), "env": env})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", choices=[task.env for task in TASKS], required=True)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, help="other than the study's")
    parser.add_argument("--tuned", type=json.loads, default={}, help="factors of the preset's settings, as JSON")
    args = parser.parse_args()
    task = task_of(args.env)
    if args.steps:
        task = Task(task.env, args.steps, task.seeds, task.methods, task.horizon)
    start = time.perf_counter()
    if args.method == "sb3_ppo":
        from sb3_cell import sb3_ppo

        result = sb3_ppo(task, args.seed)
    else:
        result = ours(task, args.method, args.seed, args.tuned)
    used = resource.getrusage(resource.RUSAGE_SELF)
    kib = used.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    result |= {
        "memory_mib": round(kib / 1024),
        "process_seconds": round(time.perf_counter() - start, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
    }
    print(json.dumps({"env": args.env, "method": args.method, "seed": args.seed, **result}))


if __name__ == "__main__":
    main()
