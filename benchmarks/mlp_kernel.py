"""The ways to compute a small policy in turns: layer by layer, by hand, compiled. Microseconds of a pass, and steps/s of training.

A 64-64 actor and critic of CartPole on one thread. Passes: acting, and the gradient of PPO's minibatch with loss and metrics; medians of
``TURNS`` turns for each number of rows. Training: PPO on ``CartPole-v1``, 256 environments x 32 steps, 2 epochs of
minibatches of 2,048, too few to compile; every run is a process of its own.

    python benchmarks/mlp_kernel.py                # or: --pairs 3
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

RESULT = Path(__file__).parent / "results" / "mlp_kernel.json"
Kernel = Literal["torch", "by_hand", "compiled"]
KERNELS: tuple[Kernel, ...] = ("torch", "by_hand", "compiled")
UNCOMPILED = KERNELS[:2]
ROWS = (8, 64, 256, 1024, 4096)
TURNS, STEPS = 15, 500_000


def passes() -> list[dict[str, Any]]:
    """Of each number of rows, what acting takes, and scoring with gradient."""
    import numpy as np
    import torch
    from gymnasium.spaces import Box, Discrete

    import groupwise as gw
    from groupwise.algorithms.loss import Counts
    from groupwise.algorithms.step_metrics import StepMetrics

    torch.set_num_threads(1)
    spaces = Box(-1, 1, (4,), np.float32), Discrete(2)
    policies = {kernel: gw.ActorCritic(*spaces, gw.PolicyCfg(mlp_kernel=kernel)) for kernel in KERNELS}
    algorithms = {kernel: gw.PPO(gw.PPOCfg(), policy) for kernel, policy in policies.items()}

    def gradient(kernel: Kernel, batch: dict[str, Any]) -> None:
        algorithm = algorithms[kernel]
        algorithm.counts = Counts(1, 0)
        said = StepMetrics(algorithm.metric_names, algorithm.cfg.objective, torch.device("cpu"), algorithm.engine.sum)
        if kernel == "compiled":
            assert algorithm.compiler.leave_gradient([batch], said)
        else:
            algorithm._gradient([dict(batch)], scorers[kernel], said, None)

    scorers = {kernel: policies[kernel].evaluating(algorithms[kernel].trained.tensors[0]) for kernel in KERNELS}
    found = []
    for rows in ROWS:
        obs, noise = torch.randn(rows, 4), torch.randn(4, rows)
        batch = {
            "obs": obs,
            "action": torch.randint(2, (rows,)),
            "old_log_prob": noise[0] / 10 - 0.7,
            "advantage": noise[1],
            "target": noise[2],
            "old_value": noise[3],
            "weight": torch.full((rows,), 1 / rows),
            "share": torch.full((rows,), 1 / rows),
            "loss_mask": torch.ones(rows, dtype=torch.bool),
            "episode_id": torch.zeros(rows, dtype=torch.int64),
        }
        acting = {kernel: partial(policies[kernel].acting(), obs) for kernel in UNCOMPILED}
        for name, ways in (
            ("act", acting),
            ("gradient", {kernel: partial(gradient, kernel, batch) for kernel in KERNELS}),
        ):
            micros = in_turn(ways, max(10, 50_000 // rows))
            found.append({"rows": rows, "pass": name, "microseconds": micros})
    return found


def in_turn(ways: dict[str, Callable[[], None]], count: int) -> dict[str, float]:
    """Median microseconds of a call of each, over turns of so many calls."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, way in ways.items():
            start = time.perf_counter()
            for _ in range(count):
                way()
            taken[name].append((time.perf_counter() - start) / count * 1e6)
    return {name: round(statistics.median(times), 1) for name, times in taken.items()}


def train(kernel: Kernel) -> float:
    """Environment steps per second of training, imports and set-up left out."""
    import torch

    import groupwise as gw

    torch.set_num_threads(1)
    cfg = gw.PPOCfg(num_steps=32, num_epochs=2, minibatch_size=2048, learning_rate=1e-3)
    env = gw.make_env(gw.EnvCfg(id="CartPole-v1", num_envs=256), grouped=False)
    policy = gw.ActorCritic(env.observation_space, env.action_space, gw.PolicyCfg(mlp_kernel=kernel), gamma=cfg.gamma)
    buffer = gw.RolloutBuffer(256, 32, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=True)
    collector = gw.VectorCollector(env, policy, seed=0)
    trainer = gw.Trainer(gw.PPO(cfg, policy), collector, buffer, num_steps=32, total_steps=STEPS, seed=0)
    start = time.perf_counter()
    trainer.train()
    return trainer.env_steps / (time.perf_counter() - start)


def measured(kernel: str) -> float:
    command = [sys.executable, __file__, "--worker", kernel]
    out = subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    return float(out.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--worker", choices=UNCOMPILED)
    args = parser.parse_args()
    if args.worker:
        print(train(args.worker))
        return
    network = passes()
    for row in network:
        micros = ", ".join(f"{kernel} {micros:7.0f} us" for kernel, micros in row["microseconds"].items())
        print(f"{row['rows']:5} rows, {row['pass']:8}: {micros}")
    pairs = [{kernel: measured(kernel) for kernel in UNCOMPILED} for _ in range(args.pairs)]
    ratios = [pair["by_hand"] / pair["torch"] for pair in pairs]
    result: dict[str, Any] = {
        "what": "64-64 tanh actor and critic, one thread, in turns: the values of policy.mlp_kernel",
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "passes": network,
        "training_steps_per_second": pairs,
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    rates = {kernel: statistics.median(pair[kernel] for pair in pairs) for kernel in UNCOMPILED}
    print(f"training: by hand {rates['by_hand']:,.0f} steps/s, layer by layer {rates['torch']:,.0f} steps/s")
    print(f"ratio {result['ratio']['median']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})   -> {RESULT}")


if __name__ == "__main__":
    main()
