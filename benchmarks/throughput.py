"""Env steps per second of whole training on CartPole-v1 at settings chosen for throughput that still solve it.

Each run trains 500,000 steps on one thread in a process of its own. In turn: PPO and GRPO here, GRPO on the same task
in torch with compiled updates, and Stable-Baselines3's PPO at the settings of ours; then the first two again beside a
process that keeps one core busy. Imports and set-up are not timed, nor is the first iteration of ours, in which a run
compiles. Afterwards the greedy policy plays 100 fresh episodes. Tuning never saw the seeds.

    python benchmarks/throughput.py            # or: --seeds 945 946
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
import time
from functools import partial
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "throughput.json"
STEPS = 500_000
SEEDS = (945, 946, 947, 948, 949)
PPO: dict[str, Any] = {
    "num_steps": 32,
    "num_epochs": 1,
    "minibatch_size": 1024,
    "learning_rate": 4e-3,
    "gamma": 0.99,
    "gae_lambda": 0.9,
}
GRPO: dict[str, Any] = {
    "num_steps": 64,
    "num_epochs": 1,
    "minibatch_size": 2048,
    "learning_rate": 6e-3,
    "gamma": 0.99,
    "group_size": 8,
}
IN_TORCH: dict[str, Any] = GRPO | {"minibatch_size": 3072, "learning_rate": 5e-3}
NUM_ENVS = {"ppo": 1024, "grpo": 256, "grpo-torch": 768}
CREDIT: dict[str, Any] = {
    "group_key": "group_step",
    "returns": "return_to_go",
    "baseline": "mean",
    "scale": "batch_std",
    "eps": 1e-4,
}
CREDIT_IN_TORCH: dict[str, Any] = {key: CREDIT[key] for key in ("group_key", "returns", "scale")}
TRUNCATE = {"partial_groups": "truncate"}


def train_ours(name: str, seed: int, steps: int) -> tuple[float, float]:
    """Steps per second of ``gw.train`` after the first iteration, and the greedy policy's mean return."""
    import torch

    import groupwise as gw
    from groupwise.envs.torch_env import TorchCartPole

    torch.set_num_threads(1)

    class Clock(gw.Callback):
        """Times of the first and the last iteration's end, before anything is evaluated or saved."""

        def __init__(self) -> None:
            self.seen: list[tuple[float, int]] = []

        def on_iteration_end(self, trainer: Any, rollout: Any, metrics: Any) -> None:
            self.seen.append((time.perf_counter(), trainer.env_steps))

    from groupwise.speed import control as compiling
    from groupwise.speed import control as rollouts

    clock = Clock()
    linear = {"name": "linear"}
    in_torch = name == "grpo-torch"
    compiling.WORTH_STEPS = rollouts.WORTH_STEPS = 0 if in_torch else 10**18  # compile at once, or never
    if name == "ppo":
        cfg: Any = gw.PPOCfg(**PPO, schedule=linear)
    elif in_torch:
        cfg = gw.GRPOCfg(**IN_TORCH, credit=CREDIT_IN_TORCH, schedule=linear, collection=TRUNCATE)
    else:
        cfg = gw.GRPOCfg(**GRPO, credit=CREDIT, schedule=linear)
    with tempfile.TemporaryDirectory() as folder:
        run = gw.train(
            TorchCartPole if in_torch else "CartPole-v1",
            cfg,
            num_envs=NUM_ENVS[name],
            seed=seed,
            total_steps=steps,
            run_dir=f"{folder}/run",
            callbacks=[clock],
            logging={"progress": "none"},
            evaluation={"interval": steps, "episodes": 1},
        )
    (start, before), (end, after) = clock.seen[0], clock.seen[-1]
    return (after - before) / (end - start), played(run.policy, seed)


def played(policy: Any, seed: int) -> float:
    """The greedy policy's mean return over 100 fresh episodes of Gymnasium's task."""
    import groupwise as gw
    from groupwise.training.evaluation import evaluate_policy

    judge = gw.make_env(gw.EnvCfg(id="CartPole-v1", num_envs=100), grouped=True, verify=False)
    return evaluate_policy(
        policy, judge, episodes=100, seed=10_000 + seed, deterministic=True, max_steps=500
    ).return_mean


def train_sb3(seed: int, steps: int) -> tuple[float, float]:
    """As ``train_ours``, of Stable-Baselines3 with PPO's settings above."""
    import torch
    from stable_baselines3 import PPO as SB3PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    torch.set_num_threads(1)
    model = SB3PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=NUM_ENVS["ppo"], seed=seed),
        n_steps=PPO["num_steps"],
        batch_size=PPO["minibatch_size"],
        n_epochs=PPO["num_epochs"],
        gamma=PPO["gamma"],
        gae_lambda=PPO["gae_lambda"],
        learning_rate=lambda left: left * PPO["learning_rate"],
        device="cpu",
        seed=seed,
    )
    start = time.perf_counter()
    model.learn(steps)
    rate = model.num_timesteps / (time.perf_counter() - start)
    judge = make_vec_env("CartPole-v1", n_envs=100, seed=10_000 + seed)
    return rate, float(evaluate_policy(model, judge, n_eval_episodes=100)[0])


def worker(name: str, seed: int, steps: int) -> None:
    """Print one run as JSON."""
    train = train_sb3 if name == "sb3" else partial(train_ours, name)
    rate, score = train(seed, steps)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"steps_per_second": round(rate), "return": score, "memory_mib": round(memory)}))


def measured(name: str, seed: int, steps: int, *, load: bool = False) -> dict[str, Any]:
    """One run in a process of its own, beside a busy one if asked."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if load else None
    try:
        command = [sys.executable, __file__, "--worker", name, "--seeds", str(seed), "--steps", str(steps)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        out = subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found | {"run": name, "seed": seed, "load": load}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--worker", choices=["ppo", "grpo", "grpo-torch", "sb3"])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="two iterations of the first run alone")
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.seeds[0], args.steps)
        return
    turns = [("ppo", False), ("sb3", False), ("grpo", False), ("grpo-torch", False), ("ppo", True), ("grpo", True)]
    if args.smallest:
        turns, args.seeds, args.steps = turns[:1], args.seeds[:1], 2 * PPO["num_steps"] * NUM_ENVS["ppo"]
    runs = []
    for seed in args.seeds:
        for name, load in turns:
            runs.append(measured(name, seed, args.steps, load=load))
            print(runs[-1], flush=True)
    result = {
        "what": f"CartPole-v1, {args.steps:,} steps of training on one thread, 64-64 tanh, in turn",
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "settings": {
            "num_envs": NUM_ENVS,
            "ppo": PPO,
            "grpo": GRPO | {"credit": CREDIT},
            "grpo-torch": IN_TORCH | {"credit": CREDIT_IN_TORCH, "collection": TRUNCATE, "compiled": True},
            "schedule": "linear",
        },
        "runs": runs,
        "median": {
            f"{name}{' under load' if load else ''}": statistics.median(
                run["steps_per_second"] for run in runs if (run["run"], run["load"]) == (name, load)
            )
            for name, load in turns
        },
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["median"], indent=2))


if __name__ == "__main__":
    main()
