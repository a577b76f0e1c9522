"""Whether PPO and GRPO learn to push a cube simulated by MuJoCo Warp: 1.5 million steps of 64 environments, three seeds.

Each final policy plays 256 fresh episodes greedily: mean return, and the share of cubes at their goals in the end.
Beside it stand random actions and an arm that does nothing. Settings were tuned on seeds below 100.

    python benchmarks/cube_push.py                       # about an hour on a busy core
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from throughput import CREDIT

import groupwise as gw

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from mujoco_warp_push import CubePush

RESULT = Path(__file__).parent / "results" / "cube_push.json"
STEPS = 1_500_000
SEEDS = (100, 101, 102)
EPISODES = 256
SETTINGS: dict[str, gw.config.AlgorithmCfg] = {
    "ppo": gw.PPOCfg(
        num_steps=32, num_epochs=8, minibatch_size=512, learning_rate=7e-4, gamma=0.95, schedule={"name": "linear"}
    ),
    "grpo": gw.GRPOCfg(
        group_size=8,
        num_steps=60,
        num_epochs=8,
        minibatch_size=960,
        learning_rate=1e-3,
        schedule={"name": "linear"},
        credit=CREDIT,
        collection={"partial_groups": "truncate"},
    ),
}

Act = Callable[[torch.Tensor], torch.Tensor]


@torch.no_grad()
def played(act: Act, seed: int, episodes: int) -> dict[str, float]:
    """What the actions come to over fresh episodes."""
    env = CubePush(episodes)
    obs, returns = env.reset(seed=seed), torch.zeros(episodes)
    for _ in range(env.max_episode_steps or 0):
        step = env.step(act(obs))
        obs, returns = step.obs, returns + step.reward
    solved = env.success(env.rows.state).float().mean()
    return {"return_mean": float(returns.mean()), "solved": float(solved)}


def learned(name: str, seed: int, folder: str, steps: int, episodes: int) -> dict[str, Any]:
    """One run, and how its policy does."""
    start = time.perf_counter()
    run = gw.train(
        CubePush,
        SETTINGS[name],
        num_envs=64,
        total_steps=steps,
        seed=seed,
        run_dir=f"{folder}/{name}_{seed}",
        logging={"progress": "none"},
    )
    seconds = round(time.perf_counter() - start, 1)
    policy = run.policy
    found = played(lambda obs: policy.env_action(policy.act(obs, deterministic=True).action), 10_000 + seed, episodes)
    return {"run": name, "seed": seed, "seconds": seconds} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="one iteration of PPO")
    args = parser.parse_args()
    names, seeds, steps, episodes = list(SETTINGS), args.seeds, STEPS, EPISODES
    if args.smallest:
        names, seeds, steps, episodes = names[:1], seeds[:1], 1, 8
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(0)
    runs = [
        {"run": "random"} | played(lambda obs: 2 * torch.rand(len(obs), 3, generator=draws) - 1, 10_000, episodes),
        {"run": "nothing"} | played(lambda obs: torch.zeros(len(obs), 3), 10_000, episodes),
    ]
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            for name in names:
                runs.append(learned(name, seed, folder, steps, episodes))
                print(runs[-1], flush=True)
    args.out.write_text(json.dumps({"steps": steps, "episodes": episodes, "runs": runs}, indent=2) + "\n")
    print(json.dumps(runs, indent=2))


if __name__ == "__main__":
    main()
