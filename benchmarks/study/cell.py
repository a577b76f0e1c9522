"""One cell of the study: an environment, a method, a seed, in a process of its own.

python benchmarks/study/cell.py --env CartPole-v1 --method step_mask --seed 1200      # prints the result as JSON
"""

import argparse
import hashlib
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from plan import EPISODES, EVALUATIONS, FINAL_EPISODES, METHODS, OVERSHOOT, TASKS, Task, algorithm_options, task_of

from groupwise.seeding import derive_seed

PRESETS = Path(__file__).parent / "presets"
"""The environments' presets when the study began; the library's own may follow what it finds."""

Result = dict[str, Any]


def ours(task: Task, method: str, seed: int, tuned: dict[str, Any]) -> Result:
    """A run of ``gw.train`` as a user makes it, and 100 fresh episodes of the policy that it ends with."""
    import groupwise as gw

    cfg = settings(task, method, tuned).model_copy(update={"seed": seed})

    class Clock(gw.Callback):
        """The processor's time in training, without evaluations."""

        seconds = 0.0

        def on_training_start(self, trainer: Any) -> None:
            self.began = time.process_time()

        def on_iteration_end(self, trainer: Any, rollout: Any, metrics: Any) -> None:
            self.told = time.process_time()

        def on_evaluation_end(self, trainer: Any, result: Any) -> None:
            self.began += time.process_time() - self.told

        def on_training_end(self, trainer: Any) -> None:
            self.seconds = time.process_time() - self.began

    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        cfg = cfg.model_copy(update={"run_dir": Path(folder, "run")})
        run = gw.train(cfg, callbacks=[clock])
        points = [(row["env_steps"], row["eval/return_mean"]) for row in run.metrics() if "eval/return_mean" in row]
        final = gw.evaluate(run.path, FINAL_EPISODES, seed=derive_seed(seed, "final"))
        return {
            "steps": [steps for steps, _ in points],
            "returns": [round(value, 3) for _, value in points],
            "final": round(final.return_mean, 3),
            "env_steps": run.summary["env_steps"],
            "cpu_seconds": round(clock.seconds, 2),
        }


def settings(task: Task, method: str, tuned: dict[str, Any]) -> Any:
    """The config of the method's runs: the preset's, with what the method changes and what tuning found.

    Near states have discount and lambda of PPO's preset, since their advantages are PPO's but for the values.
    """
    from groupwise import config

    told, options = round(task.steps * (1 - OVERSHOOT)), algorithm_options(method, task)
    if method == "near_states":
        ppo = config.load_config(PRESETS / f"{task.env}.ppo.json").algorithm
        options = options | {"gamma": ppo.gamma, "credit": options["credit"] | {"gae_lambda": ppo.gae_lambda}}
    preset = PRESETS / f"{task.env}.{options['name']}.json"
    cfg = scaled(config.load_config(preset, options, total_steps=told), tuned)
    return cfg.model_copy(
        update={
            "logging": cfg.logging.model_copy(update={"progress": "none"}),
            "evaluation": cfg.evaluation.model_copy(
                update={"interval": task.steps // EVALUATIONS, "episodes": EPISODES}
            ),
        }
    )


def scaled(cfg: Any, tuned: dict[str, Any]) -> Any:
    """The preset's settings times what tuning found (``tune.SPACE``); as many steps an iteration with larger groups."""
    algorithm = cfg.algorithm
    update = {
        "learning_rate": algorithm.learning_rate * tuned.get("learning_rate", 1.0),
        "num_epochs": max(1, round(algorithm.num_epochs * tuned.get("num_epochs", 1.0))),
        "minibatch_size": round(algorithm.minibatch_size * tuned.get("minibatch_size", 1.0)),
    }
    if "schedule" in tuned:
        update["schedule"] = type(algorithm)(schedule=tuned["schedule"]).schedule
    if hasattr(algorithm, "gae_lambda"):
        update["gae_lambda"] = 1 - (1 - algorithm.gae_lambda) * tuned.get("one_minus_lambda", 1.0)
        return cfg.model_copy(update={"algorithm": algorithm.model_copy(update=update)})
    if "one_minus_lambda" in tuned:
        gae_lambda = 1 - (1 - algorithm.credit.gae_lambda) * tuned["one_minus_lambda"]
        update["credit"] = algorithm.credit.model_copy(update={"gae_lambda": gae_lambda})
    update["group_size"] = algorithm.group_size * tuned.get("group_size", 1)
    rows = max(cfg.env.num_envs, update["group_size"])
    update["num_steps"] = algorithm.num_steps * cfg.env.num_envs // rows
    env = cfg.env.model_copy(update={"num_envs": rows})
    return cfg.model_copy(update={"algorithm": algorithm.model_copy(update=update), "env": env})


def digest(cfg: Any) -> str:
    """Tells settings apart."""
    return hashlib.sha256(cfg.model_dump_json().encode()).hexdigest()[:12]


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
        result |= {"tuned": args.tuned, "settings": digest(settings(task, args.method, args.tuned))}
    used = resource.getrusage(resource.RUSAGE_SELF)
    kib = used.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    result |= {"memory_mib": round(kib / 1024), "process_seconds": round(time.perf_counter() - start, 2)}
    print(json.dumps({"env": args.env, "method": args.method, "seed": args.seed, **result}))


if __name__ == "__main__":
    main()
