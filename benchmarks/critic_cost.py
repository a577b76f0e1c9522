"""What a critic costs: time and memory of training with and without one, at equal rollouts, minibatches and epochs.

Episodes of Pendulum-v1 all last 200 steps, so PPO, GRPO per time step and GRPO with the baseline ``knn`` take the same
iterations of 16 episodes, ten epochs in minibatches of 512. Networks have 64 or 1,024 units in each of two layers. Each
run trains on one thread in a process of its own, in turn; the first two iterations are not timed.

    python benchmarks/critic_cost.py            # results/critic_cost.json
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "critic_cost.json"
ROWS, LENGTH, GROUP, WARM_UP = 16, 200, 8, 2
ITERATIONS = {64: 40, 1024: 4}
"""Timed, by the networks' width."""
SHARED: dict[str, Any] = {
    "num_steps": LENGTH,
    "schedule": {"name": "linear"},
    "ent_coef": 0.0,
    "num_epochs": 10,
    "minibatch_size": 512,
    "learning_rate": 1e-3,
    "gamma": 0.9,
}
PER_STEP: dict[str, Any] = {
    "group_key": "group_step",
    "returns": "return_to_go",
    "baseline": "mean",
    "scale": "population_std",
    "normalize": "none",
}
KNN: dict[str, Any] = PER_STEP | {
    "group_key": "group",
    "baseline": "knn",
    "scale": "none",
    "normalize": "batch",
}
METHODS: dict[str, dict[str, Any]] = {
    "ppo": {"name": "ppo", "gae_lambda": 0.95},
    "grpo": {"name": "grpo", "group_size": GROUP, "credit": PER_STEP},
    "knn": {"name": "grpo", "group_size": GROUP, "credit": KNN},
}


def trained(method: str, width: int, iterations: int) -> dict[str, float]:
    """Milliseconds of an iteration's rollout and update, median; the process's peak of memory."""
    import groupwise as gw

    seconds: list[tuple[float, float]] = []

    class Clock(gw.Callback):
        def on_iteration_end(self, trainer: Any, rollout: Any, metrics: dict[str, float]) -> None:
            seconds.append((metrics["time/collect_seconds"], metrics["time/update_seconds"]))

    with tempfile.TemporaryDirectory() as folder:
        run = gw.train(
            "Pendulum-v1",
            METHODS[method] | SHARED,
            num_envs=ROWS,
            policy={"hidden_sizes": [width, width], "normalize_obs": False, "normalize_reward": False},
            total_steps=ROWS * LENGTH * (WARM_UP + iterations),
            seed=0,
            run_dir=f"{folder}/run",
            callbacks=[Clock()],
            logging={"progress": "none"},
            evaluation={"interval": None},
        )
        assert run.summary["env_steps"] == ROWS * LENGTH * (WARM_UP + iterations)
    collect, update = (1000 * statistics.median(part) for part in zip(*seconds[WARM_UP:], strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return {"collect_ms": round(collect, 1), "update_ms": round(update, 1), "memory_mib": round(peak / 1024)}


def measured(method: str, width: int, iterations: int) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--worker", method, "--width", str(width), "--iterations", str(iterations)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout
    return {"method": method, "width": width, **json.loads(out.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", choices=METHODS)
    parser.add_argument("--width", type=int, choices=ITERATIONS)
    parser.add_argument("--iterations", type=int, help="of a worker")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="one iteration of the least network, without a critic")
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(trained(args.worker, args.width, args.iterations)))
        return
    rounds, methods, iterations = (1, ["knn"], {64: 1}) if args.smallest else (args.rounds, [*METHODS], ITERATIONS)
    runs = []
    for _ in range(rounds):
        for width, timed in iterations.items():
            for method in methods:
                runs.append(measured(method, width, timed))
                print(runs[-1], flush=True)
    keys = ("collect_ms", "update_ms", "memory_mib")
    medians = {
        f"{method}, {width}": {
            key: statistics.median(run[key] for run in runs if (run["method"], run["width"]) == (method, width))
            for key in keys
        }
        for width in iterations
        for method in methods
    }
    machine = {"cpus": os.cpu_count(), "processor": platform.machine()}
    args.out.write_text(json.dumps({"machine": machine, "runs": runs, "median": medians}, indent=1) + "\n")
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
