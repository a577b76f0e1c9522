"""Learning through Stable-Baselines3's interface at the presets of ``gw.train``: the greedy policy over 100 fresh episodes.

Seeds start at 510; tuning used seeds below 100, and 100 to 104 and 500 were spent on earlier defaults. Results go to
``benchmarks/results/sb3_learn.json``, run by run; a run that is there already is not repeated unless ``--fresh``.

    python benchmarks/sb3_learn.py                   # every row; exit status 1 if a claim fails
    python benchmarks/sb3_learn.py --only CartPole   # the rows whose name contains it
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.utils import LinearSchedule

from groupwise.config import resolve
from groupwise.config.algorithm import GRPOCfg
from groupwise.contrib.sb3 import GRPO

RESULT = Path(__file__).parent / "results" / "sb3_learn.json"
EPISODES = 100
FIRST_SEED = 510
NUM_ENVS = 8


class Row(NamedTuple):
    """A claim: every seed reaches the score. Without a score it is a record."""

    env: str
    seeds: int
    steps: int
    score: float | None = None


ROWS = (
    Row("CartPole-v1", 5, 100_000, 475),
    Row("Pendulum-v1", 3, 100_000, -200),
    Row("LunarLander-v3", 3, 1_000_000, 200),
)


def preset(env_id: str) -> dict[str, Any]:
    """The settings of ``gw.train`` as arguments of ``GRPO``."""
    tuned = resolve(env_id, "grpo")
    cfg = tuned.algorithm
    assert isinstance(cfg, GRPOCfg)
    rate = cfg.learning_rate
    return {
        "n_steps": math.ceil(cfg.num_steps * tuned.env.num_envs / NUM_ENVS),
        "batch_size": cfg.minibatch_size,
        "n_epochs": cfg.num_epochs,
        "learning_rate": LinearSchedule(rate, 0.0, 1.0) if cfg.schedule.name == "linear" else rate,
        **{name: getattr(cfg, name) for name in ("gamma", "group_size", "credit", "objective", "ent_coef")},
    }


def run(row: Row, seed: int) -> dict[str, Any]:
    began = time.perf_counter()
    env = make_vec_env(row.env, n_envs=NUM_ENVS, seed=seed)
    model = GRPO("MlpPolicy", env, seed=seed, device="cpu", **preset(row.env)).learn(row.steps)
    seconds = time.perf_counter() - began
    fresh = make_vec_env(row.env, n_envs=10, seed=10_000 + seed)
    mean, deviation = evaluate_policy(model, fresh, n_eval_episodes=EPISODES, deterministic=True)
    return {
        "env": row.env,
        "seed": seed,
        "steps": model.num_timesteps,
        "return_mean": float(mean),
        "return_std": float(deviation),
        "train_seconds": round(seconds, 1),
    }


def holds(row: Row, runs: list[dict[str, Any]]) -> bool:
    returns = [entry["return_mean"] for entry in runs if entry["env"] == row.env]
    print(f"{row.env}: {', '.join(f'{value:.1f}' for value in returns)}; needed: {row.score}")
    return row.score is None or (len(returns) == row.seeds and min(returns) >= row.score)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="rows whose environment contains this")
    parser.add_argument("--fresh", action="store_true", help="repeat runs that are recorded")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="one seed, one step of a run and no claim")
    args = parser.parse_args()
    smallest = {"seeds": 1, "steps": 1, "score": None} if args.smallest else {}
    torch.set_num_threads(1)
    rows = [row._replace(**smallest) for row in ROWS if args.only in row.env]
    runs = [] if args.fresh or not args.out.exists() else json.loads(args.out.read_text())["runs"]
    for row in rows:
        for seed in range(FIRST_SEED, FIRST_SEED + row.seeds):
            if any((entry["env"], entry["seed"]) == (row.env, seed) for entry in runs):
                continue
            runs.append(run(row, seed))
            print(runs[-1], flush=True)
            head = {"episodes": EPISODES, "preset": "auto"}
            args.out.write_text(json.dumps(head | {"runs": runs}, indent=2) + "\n")
    failed = [row.env for row in rows if not holds(row, runs)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
