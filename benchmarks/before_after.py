"""Speed of this checkout beside an earlier one and beside Stable-Baselines3, in turns, each run a process of its own.

    python benchmarks/before_after.py --before PATH            # PATH: a checkout of the earlier commit
    python benchmarks/before_after.py --before PATH --rounds 1 --scale 0.05 --only zoo_plain pass

One row of the table is a task. The earlier library is imported from ``PATH/src``, with this environment's packages.
Settings may have other names there, so each worker asks the library for them. Runs use one thread, those on torch
environments all cores.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "before_after.json"
TASKS = {
    # name: (sides, unit, env steps at scale 1)
    "zoo_plain": (("before", "after", "sb3"), "env steps/s", 40_000),
    "zoo_compiled": (("before", "after", "sb3"), "env steps/s", 40_000),
    "halfcheetah": (("before", "after", "sb3"), "env steps/s", 100_000),
    "torch_ppo": (("before", "after"), "env steps/s", 8_000_000),
    "torch_grpo": (("before", "after"), "env steps/s", 8_000_000),
    "pass": (("before", "after"), "s to greedy 475", 100_000),
    "text": (("before", "after"), "s per step", 20),
}
"""Zoo: SB3's settings of CartPole-v1. HalfCheetah: SB3's defaults with 8 environments, compiled. Torch: TorchCartPole,
1,024 rows. Pass: process start to a greedy policy of 475 with GRPO's preset. Text: a tiny random model."""


def worker(task: str, side: str, steps: int) -> float:
    """The figure of one run."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if side == "sb3":
        return sb3(task, steps)
    if task.startswith("zoo"):
        settings = {"num_steps": 32, "num_epochs": 20, "minibatch_size": 256, "learning_rate": 1e-3}
        settings |= {"gamma": 0.98, "gae_lambda": 0.8}
        return rate("CartPole-v1", "ppo", settings, 8, steps, compiled=task == "zoo_compiled", env=own_cartpole_off())
    if task == "halfcheetah":
        settings = {"num_steps": 256, "num_epochs": 10, "minibatch_size": 64, "learning_rate": 3e-4, "ent_coef": 0.0}
        return rate("HalfCheetah-v5", "ppo", settings, 8, steps, compiled=True)
    if task.startswith("torch"):
        from groupwise.envs.torch_env import TorchCartPole

        settings = {"num_steps": 64, "num_epochs": 1, "minibatch_size": 8192, "learning_rate": 4e-3}
        algorithm = task.removeprefix("torch_")
        if algorithm == "grpo":
            credit = {"group_key": "group_step", "returns": "return_to_go", "scale": "batch_std"}
            settings |= {"group_size": 8, "credit": credit, "collection": truncate()}
        return rate(TorchCartPole, algorithm, settings, 1024, steps, compiled=True)
    return text(steps) if task == "text" else until_pass(steps)


def is_before() -> bool:
    """Whether the library is the one with the earlier names."""
    import groupwise as gw

    return "speed" not in gw.RunCfg.model_fields and "compile" not in gw.RunCfg.model_fields


def own_cartpole_off() -> dict[str, Any]:
    """Gymnasium's own CartPole in the earlier library, too, which stepped one of its own."""
    return {"vectorization": "sync"} if is_before() else {}


def truncate() -> dict[str, str]:
    """Of GRPO on torch environments: windows of one shape."""
    return {"unfinished": "branch"} if is_before() else {"partial_groups": "truncate"}


def how(compiled: bool, in_torch: bool) -> dict[str, Any]:
    """The settings that compile, or do not."""
    if not is_before():
        from groupwise.speed import control as compiling
        from groupwise.speed import control as rollouts

        compiling.WORTH_STEPS = rollouts.WORTH_STEPS = 0 if compiled else 10**18  # compile at once, or never
        return {}
    settings: dict[str, Any] = {"policy": {"mlp_kernel": "compiled" if compiled else "torch"}}
    return settings | ({"compile_rollouts": "always"} if compiled and in_torch else {})


def rate(
    task: Any, algorithm: str, settings: dict[str, Any], rows: int, steps: int, *, compiled: bool, env: Any = None
) -> float:
    """Env steps per second of whole training behind two iterations, in which a run compiles."""
    import groupwise as gw

    seen: list[tuple[float, int]] = []

    class Clock(gw.Callback):
        def on_iteration_end(self, trainer: Any, rollout: Any, metrics: Any) -> None:
            seen.append((time.perf_counter(), trainer.env_steps))

    cfg = {"ppo": gw.PPOCfg, "grpo": gw.GRPOCfg}[algorithm](**settings)
    subject = gw.EnvCfg(id=task, num_envs=rows, **env) if env else task
    at_least = 4 * rows * settings["num_steps"]
    with tempfile.TemporaryDirectory() as folder:
        gw.train(
            subject,
            cfg,
            **({} if env else {"num_envs": rows}),
            **how(compiled, not isinstance(task, str)),
            seed=0,
            total_steps=max(steps, at_least),
            run_dir=f"{folder}/run",
            callbacks=[Clock()],
            checkpoint_interval=10 * max(steps, at_least),
            logging={"progress": "none"},
            evaluation={"interval": 10 * max(steps, at_least), "episodes": 1},
        )
    (start, first), (end, last) = seen[1], seen[-1]
    return (last - first) / (end - start)


def sb3(task: str, steps: int) -> float:
    """The same of Stable-Baselines3's PPO."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    seen: list[tuple[float, int]] = []

    class Clock(BaseCallback):
        def _on_rollout_start(self) -> None:
            seen.append((time.perf_counter(), self.num_timesteps))

        def _on_step(self) -> bool:
            return True

    zoo: dict[str, Any] = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8, "gamma": 0.98}
    settings = zoo | {"learning_rate": 1e-3} if task.startswith("zoo") else {"n_steps": 256}
    name = "CartPole-v1" if task.startswith("zoo") else "HalfCheetah-v5"
    model = PPO("MlpPolicy", make_vec_env(name, n_envs=8, seed=0), device="cpu", seed=0, **settings)
    model.learn(max(steps, 32 * settings["n_steps"]), callback=Clock())
    (start, first), (end, last) = seen[1], seen[-1]
    return (last - first) / (end - start)


def until_pass(steps: int) -> float:
    """Seconds from process start to a greedy 475 over 100 episodes, without the evaluations every 2,000 steps."""
    import groupwise as gw
    from groupwise.training.evaluation import evaluate_policy

    judge = gw.make_env(gw.EnvCfg(id="CartPole-v1", num_envs=100), grouped=True, verify=False)
    looked, found = [0.0], [float("inf")]

    class Watch(gw.Callback):
        next = 0

        def on_iteration_end(self, trainer: Any, rollout: Any, metrics: Any) -> None:
            if trainer.env_steps < self.next:
                return
            self.next = trainer.env_steps + 2_000
            start = time.time()
            policy = trainer.algorithm.policy
            score = evaluate_policy(policy, judge, episodes=100, seed=10_000, deterministic=True, max_steps=500)
            looked[0] += time.time() - start
            if score.return_mean >= 475:
                found[0] = time.time() - float(os.environ["STARTED"]) - looked[0]
                trainer.stop("passed")

    with tempfile.TemporaryDirectory() as folder:
        gw.train(
            "CartPole-v1",
            "grpo",
            seed=int(os.environ["SEED"]),
            total_steps=steps,
            run_dir=f"{folder}/run",
            callbacks=[Watch()],
            logging={"progress": "none"},
            evaluation={"interval": 10 * steps, "episodes": 1},
        )
    return found[0]


def text(steps: int) -> float:
    """Median seconds of a training step on a tiny random model, behind the first two."""
    sys.path.insert(0, str(HERE.parent / "tools"))
    from tiny_text import policy, task

    import groupwise as gw

    times: list[float] = []

    class Clock(gw.Callback):
        def on_iteration_end(self, trainer: Any, rollout: Any, metrics: Any) -> None:
            times.append(time.perf_counter())
            if len(times) == max(4, steps):
                trainer.stop("timed")

    with tempfile.TemporaryDirectory() as folder:
        gw.train(
            task(gw),
            gw.GRPOCfg(group_size=8),
            policy=policy(gw),
            num_prompts=4,
            seed=1,
            total_steps=10**9,
            run_dir=f"{folder}/run",
            callbacks=[Clock()],
            logging={"progress": "none"},
            evaluation={"interval": 10**9},
        )
    return statistics.median(b - a for a, b in pairwise(times[1:]))


def measured(task: str, side: str, before: Path, steps: int, seed: int) -> float | None:
    """The figure of one run in a process of its own; None if it failed."""
    source = before / "src" if side == "before" else HERE.parent / "src"
    threads = os.cpu_count() if task.startswith("torch") else 1
    more = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": str(threads), "STARTED": str(time.time()), "SEED": str(seed)}
    command = [sys.executable, __file__, "--worker", task, side, str(steps)]
    done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return float(done.stdout.splitlines()[-1])


def table(rounds: list[dict[str, dict[str, float | None]]]) -> str:
    """Medians of each side, and medians of the ratios within rounds."""
    lines = ["| task | unit | before | after | SB3 | after to before | after to SB3 |", "|---|---|---|---|---|---|---|"]
    for task, (sides, unit, _) in TASKS.items():
        runs = [found[task] for found in rounds if task in found]
        if not runs:
            continue
        middle = {side: _median([run.get(side) for run in runs]) for side in ("before", "after", "sb3")}
        ratios = {
            side: _median([run["after"] / run[side] for run in runs if run.get("after") and run.get(side)])
            for side in sides
        }
        cells = [*(middle[side] for side in ("before", "after", "sb3")), ratios.get("before"), ratios.get("sb3")]
        lines.append(f"| {task} | {unit} | " + " | ".join("" if c is None else f"{c:,.3g}" for c in cells) + " |")
    return "\n".join(lines)


def _median(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="a checkout of the earlier commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of each task's steps")
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--worker", nargs=3, metavar=("TASK", "SIDE", "STEPS"))
    args = parser.parse_args()
    if args.worker:
        task, side, steps = args.worker
        print(worker(task, side, int(steps)))
        return
    if args.before is None:
        parser.error("--before is missing")
    rounds: list[dict[str, dict[str, float | None]]] = []
    for number in range(args.rounds):
        rounds.append({})
        for task in args.only:
            sides, _, steps = TASKS[task]
            steps = steps if task == "pass" else max(1, int(steps * args.scale))
            found = {side: measured(task, side, args.before, steps, 1000 + number) for side in sides}
            rounds[-1][task] = found
            print(number, task, found, flush=True)
    runs = json.loads(args.out.read_text()) if args.out.exists() else []
    args.out.write_text(json.dumps([*runs, {"scale": args.scale, "rounds": rounds}], indent=2) + "\n")
    print(table(rounds))


if __name__ == "__main__":
    main()
