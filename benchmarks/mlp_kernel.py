"""A policy by the MLP kernel against the same layer by layer, in turns: microseconds of a pass, and steps/s of whole training.

A 64-64 actor and critic of CartPole on one thread. Passes, with what draws and scores actions: medians of ``TURNS`` turns for each number of rows. Training: PPO
on ``CartPole-v1``, 256 environments x 32 steps, 2 epochs of minibatches of 2,048; every run is a process of its own.

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
Kernel = Literal["auto", "torch"]
KERNELS: tuple[Kernel, ...] = ("auto", "torch")
ROWS = (8, 64, 256, 1024, 4096)
TURNS, STEPS = 15, 500_000


def passes() -> list[dict[str, Any]]:
    """Of each number of rows, what acting takes, and scoring with gradient."""
    import numpy as np
    import torch
    from gymnasium.spaces import Box, Discrete

    from groupwise.algorithms.optim import Trained
    from groupwise.policies.actor_critic import ActorCritic
    from groupwise.policies.configs import PolicyCfg

    torch.set_num_threads(1)
    obs_space, action_space = Box(-1, 1, (4,), np.float32), Discrete(2)
    policies = {kernel: ActorCritic(obs_space, action_space, PolicyCfg(mlp_kernel=kernel)) for kernel in KERNELS}
    trained = {kernel: Trained(policy.parameters()) for kernel, policy in policies.items()}
    acting = {kernel: policy.acting() for kernel, policy in policies.items()}
    scoring = {kernel: policies[kernel].evaluating(trained[kernel].tensors[0]) for kernel in KERNELS}

    def train(kernel: Kernel, batch: dict[str, Any]) -> None:
        trained[kernel].zero_grad()
        scores = scoring[kernel](batch)
        assert scores.value is not None
        (scores.log_prob.sum() + scores.value.sum()).backward()
        trained[kernel].gather_grad()

    found = []
    for rows in ROWS:
        obs = torch.randn(rows, 4)
        batch = {"obs": obs, "action": torch.randint(2, (rows,))}
        for name, ways in (
            ("act", {kernel: partial(acting[kernel], obs) for kernel in KERNELS}),
            ("forward and backward", {kernel: partial(train, kernel, batch) for kernel in KERNELS}),
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
    parser.add_argument("--worker", choices=KERNELS)
    args = parser.parse_args()
    if args.worker:
        print(train(args.worker))
        return
    network = passes()
    for row in network:
        auto, torch_ = (row["microseconds"][kernel] for kernel in KERNELS)
        print(
            f"{row['rows']:5} rows, {row['pass']:20}: kernel {auto:7.0f} us, layers {torch_:7.0f} us, {torch_ / auto:.2f}"
        )
    pairs = [{kernel: measured(kernel) for kernel in KERNELS} for _ in range(args.pairs)]
    ratios = [pair["auto"] / pair["torch"] for pair in pairs]
    result: dict[str, Any] = {
        "what": "64-64 tanh actor and critic, one thread: the MLP kernel ('auto') and layer by layer ('torch'), in turns",
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "passes": network,
        "training_steps_per_second": pairs,
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    rates = {kernel: statistics.median(pair[kernel] for pair in pairs) for kernel in KERNELS}
    print(f"training: kernel {rates['auto']:,.0f} steps/s, layers {rates['torch']:,.0f} steps/s")
    print(f"ratio {result['ratio']['median']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})   -> {RESULT}")


if __name__ == "__main__":
    main()
