"""Asynchronous collection beside synchronous: seconds of an iteration, and what is learned in as many updates.

python benchmarks/async_collection.py      half an hour, most of it waiting; writes results/async_collection.json

A tiny model learns in earnest. The server is that of the tests, in a process of its own: it samples from the weights that it
is given. In the first part its groups take a time for each token of their longest completion, and each update a fixed time
more, as on accelerators of their own. In the second part nothing waits.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import groupwise as gw
from groupwise.serving import free_port, is_healthy

HERE = Path(__file__).parent
SUPPORT = HERE.parent / "tests" / "support"
RESULTS = HERE / "results" / "async_collection.json"
STALENESS = (0, 1, 2)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "decoupled": {"old_log_prob": "recomputed", "importance_sampling_correction": "tis"},
    "sampled": {"old_log_prob": "sampled"},
}
SECONDS_PER_TOKEN = 0.25
UPDATES = {"short": (0.5,), "equal": (1.5,), "long": (3.0,), "uneven": (0.7, 0.7, 0.7, 3.9)}
"""Seconds that updates take more, in turn. A rollout takes 1.5."""
TIMED = 8
"""Iterations, after three that fill the queue."""


class LongUpdate(gw.Callback):
    """Stands for the update of a larger model, on another device."""

    def __init__(self, seconds: tuple[float, ...]) -> None:
        self.seconds = seconds

    def on_rollout_end(self, trainer: Any, rollout: Any) -> None:
        """Take the time."""
        time.sleep(self.seconds[trainer.iteration % len(self.seconds)])


def larger(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    """The share of six characters that are digits above the prompt's last one."""
    pairs = zip(prompts, completions, strict=True)
    return [sum(prompt[-1] < character <= "9" for character in text) / 6 for prompt, text in pairs]


@contextmanager
def server(model: Path, seconds_per_token: float) -> Iterator[str]:
    """The address of a server in a process of its own."""
    port = free_port()
    words = [sys.executable, str(SUPPORT / "vllm_double.py"), "--model", str(model), "--port", str(port)]
    process = subprocess.Popen([*words, "--seconds-per-token", str(seconds_per_token)], stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        while not is_healthy(url):
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def train(
    model: Path, url: str, staleness: int, seed: int, iterations: int, kind: str, update: tuple[float, ...] = (0.0,)
) -> list[dict[str, Any]]:
    """Metrics of every iteration."""
    from text_runs import numbers

    with tempfile.TemporaryDirectory() as folder:
        run = gw.train(
            gw.TextTask(numbers()[:200], reward=larger),
            gw.GRPOCfg(group_size=8, learning_rate=3e-3, objective=OBJECTIVES[kind]),
            model=str(model),
            num_prompts=4,
            sampling={"max_new_tokens": 6},
            total_steps=None,
            total_iterations=iterations,
            seed=seed,
            generation={"name": "server", "urls": [url], "max_staleness": staleness},
            sampler_mismatch={"warn": 100.0, "stop": None},
            logging={"progress": "none"},
            callbacks=[LongUpdate(update)],
            run_dir=Path(folder) / "run",
        )
        return run.metrics()


def overlap(
    model: Path,
    rounds: int,
    updates: dict[str, tuple[float, ...]],
    staleness: tuple[int, ...],
    iterations: int,
    seconds_per_token: float,
) -> list[dict[str, Any]]:
    """Runs that take turns."""
    found = []
    with server(model, seconds_per_token) as url:
        for seed in range(800, 800 + rounds):
            for name, update in updates.items():
                for most in staleness:
                    metrics = train(model, url, most, seed, iterations, "decoupled", update)
                    found.append({"seed": seed, "updates": name, "max_staleness": most} | timed(metrics[2:]))
                    print(found[-1], flush=True)
    return found


def timed(metrics: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of an iteration after the first, and the share in which the learner waited."""
    seconds = (metrics[-1]["time/total_seconds"] - metrics[0]["time/total_seconds"]) / (len(metrics) - 1)
    idle = fmean(m.get("time/learner_idle_fraction", 0.0) for m in metrics[1:])
    reward = metrics[-1]["rollout/return_mean"]
    return {"seconds": round(seconds, 4), "reward": round(reward, 4), "learner": round(idle, 4)}


def learning(model: Path, seeds: int, iterations: int, staleness: tuple[int, ...]) -> list[dict[str, Any]]:
    """The reward over training, and how far sampler and trainer are from each other."""
    found = []
    with server(model, 0.0) as url:
        for seed in range(900, 900 + seeds):
            for kind in OBJECTIVES:
                for most in staleness:
                    metrics = train(model, url, most, seed, iterations, kind)
                    rewards = [m["rollout/return_mean"] for m in metrics]
                    found.append(
                        {"seed": seed, "objective": kind, "max_staleness": most}
                        | {"rewards": [round(fmean(rewards[i : i + 10]), 4) for i in range(0, iterations, 10)]}
                        | {"sampler_kl": round(median(m["rollout/sampler_kl"] for m in metrics), 6)}
                        | {"sampler_kl_max": round(max(m["rollout/sampler_kl"] for m in metrics), 6)}
                    )
                    print(found[-1], flush=True)
    return found


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["learning", "overlap"])
    parser.add_argument("--rounds", type=int, default=3, help="of runs that are timed")
    parser.add_argument("--seeds", type=int, default=4, help="of runs that learn")
    parser.add_argument("--iterations", type=int, default=60, help="of runs that learn")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--smallest", action="store_true", help="one update of each objective, and four beside a server"
    )
    options = parser.parse_args()
    learned = (options.seeds, options.iterations, (*STALENESS, 8))
    overlapped = (options.rounds, UPDATES, STALENESS, TIMED + 3, SECONDS_PER_TOKEN)
    if options.smallest:
        learned, overlapped = (1, 1, (0,)), (1, {"short": (0.01,)}, (1,), 4, 0.0)
    sys.path.insert(0, str(SUPPORT))
    from text_runs import save_model

    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder) / "model")
        if options.only != "overlap":
            results["learning"] = learning(model, *learned)
        if options.only != "learning":
            results["overlap"] = overlap(model, *overlapped)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
