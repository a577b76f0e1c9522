"""The share of training that checkpoints cost, at the default interval of a tenth of the run.

Counted is the time for which training waits: taking the state, and waiting for the files of an earlier checkpoint. The
thread that writes them, and the checkpoint of the best evaluation, are not in it. 100 % is the time of iterations without
evaluation.

    python benchmarks/checkpoint_overhead.py             # about 5 minutes on a CPU
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import groupwise as gw
from groupwise.training.callbacks import SaveCheckpoints

RESULT = Path(__file__).parent / "results" / "checkpoint_overhead.json"
RUNS = {
    "CartPole-v1, grpo": ("CartPole-v1", "grpo", {}),
    "CartPole-v1, ppo": ("CartPole-v1", "ppo", {}),
    "HalfCheetah-v5, ppo": ("HalfCheetah-v5", "ppo", {"total_steps": 300_000}),
}
"""Environment and algorithm, with the settings of their presets."""


class Clock:
    """Adds up how long methods take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, with the clock running."""

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - begin

        return timed


def measure(env: str, algorithm: str, settings: dict[str, Any]) -> dict[str, float]:
    """Seconds of iterations and of saving in one run."""
    clock, names = Clock(), ("on_iteration_end", "on_training_end", "close")
    plain = {name: getattr(SaveCheckpoints, name) for name in names}
    for name, method in plain.items():
        setattr(SaveCheckpoints, name, clock.timing(method))
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = gw.train(env, algorithm, run_dir=f"{folder}/run", logging={"progress": "none"}, **settings)
            seconds = run.metrics()[-1]["time/total_seconds"]
    finally:
        for name, method in plain.items():
            setattr(SaveCheckpoints, name, method)
    share = 100 * clock.seconds / (seconds + clock.seconds)
    return {"iterations": round(seconds, 2), "saving": round(clock.seconds, 3), "share, %": round(share, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="a few iterations of the first run")
    args = parser.parse_args()
    results = {}
    for name, (env, algorithm, settings) in list(RUNS.items())[: 1 if args.smallest else None]:
        results[name] = measure(env, algorithm, settings | ({"total_steps": 1_000} if args.smallest else {}))
        print(name, results[name], flush=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
