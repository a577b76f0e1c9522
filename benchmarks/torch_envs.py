"""Env steps per second of whole training with PPO and GRPO on torch environments, CartPole with 1,024 to 65,536 rows.

Each run trains in a process of its own. On a CPU rollouts and updates are compiled, in the first iterations, which are
not timed. The mean return of training episodes stands beside the rate: of the latest in ours, of all timed ones in the
peers. A compiled loop in the way of LeanRL, and rsl_rl where it is installed, run PPO on the same environment in turn.

Numbers of environments that are not asked for keep their earlier results.

    python benchmarks/torch_envs.py                      # or: --device cuda --envs 4096 65536 --rounds 5 --threads 1
    python benchmarks/torch_envs.py --worker ppo --device cuda --envs 1024 4096 16384 --speed auto off --seconds 2

The second form prints a line for each number of environments, in one process, with CUDA kernels, launches of graphs and waits
for the device of one iteration. It keeps no results.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from throughput import CREDIT

RESULTS = Path(__file__).parent / "results"
ENVS = (1024, 4096, 65_536)
STEPS = {1024: 64, 4096: 32, 16_384: 32, 65_536: 16}
"""Of each environment in an iteration."""
WARM_UP = {"cpu": 2, "cuda": 6}
"""Iterations that are not timed."""
SECONDS = 6.0
"""Of timed training, and at least two iterations."""
GROUP = 8
PPO: dict[str, Any] = {"num_epochs": 1, "learning_rate": 4e-3, "gamma": 0.99, "gae_lambda": 0.9}
GRPO: dict[str, Any] = {"num_epochs": 1, "learning_rate": 6e-3, "gamma": 0.99, "group_size": GROUP, "credit": CREDIT}
PEERS = ("leanrl", "rsl_rl")


def minibatch_size(num_envs: int) -> int:
    """Eight optimiser steps an iteration."""
    return num_envs * STEPS[num_envs] // 8


def train(algorithm: str, num_envs: int, device: str, threads: int, speed: str = "auto") -> dict[str, Any]:
    """Rate, and what was reached; on a GPU also what one iteration launches."""
    import torch

    import groupwise as gw
    from groupwise.envs.torch_env import TorchCartPole

    torch.set_num_threads(threads)
    shared = {"num_steps": STEPS[num_envs], "minibatch_size": minibatch_size(num_envs)}
    cfg: Any = gw.PPOCfg(**PPO, **shared)
    if algorithm == "grpo":
        cfg = gw.GRPOCfg(**GRPO, **shared, collection={"partial_groups": "truncate"})
    on_gpu = device == "cuda"
    clock = Clock(WARM_UP[device], torch.cuda.synchronize if on_gpu else None, profiles=on_gpu)
    with tempfile.TemporaryDirectory() as folder:
        run = gw.train(
            TorchCartPole,
            cfg,
            num_envs=num_envs,
            device=device,
            speed=speed,
            total_steps=10**12,
            run_dir=f"{folder}/run",
            callbacks=[clock.callback(gw.Callback)],
            logging={"progress": "none"},
            evaluation={"interval": 10**12, "episodes": 1},
        )
    return clock.found | {"return": run.summary["training_return_mean"]}


LAUNCHES = {"graphs": "cudaGraphLaunch", "waits": "cudaStreamSynchronize"}


def launched(profile: Any) -> dict[str, int]:
    """Kernels, launches of graphs and waits for the device under a profiler."""
    from torch.autograd import DeviceType

    events = profile.key_averages()
    counts = {event.key: event.count for event in events if event.device_type == DeviceType.CPU}
    kernels = sum(event.count for event in events if event.device_type == DeviceType.CUDA)
    return {"kernels": kernels} | {name: counts.get(call, 0) for name, call in LAUNCHES.items()}


class Clock:
    """Times the iterations of a trainer and ends training.

    Args:
        profiles: count the kernels of an iteration before, of which there are two at least; on a GPU.
    """

    def __init__(self, warm_up: int, synchronize: Any, *, profiles: bool = False) -> None:
        self.warm_up = warm_up
        self.profiles = profiles
        self.synchronize = synchronize or (lambda: None)
        self.launches: dict[str, Any] = {}
        self.found: dict[str, Any] = {}

    def callback(self, base: type) -> Any:
        """The callback that does it."""
        import torch

        clock = self

        class Timed(base):  # type: ignore[misc]
            def on_iteration_end(self, trainer: Any, rollout: Any, metrics: dict[str, float]) -> None:
                clock.synchronize()
                if trainer.iteration == clock.warm_up - 2 and clock.profiles:
                    clock.profile = torch.profiler.profile()
                    clock.profile.start()
                if trainer.iteration == clock.warm_up - 1 and clock.profiles:
                    clock.profile.stop()
                    clock.launches = {"iteration": launched(clock.profile)}
                now = time.perf_counter()
                if trainer.iteration == clock.warm_up:
                    clock.start, clock.steps, clock.parts = now, trainer.env_steps, [0.0, 0.0]
                if trainer.iteration <= clock.warm_up:
                    return
                clock.parts[0] += metrics["time/collect_seconds"]
                clock.parts[1] += metrics["time/update_seconds"]
                if now - clock.start > SECONDS and trainer.iteration >= clock.warm_up + 2:
                    steps, seconds = trainer.env_steps - clock.steps, now - clock.start
                    shares = [round(part / seconds, 3) for part in clock.parts]
                    clock.found = {
                        "steps_per_second": round(steps / seconds),
                        "collecting": shares[0],
                        "updating": shares[1],
                        "iterations": trainer.iteration - clock.warm_up,
                    } | clock.launches
                    trainer.stop("timed")

        return Timed()


def train_peer(peer: str, num_envs: int, device: str, threads: int) -> dict[str, Any]:
    """Rate of another library's PPO at PPO's settings above, and what was reached."""
    import torch

    from groupwise.envs.torch_env import TorchCartPole

    sys.path.insert(0, str(Path(__file__).parent))
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    env = TorchCartPole(num_envs, device=device)
    settings = PPO | {"num_steps": STEPS[num_envs], "num_minibatches": 8}
    if peer == "leanrl":
        from peers import leanrl_ppo

        return leanrl_ppo.train(env, settings, warm_up=WARM_UP[device], seconds=SECONDS)
    from peers import rsl_rl_ppo

    return rsl_rl_ppo.train(rsl_rl_ppo.pushed_by_sign(env), settings, warm_up=WARM_UP[device], seconds=SECONDS)


def measured(run: str, num_envs: int, device: str, threads: int, more: list[str]) -> dict[str, Any]:
    """One run in a process of its own."""
    command = [sys.executable, __file__, "--worker", run, "--envs", str(num_envs), "--device", device]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command += ["--threads", str(threads), *more]
    out = subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return {"run": run, "num_envs": num_envs, "threads": threads} | found


def main() -> None:
    global SECONDS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default=None, help="cpu or cuda; the GPU if there is one")
    parser.add_argument("--envs", type=int, nargs="+", default=ENVS, choices=STEPS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--worker", choices=["ppo", "grpo", *PEERS])
    parser.add_argument("--speed", nargs="+", default=["auto"], choices=["auto", "off"], help="fast paths, of --worker")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--out", type=Path, help="results, in place of those in benchmarks/results")
    parser.add_argument(
        "--smallest", action="store_true", help="PPO at the least number, for two iterations, not compiled"
    )
    args = parser.parse_args()
    SECONDS = args.seconds
    device = args.device or default_device()
    if args.worker in PEERS:
        print(json.dumps(train_peer(args.worker, args.envs[0], device, args.threads)))
        return
    if args.worker:
        for num_envs in args.envs:
            for speed in args.speed:
                what = {"num_envs": num_envs, "speed": speed} if len(args.envs) * len(args.speed) > 1 else {}
                print(json.dumps(what | train(args.worker, num_envs, device, args.threads, speed)), flush=True)
        return
    turns, rounds, more = ["ppo", "grpo", "leanrl"], args.rounds, ["--seconds", str(SECONDS)]
    if args.smallest:
        turns, rounds, args.envs, more = turns[:1], 1, args.envs[:1], ["--seconds", "0", "--speed", "off"]
    elif find_spec("rsl_rl") is None:
        print("rsl_rl is not installed, so it does not run; fix: pip install rsl-rl-lib==5.5.1")
    else:
        turns.append("rsl_rl")
    path = args.out or RESULTS / f"torch_envs_{device}.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    runs = [r for r in runs if r["num_envs"] not in args.envs]
    for _ in range(rounds):
        for num_envs in args.envs:
            for run in turns:
                runs.append(measured(run, num_envs, device, args.threads, more))
                print(runs[-1], flush=True)
    result = {
        "what": f"TorchCartPole on {device}, 64-64 tanh, eight minibatches an epoch, whole training, in turn",
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine(), "device": device_name(device)},
        "settings": {"num_steps": STEPS, "ppo": PPO, "grpo": GRPO},
        "runs": runs,
        "median": medians(runs),
    }
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["median"], indent=2))


def medians(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Steps per second by number of environments and by who trained."""
    rates: dict[str, list[int]] = {}
    for run in sorted(runs, key=lambda r: r["num_envs"]):
        rates.setdefault(f"{run['run']}, {run['num_envs']}", []).append(run["steps_per_second"])
    return {name: statistics.median(found) for name, found in rates.items()}


def default_device() -> str:
    """The GPU if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name(device: str) -> str:
    """What the device calls itself."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
