"""Env steps per second of whole training: groupwise's PPO against Stable-Baselines3's, same settings, same run.

CartPole-v1 at the settings of SB3's zoo (8 environments x 32 steps, 20 epochs of minibatches of 256, 64-64 tanh). Each
run is a process of its own; the two libraries take turns, so that the machine's drift hits both; the ratio is the
median of the pairs' ratios. Timed is training alone, without imports and set-up. Both run on one thread, at which SB3
is faster here than at its default.

    make bench                      # or: python benchmarks/speed_sb3.py --pairs 7 --steps 60000
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

RESULT = Path(__file__).parent / "results" / "speed_sb3.json"


def train_ours(steps: int) -> float:
    import torch

    import groupwise as gw

    torch.set_num_threads(1)
    cfg = gw.PPOCfg(
        num_steps=32, num_epochs=20, minibatch_size=256, learning_rate=1e-3, gamma=0.98, gae_lambda=0.8, clip_coef=0.2
    )
    env = gw.make_env(gw.EnvCfg(id="CartPole-v1", num_envs=8), grouped=False)
    policy = gw.ActorCritic(env.observation_space, env.action_space, gamma=cfg.gamma)
    buffer = gw.RolloutBuffer(8, cfg.num_steps, obs_spec=env.obs_spec, action_spec=policy.action_spec, value=True)
    collector = gw.VectorCollector(env, policy, seed=0)
    trainer = gw.Trainer(gw.PPO(cfg, policy), collector, buffer, num_steps=cfg.num_steps, total_steps=steps, seed=0)
    start = time.perf_counter()
    trainer.train()
    return trainer.env_steps / (time.perf_counter() - start)


def train_sb3(steps: int) -> float:
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

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
    start = time.perf_counter()
    model.learn(steps)
    return model.num_timesteps / (time.perf_counter() - start)


def measure(library: str, steps: int) -> float:
    with tempfile.NamedTemporaryFile("r") as out:
        command = [sys.executable, __file__, "--worker", library, "--steps", str(steps), "--out", out.name]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return float(out.read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--worker", choices=["ours", "sb3"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.worker:
        rate = {"ours": train_ours, "sb3": train_sb3}[args.worker](args.steps)
        args.out.write_text(str(rate))
        return
    pairs = [{name: measure(name, args.steps) for name in ("ours", "sb3")} for _ in range(args.pairs)]
    ratios = [pair["ours"] / pair["sb3"] for pair in pairs]
    result = {
        "what": "env steps per second of whole training, PPO, CartPole-v1, SB3 zoo settings, one thread",
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "python": platform.python_version()},
        "steps": args.steps,
        "pairs": pairs,
        "median": {name: statistics.median(pair[name] for pair in pairs) for name in ("ours", "sb3")},
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(f"groupwise {result['median']['ours']:,.0f} steps/s   SB3 {result['median']['sb3']:,.0f} steps/s")
    print(f"ratio {result['ratio']['median']:.2f} (pairs {min(ratios):.2f} to {max(ratios):.2f})   -> {RESULT}")


if __name__ == "__main__":
    main()
