"""Env steps per second of whole training: groupwise's PPO against Stable-Baselines3's, same settings, same run.

Both train on Gymnasium's CartPole-v1 at the settings of SB3's zoo (8 environments x 32 steps, 20 epochs of minibatches
of 256, 64-64 tanh). Ours runs plain and compiled (from the first update on). Each run is a process of its own, and
all take turns; a ratio is the median of the rounds' ratios. Imports, set-up and the first iteration, in which a
compiled run compiles (``compiling``, in seconds), are not timed. All run on one thread, at which SB3 is faster than at
its default.

    make bench                      # or: python benchmarks/speed_sb3.py --rounds 7 --steps 60000
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "speed_sb3.json"
OURS = ("plain", "compiled")


def train_ours(steps: int, how: Any) -> tuple[float, float]:
    """Steps per second after the first iteration, and its seconds."""
    import torch

    import groupwise as gw
    from groupwise.speed import control as compiling
    from groupwise.speed import control as rollouts

    compiling.WORTH_STEPS = rollouts.WORTH_STEPS = 0 if how == "compiled" else 10**18  # compile at once, or never
    times: list[float] = []

    class Clock(gw.Callback):
        def on_iteration_end(self, trainer: Any, rollout: Any, metrics: dict[str, float]) -> None:
            times.append(time.perf_counter())

    torch.set_num_threads(1)
    cfg = gw.PPOCfg(
        num_steps=32, num_epochs=20, minibatch_size=256, learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, clip_coef=0.2
    )
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        gw.train(
            "CartPole-v1",
            cfg,
            num_envs=8,
            seed=0,
            total_steps=steps,
            run_dir=f"{folder}/run",
            callbacks=[Clock()],
            checkpoint_interval=10 * steps,
            logging={"progress": "none"},
            evaluation={"interval": 10 * steps, "episodes": 1},
        )
    return (len(times) - 1) * 256 / (times[-1] - times[0]), times[0] - start


def train_sb3(steps: int, _: Any) -> tuple[float, float]:
    """The same of Stable-Baselines3."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    times: list[float] = []

    class Clock(BaseCallback):
        def _on_rollout_start(self) -> None:
            times.append(time.perf_counter())

        def _on_step(self) -> bool:
            return True

    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=8, seed=0),
        n_steps=32,
        batch_size=256,
        n_epochs=20,
        gae_lambda=0.8,
        gamma=0.98,
        learning_rate=1e-3,
        clip_range=0.2,
        device="cpu",
        seed=0,
    )
    model.learn(steps, callback=Clock())
    return (model.num_timesteps - 256) / (time.perf_counter() - times[1]), times[1] - times[0]


def measure(name: str, steps: int) -> tuple[float, float]:
    with tempfile.NamedTemporaryFile("r") as out:
        command = [sys.executable, __file__, "--worker", name, "--steps", str(steps), "--out", out.name]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        rate, first = json.loads(out.read())
    return rate, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--worker", choices=[*OURS, "sb3"])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="one round of few steps, not compiled")
    args = parser.parse_args()
    if args.worker:
        train = train_sb3 if args.worker == "sb3" else train_ours
        args.out.write_text(json.dumps(train(args.steps, args.worker)))
        return
    ours: tuple[str, ...] = OURS
    if args.smallest:
        ours, args.rounds, args.steps = ("plain",), 1, 512
    else:
        measure("compiled", 512)  # so that the compiler's own headers are compiled, and files in the page cache
    rounds = [{name: measure(name, args.steps) for name in (*ours, "sb3")} for _ in range(args.rounds)]
    ratios = {name: [round_[name][0] / round_["sb3"][0] for round_ in rounds] for name in ours}
    result = {
        "what": "env steps per second of whole training, PPO, CartPole-v1, SB3 zoo settings, one thread",
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "steps": args.steps,
        "rounds": [{name: rate for name, (rate, _) in round_.items()} for round_ in rounds],
        "compiling": [round_["compiled"][1] for round_ in rounds if "compiled" in round_],
        "median": {name: statistics.median(round_[name][0] for round_ in rounds) for name in (*ours, "sb3")},
        "ratio": {
            name: {"median": statistics.median(found), "min": min(found), "max": max(found)}
            for name, found in ratios.items()
        },
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"SB3 {result['median']['sb3']:,.0f} steps/s")
    for name, found in ratios.items():
        rate, middle = result["median"][name], statistics.median(found)
        print(f"groupwise, {name}: {rate:,.0f} steps/s, ratio {middle:.2f} ({min(found):.2f} to {max(found):.2f})")
    print(f"-> {args.out}")


if __name__ == "__main__":
    main()
