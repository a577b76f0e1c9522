"""Does a language model learn? SmolLM2-135M with LoRA on sums, scored strictly, on questions that it never trained on.

    python benchmarks/text_learn.py --seeds 0-2            trains, some minutes a seed; writes results/text_learn.json
    python benchmarks/text_learn.py --report               table and picture for the docs from what is there

A prompt holds four sums as examples and a question, such as ``47 + 8 =``. The whole completion must be the number and
the end of the line. Questions are all sums of a number up to 99 and one up to 9. A quarter of them is held out, also of
the examples in training prompts.
"""

import argparse
import json
import multiprocessing
import random
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import smollm2
import torch

import groupwise as gw
from groupwise.cli.train import parse_seeds
from groupwise.system import num_cpus

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "text_learn.json"
PICTURE = HERE.parent / "docs" / "images" / "text_learn.png"
TABLE = HERE.parent / "docs" / "generated" / "text_learn.md"
SETTINGS = {
    "lora": {"r": 16},
    "num_prompts": 8,
    "sampling": {"max_new_tokens": 6, "stop": ["\n"]},
    "total_steps": 8_000,
    "evaluation": {"interval": 1_600, "prompts": None, "num_logged_groups": 0},
    "logging": {"progress": "lines"},
}
COMPLETIONS = 8
ALGORITHM = {"group_size": 8, "learning_rate": 2e-4}


def exact_sum(completions: list[str], answer: list[int], **columns: object) -> list[float]:
    """1 for the number and the end of the line, 0 for anything else."""
    return [float(text == f" {number}\n") for text, number in zip(completions, answer, strict=True)]


def questions() -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Prompts to train on, and those held out."""
    pairs = [(a, b) for a in range(2, 100) for b in range(2, 10)]
    rng = random.Random(0)
    rng.shuffle(pairs)
    held_out, train = pairs[:192], pairs[192:]

    def prompt(pair: tuple[int, int]) -> dict[str, object]:
        examples = rng.sample([other for other in train if other != pair], 4)
        lines = [f"{a} + {b} = {a + b}" for a, b in examples]
        return {"prompt": "\n".join([*lines, f"{pair[0]} + {pair[1]} ="]), "answer": sum(pair)}

    return [prompt(pair) for pair in train], [prompt(pair) for pair in held_out]


def learn(seed: int, model: Path, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What one seed reaches, before and after."""
    train, held_out = questions()
    run = gw.train(
        gw.TextTask(train, reward=exact_sum, eval_data=held_out, chat="never"),
        gw.GRPOCfg(**ALGORITHM),
        model=gw.ModelCfg(path=str(model), precision="bfloat16"),
        seed=seed,
        run_dir=folder / f"seed_{seed}",
        **settings,
    )
    metrics = run.metrics()
    return {
        "seed": seed,
        "greedy": scored(run),
        "sampled": scored(run, COMPLETIONS),
        "curve": [[entry["env_steps"], entry["eval/return_mean"]] for entry in metrics if "eval/return_mean" in entry],
        "training": [[entry["env_steps"], entry["rollout/return_mean"]] for entry in metrics],
        "seconds": run.summary["seconds"],
    }


def scored(run: gw.Run, completions: int = 1) -> dict[str, Any]:
    return {
        key: value
        for key, value in gw.evaluate(run, completions_per_prompt=completions).report().items()
        if key != "rewards"
    }


def untrained(model: Path, folder: Path) -> dict[str, Any]:
    """The same scores of the model as it comes."""
    train, held_out = questions()
    run = gw.train(
        gw.TextTask(train, reward=exact_sum, eval_data=held_out, chat="never"),
        gw.GRPOCfg(**ALGORITHM | {"learning_rate": 1e-30}),
        model=gw.ModelCfg(path=str(model), precision="bfloat16"),
        run_dir=folder / "untrained",
        **SETTINGS | {"total_steps": 1},
    )
    return {"greedy": scored(run), "sampled": scored(run, COMPLETIONS)}


def report(results: dict[str, Any], out: Path) -> None:
    """Table and picture from the results, in the docs, or beside results that are elsewhere."""
    kept = out == RESULTS
    (TABLE if kept else out.with_suffix(".md")).write_text(table(results), encoding="utf-8")
    draw(results, PICTURE if kept else out.with_suffix(".png"))
    print(table(results))


def table(results: dict[str, Any]) -> str:
    rows = [("as it comes", results["untrained"])]
    rows += [(f"seed {found['seed']}", found) for found in results["seeds"]]
    head = ["| model | greedy: right | sampled: pass@1 | pass@8 |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {name} | {' | '.join(cells(found))} |" for name, found in rows)]) + "\n"


def cells(found: dict[str, Any]) -> list[str]:
    greedy, sampled = found["greedy"]["pass_at_1"], found["sampled"]
    rates = (greedy, sampled["pass_at_1"], sampled[f"pass_at_{COMPLETIONS}"])
    return [f"{rate['mean']:.1%} ({rate['ci95'][0]:.1%} to {rate['ci95'][1]:.1%})" for rate in rates]


def draw(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    start = results["untrained"]["greedy"]["return_mean"]
    for number, found in enumerate(results["seeds"]):
        steps, right = zip([0, start], *found["curve"], strict=True)
        axes.plot(steps, right, "o-", color=f"C{number}", markersize=4, label=f"seed {found['seed']}")
    axes.set(xlabel="tokens written", ylabel="held-out sums that are right, greedy", ylim=(0, 1))
    axes.set_title("SmolLM2-135M, LoRA, GRPO")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-2")
    parser.add_argument("--smollm2", type=Path, help="folder of smollm2.py; made if it is not there")
    parser.add_argument("--report", action="store_true", help="only table and picture, from what there is")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--smallest", action="store_true", help="one iteration, in one process")
    options = parser.parse_args()
    settings, processes = (SETTINGS | {"total_steps": 1}, 1) if options.smallest else (SETTINGS, num_cpus())
    if options.report:
        report(json.loads(options.out.read_text(encoding="utf-8")), options.out)
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = options.smollm2 or Path(scratch) / "smollm2"
        smollm2.make(model)
        # a thread each: rounding, and so what is learned, is then the same however many cores there are
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            jobs = [pool.submit(learn, seed, model, Path(scratch), settings) for seed in parse_seeds(options.seeds)]
            before = pool.submit(untrained, model, Path(scratch)).result()
            results = {"algorithm": ALGORITHM, "settings": settings, "untrained": before}
            results["seeds"] = [job.result() for job in jobs]
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    report(results, options.out)


if __name__ == "__main__":
    main()
