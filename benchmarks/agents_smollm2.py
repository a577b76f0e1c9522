"""Does a small real language model learn a game of several turns? SmolLM2-135M with LoRA guesses a number.

    python benchmarks/agents_smollm2.py                 about fifteen minutes of a core; writes results/agents_smollm2.json
    python benchmarks/agents_smollm2.py --smallest --out FILE

The secret is a number from 1 to 7, the model has three guesses in its own chat template, and the answer is ``Lower.`` or
``Higher.`` A turn ends at its first digit; a turn without one is cut, which ends the episode. The reward is 1 for the secret.
Binary search always wins. Measured, as fixed before the run: the success rate of the sampled policy on 24 held-out starts,
before training, every 10 iterations and at the end. The first ten episodes of each evaluation are kept.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import smollm2
import torch
from agents import Curve

import groupwise as gw

RESULTS = Path(__file__).parent / "results" / "agents_smollm2.json"
MOST = 7
GUESSES = 3
SYSTEM = "You guess a secret number. Answer with one number."
SETTINGS: dict[str, Any] = {
    "lora": {"r": 16},
    "num_prompts": 4,
    "sampling": {"max_new_tokens": 6, "stop": list("0123456789")},
    "evaluation": {"interval": 10**9, "prompts": 24, "deterministic": False, "num_logged_groups": 0},
    "logging": {"progress": "lines"},
}
ALGORITHM: dict[str, Any] = {"group_size": 8, "learning_rate": 2e-4, "objective": {"old_log_prob": "sampled"}}
EVERY = 10
"""Iterations between evaluations."""


class Secret(gw.TextEnv):
    """A number from 1 to 7, as a conversation."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[list[dict[str, str]], dict[str, Any]]:
        self.secret, self.left = int(np.random.default_rng(seed).integers(1, MOST + 1)), GUESSES
        question = f"The secret is from 1 to {MOST}. Guess."
        return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}], {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        guess, self.left = int("0" + "".join(c for c in text if c.isascii() and c.isdigit())), self.left - 1
        won = guess == self.secret
        answer = "Lower." if self.secret < guess else "Higher."
        return answer, float(won), won or not self.left, False, {"success": won}

    def sample_action(self, rng: np.random.Generator) -> str:
        return str(rng.integers(1, MOST + 1))


class Watch(Curve):
    """Keeps the first episodes of each evaluation, and writes what there is after each."""

    def __init__(self, out: Path, every: int) -> None:
        super().__init__(every)
        self.out, self.cpu = out, time.process_time()
        self.seen: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {"algorithm": ALGORITHM, "settings": SETTINGS, "evaluations": [], "training": []}

    def keep(self, prompts: Any, completions: Any, episode_return: Any = (), **columns: Any) -> list[float]:
        """A reward of 0, which sees the episodes."""
        pairs = zip(completions, episode_return, strict=True)
        self.seen += [{"turns": [m["content"] for m in messages], "return": earned} for messages, earned in pairs]
        return [0.0] * len(prompts)

    def on_iteration_end(self, trainer: Any, rollout: Any, metrics: dict[str, float]) -> None:
        names = {"success": "rollout/success_rate", "cut": "rollout/stop_max_tokens"}
        names |= {part: f"time/{part}_seconds" for part in ("collect", "update")}
        found = {name: metrics.get(metric) for name, metric in names.items()}
        self.results["training"].append(
            {"iteration": trainer.iteration, "cpu_seconds": time.process_time() - self.cpu} | found
        )
        self._write()
        super().on_iteration_end(trainer, rollout, metrics)

    def evaluate(self, trainer: Any) -> None:
        self.seen.clear()
        super().evaluate(trainer)
        iteration, success, _ = self.points[-1]
        entry = {"iteration": iteration, "success": success, "episodes": self.seen[:10]}
        self.results["evaluations"].append(entry)
        self._write()
        print(f"iteration {iteration}: success {success}", flush=True)

    def _write(self) -> None:
        self.out.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")


def learn(model: Path, folder: Path, out: Path, iterations: int, seconds: float | None, seed: int) -> None:
    """Train and write the results."""
    torch.set_num_threads(1)  # rounding, and so what is learned, is then the same however many cores there are
    watch = Watch(out, EVERY)
    watch.results["seed"] = seed
    gw.train(
        gw.TextTask(env=Secret, max_turns=GUESSES, reward=watch.keep, data_size=2_000, eval_size=128),
        gw.GRPOCfg(**ALGORITHM),
        model=str(model),
        total_iterations=iterations,
        stop={"time_limit": seconds},
        callbacks=[watch],
        seed=seed,
        run_dir=folder / "run",
        **SETTINGS,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--seconds", type=float, help="of training, after which it ends (default: no limit)")
    parser.add_argument("--smollm2", type=Path, help="folder of smollm2.py; made if it is not there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--smallest", action="store_true", help="one iteration")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = options.smollm2 or Path(scratch) / "smollm2"
        smollm2.make(model)
        iterations = 1 if options.smallest else options.iterations
        learn(model, Path(scratch), options.out, iterations, options.seconds, options.seed)


if __name__ == "__main__":
    main()
