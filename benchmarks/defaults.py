"""Defaults for environments without a preset, chosen on one half of a suite and judged on the other, at equal steps.

A cell is one run: a method in an environment from a seed. Its score is the mean return of the greedy policy over fresh
episodes. Cells go to ``benchmarks/results/defaults.json``, one by one; one that is there already is not repeated.

    python benchmarks/defaults.py tuning --seeds 3             # every method on the half that chooses
    python benchmarks/defaults.py held_out --methods sb3 ppo   # named methods on the other half
    python benchmarks/defaults.py cartpole                     # the preset of GRPO on CartPole, 100 seeds
    python benchmarks/defaults.py held_out --report            # the tables, nothing is run
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import cells as cells_of
import gymnasium
import numpy as np
import torch

import groupwise as gw
from groupwise.comparison.results import RunRecord, compare_records, shown

RESULT = Path(__file__).parent / "results" / "defaults.json"
EPISODES = 50
Tree = dict[str, Any]


class Task(NamedTuple):
    """An environment of the suite, and the returns that count as 0 and 1."""

    random: float
    """Mean return of random actions."""
    good: float
    """A good return after the steps of this study; set before the first run."""
    steps: int = 50_000


SUITE = {
    "tuning": {
        "Walker2d-v5": Task(2, 1000),
        "Swimmer-v5": Task(0, 100),
        "InvertedDoublePendulum-v5": Task(60, 9000),
        "LunarLanderContinuous-v3": Task(-200, 200),
        "FrozenLake-v1": Task(0.015, 0.74),
        "MiniGrid-Empty-8x8-v0": Task(0.0, 0.95),
    },
    "held_out": {
        "Ant-v5": Task(-60, 1000),
        "Reacher-v5": Task(-43, -5),
        "InvertedPendulum-v5": Task(6, 1000),
        "BipedalWalker-v3": Task(-100, 100),
        "MiniGrid-DoorKey-5x5-v0": Task(0.0, 0.95),
        "MiniGrid-LavaGapS5-v0": Task(0.0, 0.95),
    },
    "cartpole": {"CartPole-v1": Task(22, 500, 100_000)},
}
"""Given as functions, which have no preset, except CartPole, whose own preset is judged. Split before the first run."""
FIRST_SEED = {"tuning": 2000, "held_out": 2100, "cartpole": 3000}


def changed(base: Tree, **settings: Any) -> Tree:
    """``base`` with other values, by setting."""
    return base | settings


PPO: Tree = {
    "name": "ppo", "num_envs": 8, "num_steps": 256, "num_epochs": 10, "minibatch_size": 64, "learning_rate": 3e-4,
    "gamma": 0.99, "gae_lambda": 0.95, "policy": {"normalize_obs": True, "normalize_reward": True},
}  # fmt: skip
GROUP_STEP: Tree = {
    "group_key": "group_step", "returns": "return_to_go", "baseline": "mean", "scale": "population_std"
}  # fmt: skip
GRPO: Tree = {
    "name": "grpo", "num_envs": 8, "num_steps": 256, "num_epochs": 10, "minibatch_size": 256, "learning_rate": 3e-4,
    "gamma": 0.99, "group_size": 8, "credit": GROUP_STEP, "policy": {"normalize_obs": True, "normalize_reward": False},
}  # fmt: skip
CLEANRL_DISCRETE: Tree = {
    "name": "ppo", "num_envs": 4, "num_steps": 128, "num_epochs": 4, "minibatch_size": 128, "learning_rate": 2.5e-4,
    "gamma": 0.99, "gae_lambda": 0.95, "ent_coef": 0.01, "clip_range_vf": 0.2, "schedule": "linear",
    "policy": {"normalize_obs": False, "normalize_reward": False},
}  # fmt: skip
"""Source: https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/ppo.py, its ``Args``."""
CLEANRL_CONTINUOUS: Tree = changed(
    CLEANRL_DISCRETE, num_envs=1, num_steps=2048, num_epochs=10, minibatch_size=64, learning_rate=3e-4, ent_coef=0.0,
    policy={"normalize_obs": True, "normalize_reward": True},
)  # fmt: skip
"""Source: https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/ppo_continuous_action.py, its ``Args``."""
CARTPOLE: Tree = {
    "name": "grpo", "num_envs": 8, "num_steps": 32, "num_epochs": 10, "minibatch_size": 128, "learning_rate": 2e-3,
    "gamma": 0.995, "group_size": 4, "credit": changed(GROUP_STEP, scale="batch_std"), "policy": {},
}  # fmt: skip

KNN: Tree = {
    "group_key": "group", "returns": "return_to_go", "baseline": {"name": "knn", "gae_lambda": 0.95}, "scale": "none",
    "normalize": "batch",
}  # fmt: skip
LSTD: Tree = changed(KNN, baseline="lstd")
CHANGES_OF_PPO: Tree = {
    "minibatch 256, rate 1e-3": {"minibatch_size": 256, "learning_rate": 1e-3},
    "minibatch 256": {"minibatch_size": 256},
    "linear": {"schedule": "linear"},
    "entropy 0.01": {"ent_coef": 0.01},
    "64 steps": {"num_steps": 64},
    "gamma 0.995": {"gamma": 0.995},
    "lambda 0.9": {"gae_lambda": 0.9},
    "raw rewards": {"policy": {"normalize_obs": True, "normalize_reward": False}},
    "5 epochs": {"num_epochs": 5},
}
CHANGES_OF_GRPO: Tree = {
    "batch_std": {"credit": changed(GROUP_STEP, scale="batch_std")},
    "no scale": {"credit": changed(GROUP_STEP, scale="none")},
    "finished zero": {"credit": changed(GROUP_STEP, group_key={"name": "group_step", "finished_members": "zero"})},
    "knn": {"credit": KNN},
    "outcome": {"credit": {"group_key": "group", "returns": "outcome", "baseline": "mean", "scale": "population_std"}},
    "groups of 4": {"group_size": 4},
    "minibatch 64": {"minibatch_size": 64},
    "rate 1e-3": {"learning_rate": 1e-3},
    "lstd": {"credit": LSTD},
    "lstd, minibatch 64": {"credit": LSTD, "minibatch_size": 64},
}
CARTPOLE_KNN: Tree = changed(
    CARTPOLE, gamma=0.98, credit=changed(KNN, baseline={"name": "knn", "gae_lambda": 0.9}), schedule="linear"
)
METHODS: dict[str, dict[str, Tree | None]] = {
    "suite": {"ppo": PPO, "grpo": GRPO, "cleanrl": CLEANRL_CONTINUOUS, "sb3": None}
    | {f"ppo, {name}": changed(PPO, **change) for name, change in CHANGES_OF_PPO.items()}
    | {f"grpo, {name}": changed(GRPO, **change) for name, change in CHANGES_OF_GRPO.items()},
    "cartpole": {
        "knn": CARTPOLE_KNN,
        "knn, rate 1e-3": changed(CARTPOLE_KNN, learning_rate=1e-3),
        "linear": changed(CARTPOLE, schedule="linear"),
        "linear, rate 1e-3": changed(CARTPOLE, schedule="linear", learning_rate=1e-3),
        "constant": CARTPOLE,
    },
}
"""Settings of groupwise by method: ``ppo`` and ``grpo`` are the defaults before the study, ``constant`` CartPole's
preset before it, the others one change of them.
``sb3`` is Stable-Baselines3's PPO at its defaults, in one environment. CleanRL is a script, so its settings run here."""


def make(env_id: str) -> gymnasium.Env[Any, Any]:
    """The environment as all libraries get it: MiniGrid as one vector of numbers from 0 to 1."""
    if not env_id.startswith("MiniGrid"):
        return gymnasium.make(env_id)
    from minigrid.wrappers import ImgObsWrapper

    env = gymnasium.wrappers.FlattenObservation(ImgObsWrapper(gymnasium.make(env_id)))
    box = gymnasium.spaces.Box(0.0, 1.0, env.observation_space.shape, np.float32)
    return gymnasium.wrappers.TransformObservation(env, lambda obs: obs.astype(np.float32) / 10, box)


def run_sb3(env_id: str, seed: int, steps: int) -> Tree:
    """A run of Stable-Baselines3's PPO at its defaults."""
    import stable_baselines3
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    model = stable_baselines3.PPO(
        "MlpPolicy", make_vec_env(lambda: make(env_id), seed=seed), seed=seed, device="cpu"
    ).learn(steps)
    fresh = make_vec_env(lambda: make(env_id), n_envs=10, seed=10_000 + seed)
    score, _ = evaluate_policy(model, fresh, n_eval_episodes=EPISODES, deterministic=True)
    return {"score": float(score), "env_steps": model.num_timesteps}


def run_ours(env_id: str, seed: int, steps: int, settings: Tree) -> Tree:
    """A run of groupwise; of CartPole with the steps until the greedy policy first has 475 over 20 episodes, None if never."""
    algorithm = {key: value for key, value in settings.items() if key not in ("num_envs", "policy")}
    judged = env_id in SUITE["cartpole"]
    with tempfile.TemporaryDirectory() as folder:
        trained = gw.train(
            env_id if judged else lambda: make(env_id),
            algorithm,
            policy=settings["policy"],
            num_envs=settings["num_envs"],
            seed=seed,
            total_steps=steps,
            run_dir=Path(folder) / "run",
            logging={"progress": "none"},
            evaluation={"interval": 2_000} if judged else {"interval": steps, "episodes": 1},
        )
        score = gw.evaluate(trained, EPISODES, seed=10_000 + seed).return_mean
        passed = [entry["env_steps"] for entry in trained.metrics() if entry.get("eval/return_mean", 0) >= 475]
    found = {"score": score, "env_steps": trained.summary["env_steps"], "stopped": trained.summary["stopped"]}
    return found | ({"first_475": passed[0] if passed else None} if judged else {})


def run(env_id: str, method: str, settings: Tree | None, seed: int, steps: int) -> Tree:
    """A finished cell."""
    made = make(env_id)
    if method == "cleanrl" and isinstance(made.action_space, gymnasium.spaces.Discrete):
        settings = CLEANRL_DISCRETE
    began = time.process_time()
    found = run_sb3(env_id, seed, steps) if settings is None else run_ours(env_id, seed, steps, settings)
    seconds = round(time.process_time() - began, 1)
    return {"env": env_id, "method": method, "seed": seed} | found | {"seconds": seconds}


def report(part: str, cells: list[Tree]) -> None:
    """Scores by environment, and over all of them on the common scale."""
    records = [
        RunRecord(c["env"], c["method"], c["seed"], (c["env_steps"],), (c["score"],), seconds=c["seconds"])
        for c in cells
        if c["env"] in SUITE[part]
    ]
    if not records:
        return
    found = compare_records(records, {env: (task.random, task.good) for env, task in SUITE[part].items()})
    for one in found.environments:
        print(one.environment)
        for m in one.methods:
            each = " ".join(f"{score:.4g}" for score in m.scores[:10])
            print(f"  {m.method:24} {m.mean:9.4g}  {each}  ({m.seconds:.0f} s)")
    if found.overall is not None:
        print("overall, IQM of normalised scores")
        for o in found.overall.methods:
            print(f"  {o.method:24} {shown(o.iqm)}  mean {o.mean:.3f}")
    for method in METHODS["cartpole"] if part == "cartpole" else ():
        mine = [c for c in cells if c["env"] == "CartPole-v1" and c["method"] == method]
        passed = sum(c["score"] >= 475 for c in mine)
        firsts = sorted(c["first_475"] or 10**9 for c in mine if "first_475" in c) or [0]
        print(f"{method}: {passed} of {len(mine)} at 475; first after {firsts[len(firsts) // 2]:,} steps (median)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=list(SUITE))
    parser.add_argument("--methods", nargs="+", help="of METHODS; all by default")
    parser.add_argument("--only", default="", help="environments whose id contains this")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--skip", type=int, default=0, help="seeds to leave out at the start")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="as few steps as a run can have")
    args = parser.parse_args()
    torch.set_num_threads(1)
    known = METHODS["cartpole" if args.part == "cartpole" else "suite"]
    cells = cells_of.load(args.out)
    if args.report:
        report(args.part, cells)
        return
    for seed in range(FIRST_SEED[args.part] + args.skip, FIRST_SEED[args.part] + args.seeds):
        for method in args.methods or known:
            for env_id, task in SUITE[args.part].items():
                key = (env_id, method, seed)
                if args.only not in env_id or any((c["env"], c["method"], c["seed"]) == key for c in cells):
                    continue
                cells.append(run(env_id, method, known[method], seed, 1 if args.smallest else task.steps))
                cells_of.save(args.out, cells)
                print(cells[-1], flush=True)


if __name__ == "__main__":
    main()
