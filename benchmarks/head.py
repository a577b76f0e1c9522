"""Milliseconds of the log-probability head, forward and backward: here, by the whole matrix, and as in another file.

The ways take turns within one process, and the fastest round counts. The other file is an earlier
``text/vocabulary.py``.

    python benchmarks/head.py --rounds 7 --threads 1 2 --against vocabulary_before.py
"""

import argparse
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from groupwise.text import vocabulary

Scores = Callable[..., Sequence[Tensor]]


def whole(hidden: Tensor, weight: Tensor, token: Tensor, *, temperature: float) -> Sequence[Tensor]:
    """Log-probabilities and entropies from a matrix of all tokens by the whole vocabulary."""
    log_p = torch.log_softmax(hidden.float() @ weight.float().T / temperature, dim=-1)
    return log_p.gather(1, token[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)


def from_file(path: Path) -> Scores:
    """``token_scores`` of that file."""
    spec = importlib.util.spec_from_file_location("vocabulary_before", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    scores: Scores = module.token_scores
    return scores


def timed(scores: Scores, hidden: Tensor, weight: Tensor, token: Tensor) -> tuple[float, float]:
    """Milliseconds forwards and backwards, for the log-probabilities alone, as where entropy earns no bonus."""
    start = perf_counter()
    log_prob = scores(hidden, weight, token, temperature=0.9)[0]
    between = perf_counter()
    torch.autograd.grad(log_prob.sum(), [x for x in (hidden, weight) if x.requires_grad])
    return (between - start) * 1e3, (perf_counter() - between) * 1e3


def compare(ways: dict[str, Scores], args: Any, dtype: torch.dtype, head: str) -> None:
    """Print a row of the table for each of the ways."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.width, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(args.vocabulary, args.width, generator=generator) / 8).to(dtype)
    weight.requires_grad_(head == "trained")
    token = torch.randint(args.vocabulary, (args.tokens,), generator=generator)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(args.rounds + 1):  # the first warms up
        for name, scores in ways.items():
            times[name].append(timed(scores, hidden, weight, token))
    setting = f"{torch.get_num_threads()} | {str(dtype).removeprefix('torch.')} | {head}"
    for name, taken in times.items():
        forward, backward = (min(parts) for parts in zip(*taken[1:], strict=True))
        print(f"| {setting} | {name} | {forward:.0f} | {backward:.0f} | {forward + backward:.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--against", type=Path)
    args = parser.parse_args()
    ways: dict[str, Scores] = {"here": vocabulary.token_scores, "whole matrix": whole}
    if args.against is not None:
        ways[args.against.stem] = from_file(args.against)
    print("| threads | type | head | way | forward ms | backward ms | both ms |\n|---|---|---|---|---|---|---|")
    for threads, dtype, head in itertools.product(args.threads, (torch.float32, torch.bfloat16), ("frozen", "trained")):
        torch.set_num_threads(threads)
        compare(ways, args, dtype, head)


if __name__ == "__main__":
    main()
