"""Does a language model learn a game of several turns? Number guessing by tiny Llamas, to the known optimum.

    python benchmarks/agents.py                        every arm and seed that results/agents.json lacks, one after another
    python benchmarks/agents.py --arms optimum --seeds 0-2
    python benchmarks/agents.py --smallest --out FILE  an iteration of each arm, seconds in all
    python benchmarks/agents.py --report               the tables for the docs, from what is there

The prompt is a number n, and the environment draws a secret from 1 to n. A turn is one token, a number. The answer is
``<`` or ``>``: the secret is less or greater. A model of two layers begins with random weights.

| arms | game |
|---|---|
| ``optimum`` | n is 3, 7 or 15; three guesses; the reward is 1 for the secret. Binary search wins 1, 1 and 7/15 of them: 0.822 |
| ``constant``, ``plain`` | the same without the iterations at the end that have no entropy bonus; with other settings |
| ``shared``, ``unshared`` | n is 2 to 15, so that starts differ in what can be won (0.791 at best); ``start_mode`` auto against none |
| ``outcome``, ``turn_to_go`` | n is 2 to 15, six guesses, each costs 0.1; ``credit.returns`` of these names |

Measured, as fixed before the runs: the success rate of the sampled policy on 1,024 held-out starts at the end; and the area
under the curve of evaluations on 128 held-out starts before training and every 25 iterations, divided by the number of
iterations: of the success rate, for ``outcome`` and ``turn_to_go`` of the mean return. Pairs of arms are compared by the area,
over seeds: the mean difference and its 95 % interval by Student's t. Settings were chosen on the seeds 100 and 101; the seeds
reported are 0 to 9 (``optimum``), 0 (``constant``, ``plain``) and 0 to 4.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import groupwise as gw
from groupwise.cli.train import parse_seeds
from groupwise.report.folder import mean_ci95
from groupwise.training.callbacks import Evaluate

RESULTS = Path(__file__).parent / "results" / "agents.json"
MOST = 15
EVERY = 25
"""Iterations between evaluations."""


class Number(gw.TextEnv):
    """A number from 1 to n, which is one of ``sizes``; each guess costs ``cost``."""

    def __init__(self, sizes: tuple[int, ...], guesses: int, cost: float) -> None:
        self.sizes, self.guesses, self.cost = sizes, guesses, cost

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        rng = np.random.default_rng(seed)
        self.n = int(rng.choice(self.sizes))
        self.secret, self.left = int(rng.integers(1, self.n + 1)), self.guesses
        return str(self.n), {}

    def step(self, text: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        guess, self.left = int(text) if text.isdecimal() else 0, self.left - 1
        won = guess == self.secret
        answer = "<" if self.secret < guess else ">"
        return answer, float(won) - self.cost, won or not self.left, False, {"success": won}

    def sample_action(self, rng: np.random.Generator) -> str:
        return str(rng.integers(1, MOST + 1))


class Arm(NamedTuple):
    """A game, and how it is trained."""

    sizes: tuple[int, ...] = (*range(2, MOST + 1),)
    guesses: int = 3
    cost: float = 0.0
    iterations: int = 150
    seeds: int = 5
    start_mode: str = "auto"
    algorithm: dict[str, Any] = {}
    """Settings of GRPO other than ``ALGORITHM``."""
    last: int = 0
    """Iterations after these, at a third of the learning rate and without the entropy bonus."""
    curve: Literal["success", "return"] = "success"
    """What the area is of."""


ALGORITHM = {"group_size": 16, "learning_rate": 1e-3, "ent_coef": 0.05, "num_epochs": 1, "minibatch_size": None}
PROMPTS = 8
LATER = {"returns": "turn_to_go", "group_key": "group_step"}
BY_TURN = {"credit": LATER, "gamma": 1.0, "learning_rate": 3e-3, "ent_coef": 0.1}
"""As ``examples/text_game.py``."""
ARMS = {
    "optimum": Arm((3, 7, 15), iterations=240, seeds=10, algorithm=BY_TURN | {"ent_coef": 0.2}, last=60),
    "constant": Arm((3, 7, 15), iterations=300, seeds=1, algorithm=BY_TURN),
    "plain": Arm((3, 7, 15), iterations=300, seeds=1),
    "shared": Arm(),
    "unshared": Arm(start_mode="none"),
    "outcome": Arm(guesses=6, cost=0.1, curve="return"),
    "turn_to_go": Arm(guesses=6, cost=0.1, curve="return", algorithm={"credit": LATER, "gamma": 1.0}),
}
PAIRS = (("shared", "unshared"), ("turn_to_go", "outcome"))
TRAINED = {"success": "rollout/success_rate", "return": "rollout/return_mean"}


def make_model(folder: Path, seed: int) -> Path:
    """A Llama of random weights, with a token for each number and answer."""
    specials = ["<unk>", "<pad>", "<s>", "</s>"]
    vocabulary = [*specials, *map(str, range(1, MOST + 1)), "<", ">"]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
    tokenizer.decoder = decoders.Fuse()
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape: dict[str, Any] = sizes | {
        "initializer_range": 0.15
    }  # the default of 0.02 is for wide layers: narrow ones learn slowly with it
    ends = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    config = LlamaConfig(vocab_size=len(vocabulary), max_position_embeddings=32, **shape, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class Curve(gw.Callback):
    """Evaluates before training and ``every`` so many iterations, and adds up the seconds of the parts of training."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.before = 0
        """Iterations before this training."""
        self.points: list[tuple[int, float, float]] = []
        """Iteration, success rate and mean return."""
        self.seconds = dict.fromkeys(("collect", "env", "advantage", "update"), 0.0)

    def on_training_start(self, trainer: Any) -> None:
        if not self.before:
            self.evaluate(trainer)

    def on_iteration_end(self, trainer: Any, rollout: Any, metrics: dict[str, float]) -> None:
        for part in self.seconds:
            self.seconds[part] += metrics[f"time/{part}_seconds"]
        if trainer.iteration % self.every == 0 or trainer.is_done():
            self.evaluate(trainer)

    def evaluate(self, trainer: Any) -> None:
        """Add a point."""
        result = next(callback for callback in trainer.callbacks if isinstance(callback, Evaluate)).evaluate()
        self.points.append((self.before + trainer.iteration, result.success_rate, result.return_mean))


def learn(arm: Arm, seed: int) -> dict[str, Any]:
    """What one seed reaches."""
    curve, cpu = Curve(EVERY), time.process_time()
    task = gw.TextTask(
        env=lambda: Number(arm.sizes, arm.guesses, arm.cost),
        max_turns=arm.guesses,
        start_mode=arm.start_mode,
        data_size=10_000,
        eval_size=1_024,
    )
    settings: dict[str, Any] = {
        "num_prompts": PROMPTS,
        "evaluation": {"interval": 10**9, "prompts": 128, "deterministic": False, "num_logged_groups": 0},
        "logging": {"progress": "none"},
        "callbacks": [curve],
        "seed": seed,
    }
    algorithm = ALGORITHM | arm.algorithm
    with tempfile.TemporaryDirectory() as scratch:
        run = gw.train(
            task,
            gw.GRPOCfg(**algorithm),
            model=str(make_model(Path(scratch, "model"), seed)),
            # any other token than a number ends the episode; where guesses cost it is a guess, or giving up would be free
            sampling={"max_new_tokens": 1, "stop": list("123456789<>" if arm.cost else "123456789")},
            total_iterations=arm.iterations,
            run_dir=Path(scratch, "run"),
            **settings,
        )
        metrics = run.metrics()
        if arm.last:
            curve.before = arm.iterations
            last = algorithm | {"ent_coef": 0.0, "learning_rate": algorithm["learning_rate"] / 3}
            run = gw.train(
                task,
                gw.GRPOCfg(**last),
                policy=run.policy,
                total_iterations=arm.last,
                run_dir=Path(scratch, "last"),
                **settings,
            )
            metrics += run.metrics()
        cpu = time.process_time() - cpu
        final, greedy = gw.evaluate(run, 1_024, deterministic=False), gw.evaluate(run, 256)
    number = Number(arm.sizes, arm.guesses, arm.cost)
    starts = [int(number.reset(seed=example.start.seed)[0]) for example in task.held_out() if example.start]
    by_n = {n: [won for won, size in zip(final.successes, starts, strict=True) if size == n] for n in arm.sizes}
    return {
        "seed": seed,
        "success": final.success_rate,
        "success_ci95": final.success_ci95,
        "success_by_n": {n: statistics.fmean(won) for n, won in by_n.items()},
        "greedy": greedy.success_rate,
        "return": final.return_mean,
        "area": area(curve.points, 1 if arm.curve == "success" else 2),
        "training_area": statistics.fmean(m[TRAINED[arm.curve]] for m in metrics),
        "curve": curve.points,
        "starts_apart": sum(m["rollout/starts_apart"] for m in metrics),
        "cpu_seconds": cpu,
        "seconds": curve.seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": {"groupwise": gw.__version__, "torch": torch.__version__},
    }


def area(points: list[tuple[int, float, float]], column: int) -> float:
    """The mean height of the curve, by trapezoids."""
    pieces = [(b[0] - a[0]) * (a[column] + b[column]) / 2 for a, b in pairwise(points)]
    return sum(pieces) / points[-1][0]


def add(results: dict[str, Any], name: str, found: dict[str, Any], out: Path) -> None:
    """Write the results with those of one more run."""
    known = results.setdefault(name, ARMS[name]._asdict() | {"algorithm": ALGORITHM | ARMS[name].algorithm, "runs": []})
    known["runs"] = sorted([*known["runs"], found], key=lambda run: run["seed"])
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def report(results: dict[str, Any]) -> None:
    """Tables for the docs."""
    print("| arm | seeds | success at the end | greedy | area | CPU seconds a run |\n|---|---|---|---|---|---|")
    for name, arm in results.items():
        shown = [mean_and_ends([run[key] for run in arm["runs"]]) for key in ("success", "greedy", "area")]
        cpu = statistics.median(run["cpu_seconds"] for run in arm["runs"])
        print(f"| {name} | {len(arm['runs'])} | {' | '.join(shown)} | {cpu:.0f} |")
    for pair in PAIRS:
        if all(name in results for name in pair):
            for key in ("area", "training_area", "success", "return"):
                ours, theirs = ({run["seed"]: run[key] for run in results[name]["runs"]} for name in pair)
                gaps = [ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()]
                print(f"{pair[0]} less {pair[1]}, {key}, {len(gaps)} seeds: {mean_and_ends(gaps)}")


def mean_and_ends(values: list[float]) -> str:
    mean = statistics.fmean(values)
    ends = mean_ci95(mean, statistics.stdev(values) if len(values) > 1 else 0.0, len(values))
    return f"{mean:.3f}" + (f" ({ends[0]:.3f} to {ends[1]:.3f})" if ends else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parser.add_argument("--seeds", help="such as 0-4 (default: those of the arm)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--smallest", action="store_true", help="one iteration of one seed")
    parser.add_argument("--report", action="store_true", help="only the tables, from what there is")
    options = parser.parse_args()
    torch.set_num_threads(1)  # rounding, and so what is learned, is then the same however many cores there are
    results = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    for name in () if options.report else options.arms:
        arm = ARMS[name]._replace(**{"iterations": 1, "seeds": 1} if options.smallest else {})
        known = {run["seed"] for run in results.get(name, {"runs": []})["runs"]}
        seeds = parse_seeds(options.seeds) if options.seeds else range(arm.seeds)
        for seed in (seed for seed in seeds if seed not in known):
            found = learn(arm, seed)
            add(results, name, found, options.out)
            print(f"{name} {seed}: {found['success']:.3f}, {found['cpu_seconds']:.0f} CPU seconds", flush=True)
    report(results)


if __name__ == "__main__":
    main()
