"""What the cache of earlier turns saves: SmolLM2-135M in episodes of six turns, ``task.keep_cache`` on against off.

    python benchmarks/keep_cache.py                  about twenty minutes of a core; writes results/keep_cache.json
    python benchmarks/keep_cache.py --smallest --out FILE

The prompt has 75 tokens; the model says a sentence, of at most 24 tokens, and reads an answer of 34, six times. Both arms
train LoRA on the same episodes (2 groups x 8), one after the other, each in a process of its own; rounding may part them. Measured:
CPU seconds of a whole iteration and of generation, from the second iteration on, and the peak memory of the process.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import smollm2
import torch

import groupwise as gw
from groupwise.text import collector

RESULTS = Path(__file__).parent / "results" / "keep_cache.json"
TURNS = 6
RULES = (
    "You play a game of words. Each turn, say one short sentence about an animal. The other player answers with a hint. After "
    "six turns the game is over, and whoever has named more animals wins. Never repeat an animal, and do not explain yourself."
)


class Animals(gw.TextEnv):
    """Six sentences; longer ones earn more."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[dict[str, str]], dict[str, Any]]:
        self.left, number = TURNS, int(np.random.default_rng(seed).integers(1000))
        question = f"Game {number}. Begin."
        return [{"role": "system", "content": RULES}, {"role": "user", "content": question}], {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        hint = f"Good. I thought of another one: it lives near a river, and is {len(text)} inches long. Next."
        return hint, len(text) / 100, not self.left, False, {}

    def sample_action(self, rng: np.random.Generator) -> str:
        return str(rng.choice(["A dog.", "A cat."]))


class Seconds(gw.Callback):
    """CPU seconds of iterations and of their generation."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.writing, self.last = 0.0, time.process_time()

    def on_iteration_end(self, trainer: Any, rollout: Any, metrics: dict[str, float]) -> None:
        now = time.process_time()
        self.rows.append(
            {"iteration": now - self.last, "generation": self.writing, "tokens": float(rollout["valid"].sum())}
        )
        self.writing, self.last = 0.0, now


def train(model: str, keep_cache: bool, iterations: int, seed: int) -> dict[str, Any]:
    """Train, and return the seconds and the memory."""
    torch.set_num_threads(1)
    seconds, write = Seconds(), collector.write

    def timed(*args: Any, **options: Any) -> None:
        begun = time.process_time()
        write(*args, **options)
        seconds.writing += time.process_time() - begun

    collector.write = timed
    with tempfile.TemporaryDirectory() as scratch:
        gw.train(
            gw.TextTask(env=Animals, max_turns=TURNS, data_size=100, keep_cache=keep_cache),
            gw.GRPOCfg(group_size=8, learning_rate=1e-5, num_epochs=1),
            model=model,
            lora={"r": 16},
            num_prompts=2,
            sampling={"max_new_tokens": 24, "stop": [".", "!", "?", "\n"]},
            evaluation={"interval": 10**9, "prompts": 1},
            logging={"progress": "none"},
            callbacks=[seconds],
            total_iterations=iterations,
            seed=seed,
            run_dir=Path(scratch, "run"),
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"keep_cache": keep_cache, "seed": seed, "peak_mib": peak, "rows": seconds.rows[1:] or seconds.rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, help="folder of smollm2.py; made if it is not there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--smallest", action="store_true", help="one pair of one iteration")
    options = parser.parse_args()
    pairs, iterations = (1, 1) if options.smallest else (2, 2)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        model = options.smollm2 or Path(scratch) / "smollm2"
        smollm2.make(model)
        spawn = multiprocessing.get_context("spawn")
        for seed in range(pairs):
            for keep_cache in (False, True):
                with spawn.Pool(1) as pool:
                    runs.append(pool.apply(train, (str(model), keep_cache, iterations, seed)))
                print(runs[-1], flush=True)
                options.out.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    for part in ("iteration", "generation"):
        taken = {keep: [r["rows"][0][part] for r in runs if r["keep_cache"] == keep] for keep in (False, True)}
        ratio = statistics.median(a / b for a, b in zip(taken[False], taken[True], strict=True))
        print(f"{part}: {taken[False]} s without, {taken[True]} s with; {ratio:.2f} times, the median of pairs")


if __name__ == "__main__":
    main()
