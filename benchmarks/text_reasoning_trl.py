"""The sums of ``text_reasoning.py`` by TRL 1.16: what it learns, and seconds and memory beside ours.

The same model in float32, LoRA, prompts, reward and numbers: 50 steps of 8 prompts x 8 completions, learning rate 2e-4,
AdamW, no KL, advantages over the group's deviation, a mean over tokens (TRL's ``dapo`` loss). TRL trains 16 rows at once,
without gradient checkpointing. A line's end is TRL's end of text, which stops a completion as ``sampling.stop`` does
here. Metric: right answers on the 200 held-out questions, greedy, for both by our evaluation. Each run is a
process of its own on one thread; they follow one another. One seed.

    .venv-text/bin/pip install -c constraints.txt reasoning-gym       # into the environment of trl_speed.py
    .venv-text/bin/python benchmarks/text_reasoning_trl.py
    .venv-text/bin/python benchmarks/text_reasoning_trl.py --table
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import cells
import smollm2
import text_reasoning
import trl_speed

RESULT = Path(__file__).parent / "results" / "text_reasoning_trl.json"
SIDES = ("trl", "ours")
ROWS = 16
"""Completions of a forward and backward pass of TRL."""


def by_trl(seed: int, model: Path, folder: Path, iterations: int) -> dict[str, Any]:
    """Train; the merged model is in the folder."""
    import peft
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    (newline,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(newline)
    train, _ = text_reasoning.questions(text_reasoning.ONE)
    curve = list[float]()

    def reward(completion_ids: list[list[int]], answer: list[str], **columns: Any) -> list[float]:
        texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in completion_ids]
        scores = text_reasoning.exact(texts, answer)
        curve.append(round(sum(scores) / len(scores), 3))
        return scores

    args = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=text_reasoning.COMPLETIONS // ROWS,
        num_generations=8,
        max_completion_length=8,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        loss_type="dapo",
        max_steps=iterations,
        seed=seed,
        bf16=False,
        **trl_speed.QUIET,
    )
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(train),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    began = time.process_time()
    trainer.train()
    measured = {"cpu_seconds": round(time.process_time() - began), "memory_mib": peak()}
    trained: Any = trainer.model
    trained.merge_and_unload().save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(model).save_pretrained(folder / "model")
    greedy = text_reasoning.one(text_reasoning.ONE, text_reasoning.UNTRAINED, seed, folder / "model")["greedy"]
    return {"side": "trl", "seed": seed, "greedy": greedy, **measured, "training": curve}


def by_ours(seed: int, model: Path, iterations: int) -> dict[str, Any]:
    found = text_reasoning.one(text_reasoning.ONE, "grpo", seed, model, iterations)
    kept = {name: found[name] for name in ("seed", "greedy", "cpu_seconds", "training")}
    return {"side": "ours", **kept, "memory_mib": peak()}


def peak() -> int:
    """Greatest memory of this process, in MiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024**2 if sys.platform == "darwin" else 1024))


def table(found: cells.Cells) -> str:
    lines = ["| | right, greedy | CPU seconds of training | peak memory, MiB |", "|---|---|---|---|"]
    for cell in found:
        lines.append(
            f"| {cell['side']}, seed {cell['seed']} | {cell['greedy']:.1%} | {cell['cpu_seconds']:,} | {cell['memory_mib']:,} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--smollm2", type=Path, default=Path("smollm2"), help="folder of smollm2.py; made if it is not there"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", choices=SIDES, help="one run in this process, as JSON")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="one iteration")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    args = parser.parse_args()
    iterations = 1 if args.smallest else text_reasoning.ITERATIONS
    if args.side is not None:
        with tempfile.TemporaryDirectory() as folder:
            trl = args.side == "trl"
            found = (
                by_trl(args.seed, args.smollm2, Path(folder), iterations)
                if trl
                else by_ours(args.seed, args.smollm2, iterations)
            )
        print(json.dumps(found))
        return
    results = cells.load(args.out)
    if not args.table:
        smollm2.make(args.smollm2)
    for side in () if args.table else SIDES:
        if (side, args.seed) not in {(c["side"], c["seed"]) for c in results}:
            command = [
                sys.executable,
                "-P",
                __file__,
                "--side",
                side,
                "--seed",
                str(args.seed),
                "--smollm2",
                str(args.smollm2),
            ]
            path = os.pathsep.join((str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])))
            done = subprocess.run(
                [*command, *["--smallest"] * args.smallest],
                capture_output=True,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
                check=False,
            )
            if done.returncode:
                raise RuntimeError(done.stderr[-3000:])
            results.append(json.loads(done.stdout.splitlines()[-1]))
            cells.save(args.out, results)
    print(table(results))


if __name__ == "__main__":
    main()
