"""How close a training step of SmolLM2-135M comes to the matrix products that it cannot do without, part by part.

The step is that of ``trl_speed.py``: 4 prompts x 8 completions of 64 tokens, full fine-tuning. The products of each
part are counted: 2 operations per weight and token read; in training 6, and 8 in the output head, whose logits are
computed twice. They are divided by what products of these sizes reach on this machine, measured in the same process.
Attention is left out: at these lengths it is a fiftieth of the operations.

    python benchmarks/text_roofline.py --smollm2 FOLDER          # of smollm2.py; or: --precisions bfloat16 --steps 5
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from trl_speed import CASES, GROUP, NEW_TOKENS, PROMPTS, algorithm_of, scored, written

from groupwise.text.collector import text_rollout

RESULT = Path(__file__).parent / "results" / "text_roofline.json"


def rate(shape: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Operations a second of a product of [a, b] and [b, c], the fastest of 20."""
    a, b, c = shape
    left, right = torch.randn(a, b).to(dtype), torch.randn(c, b).to(dtype)
    return 2 * a * b * c / min(timed(lambda: left @ right.T) for _ in range(20))


def timed(what: Callable[[], Any]) -> float:
    start = perf_counter()
    what()
    return perf_counter() - start


def measure(folder: Path, precision: str, steps: int) -> dict[str, dict[str, float]]:
    """Seconds of writing and of training, medians; and those of the products alone."""
    case = CASES[precision]
    algorithm, tokenizer, prompts = algorithm_of(case, case.ours, folder)
    seconds: dict[str, list[float]] = {"writing": [], "training": []}
    for step in range(steps + 1):
        start = perf_counter()
        groups = written(algorithm.policy, prompts, step)
        between = perf_counter()
        algorithm.update(text_rollout(scored(prompts, groups, tokenizer)))
        if step:  # the first is a warm-up
            seconds["writing"].append(between - start)
            seconds["training"].append(perf_counter() - between)
    products = products_alone(algorithm.policy.model, sum(map(len, prompts)), getattr(torch, precision))
    return {
        part: {"seconds": statistics.median(seconds[part]), "products_alone": products[part]}
        for part in ("writing", "training")
    }


def products_alone(model: Any, prompt_total: int, dtype: torch.dtype) -> dict[str, float]:
    width, wide, vocabulary = model.config.hidden_size, model.config.intermediate_size, model.config.vocab_size
    body = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    head, rows, tokens = width * vocabulary, PROMPTS * GROUP, PROMPTS * GROUP * (NEW_TOKENS - 1)
    few, many = rate((rows, width, 2 * wide), dtype), rate((tokens, width, wide), dtype)
    few_logits, many_logits = (rate((n, width, 4096), torch.float32) for n in (rows, 1024))
    num_tokens = rows * NEW_TOKENS
    return {
        "writing": 2 * body * (tokens / few + prompt_total / many) + 2 * head * num_tokens / few_logits,
        "training": 6 * body * (tokens + prompt_total) / many + 8 * head * num_tokens / many_logits,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", type=Path, required=True)
    parser.add_argument("--precisions", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch; one a core")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = {precision: measure(args.smollm2, precision, args.steps) for precision in args.precisions}
    for precision, parts in result.items():
        for part, found in parts.items():
            share = found["products_alone"] / found["seconds"]
            print(
                f"| {precision} | {part} | {found['seconds']:.1f} s | {found['products_alone']:.1f} s | {share:.0%} |"
            )
    args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
