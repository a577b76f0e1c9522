"""What ``groupwise plan`` says beside what is measured: here, on one and two processes, and in two published runs.

Here: a model of SmolLM2-135M's sizes with random weights in float32, one thread a process. Memory is what the tensors hold,
and the growth of the resident memory to its peak. Seconds are CPU seconds of the thread that trains, so that other programs
on the machine count little; waiting for the other process is not in them, and the plan's links take no time. The rates of
products and memory are measured in the same way, before and after, and taken whole (no assumed share). Products of a
decoding step have as many rows as there are completions, 16, and are slower than those of an update; a GPU would wait for
its memory there.

Published: the rates of the data sheet, with the plan's assumptions.

- torchtitan, Llama 3.1 8B, FSDP on 8 and 128 H100 (96 GB, 500 W), 2 texts of 8,192 tokens a GPU, selective activation
  checkpointing: https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md
- NeMo RL 0.4, GRPO, Llama 3.1 8B on 16 H100, 64 prompts x 32 completions, at most 4,096 tokens, 4 optimiser steps, vLLM on
  the same GPUs in turns with training. It holds whole layers and exchanges gradients once a step, so the plan has "ddp":
  https://docs.nvidia.com/nemo/rl/latest/about/performance-summary.html, recipe grpo-llama3.1-8b-instruct-2n8g.yaml

    python benchmarks/plan_check.py             # or: --published alone
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import thread_time

import torch
from torch.distributed.tensor import DTensor

from groupwise.algorithms.grpo import GRPO
from groupwise.config import resolve_text
from groupwise.engines.distributed import DistributedEngine, from_environment
from groupwise.planning.gpus import GPU, GPUS, Assumptions
from groupwise.planning.plan import plan_run
from groupwise.planning.seconds import training_flops
from groupwise.planning.sizes import sizes_of, total_elements
from groupwise.text.generation import complete
from groupwise.text.policy import CausalLM
from groupwise.text.rollout import TextRow, text_rollout
from groupwise.text.sharding import ShardedEngine

RESULT = Path(__file__).parent / "results" / "plan_check.json"
SMOL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMOL |= {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "vocab_size": 128256}
PROMPTS, GROUP, PROMPT, COMPLETION = 4, 4, 32, 48
CASES = {"1 process": (1, "ddp"), "2 processes, ddp": (2, "ddp"), "2 processes, fsdp": (2, "fsdp")}
WHOLE = Assumptions(mfu=1.0, bandwidth=1.0, launch=0.0)


def save(folder: str, sizes: dict) -> str:
    """A folder with the config of a Llama, without weights."""
    from transformers import LlamaConfig

    LlamaConfig(**sizes, max_position_embeddings=8192).save_pretrained(folder)
    return folder


# --- here ---


def timed(work) -> float:
    start = thread_time()
    work()
    return thread_time() - start


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def rates() -> tuple[float, float, float]:
    """FLOP/s of products of many rows and of a decoding step's, and bytes per second, of this thread."""
    weight, large, out = torch.randn(1536, 576), torch.randn(2**26), torch.empty(2**26)
    flops = []
    for rows in (512, PROMPTS * GROUP):
        left = torch.randn(rows, 576)
        flops.append(2 * rows * 576 * 1536 / statistics.median(timed(lambda: left @ weight.T) for _ in range(100)))  # noqa: B023
    return *flops, 2 * 4 * 2**26 / statistics.median(timed(lambda: torch.neg(large, out=out)) for _ in range(5))


def local_bytes(tensors) -> int:
    own = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in own)


def worker(folder: str, name: str, out: str) -> None:
    """Measure a case on this rank; the first writes it beside its plan."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    ranks, kind = CASES[name]
    engine = from_environment("cpu", ShardedEngine if kind == "fsdp" else DistributedEngine)
    rates_before, before = rates(), resident()
    cfg = resolve_text(
        {"group_size": GROUP, "learning_rate": 1e-6},
        task={"data": "none.jsonl"}, model={"path": folder}, sampling={"max_new_tokens": COMPLETION},
        num_prompts=PROMPTS, engine=kind,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    policy = CausalLM(model, cfg.sampling, eos_ids=())
    from groupwise.speed.decoding_step import FastDecoder

    policy.decoder = FastDecoder()
    algorithm = GRPO(cfg.algorithm, policy, engine)
    generator = torch.Generator().manual_seed(engine.rank)
    seconds = {"generation": [], "update": []}
    for step in range(3):
        prompts = torch.randint(4, 49152, (PROMPTS, PROMPT), generator=generator).tolist()
        start = thread_time()
        seeds = torch.arange(PROMPTS * GROUP).view(PROMPTS, GROUP) + 1000 * step
        groups = complete(policy, prompts, seeds)
        between = thread_time()
        rows = [
            TextRow(prompts[n], c.tokens, c.log_probs, float(m), True, n)
            for n, group in enumerate(groups)
            for m, c in enumerate(group)
        ]
        algorithm.update(text_rollout(rows))
        if step:  # the first is a warm-up
            seconds["generation"].append(between - start)
            seconds["update"].append(thread_time() - between)
    state = [entry for entries in algorithm.optimizer.state.values() for entry in entries.values() if entry.dim()]
    held = {"policy": local_bytes(policy.parameters())}
    if kind == "fsdp":
        held["learner"] = local_bytes(algorithm.learner.parameters())
    held |= {"gradients": local_bytes(p.grad for p in algorithm.parameters), "optimizer state": local_bytes(state)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    many, few, bandwidth = map(statistics.mean, zip(rates_before, rates(), strict=True))
    if engine.rank == 0:
        machine = GPU("this machine", 8e9, many, many, bandwidth, float("inf"), "measured")
        plan = plan_run(cfg, ranks, machine, PROMPT, COMPLETION, WHOLE)
        decoding = plan_run(cfg, ranks, machine._replace(float32=few), PROMPT, COMPLETION, WHOLE).seconds["generation"]
        planned = {**plan.memory.kept, "peak": plan.memory.peak}
        writing, updating = (statistics.mean(found) for found in seconds.values())
        result = {
            "memory": {part: [planned[part], found] for part, found in (held | {"peak": peak}).items()},
            "seconds": {
                "generation, at the rate of products of few rows": [decoding, writing],
                "generation, at the rate of products of many rows": [plan.seconds["generation"], writing],
                "update": [plan.seconds["update"], updating],
            },
            "rates": {"many rows": many, "few rows": few, "bandwidth": bandwidth},
        }
        Path(out).write_text(json.dumps(result))
    if ranks > 1:
        engine.close()


def here(folder: str) -> dict:
    found = {}
    for name, (ranks, _) in CASES.items():
        with tempfile.NamedTemporaryFile() as file:
            torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
            command = [sys.executable, *torchrun, __file__, "--worker", name, "--folder", folder, "--file", file.name]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            found[name] = json.loads(Path(file.name).read_text())
    return found


# --- published ---


def published(folder: str) -> dict:
    """Planned and published numbers."""
    h100, assumed = GPUS["h100"], Assumptions()
    model = {"path": folder, "precision": "bfloat16", "gradient_checkpointing": True}
    sizes = sizes_of(resolve_text(task={"data": "none.jsonl"}, model=model).model)
    rate = {
        recompute: assumed.mfu * h100.bf16 / training_flops(sizes, 4096, recompute=recompute)
        for recompute in (False, True)
    }
    parameters = total_elements([*sizes.weights])
    saved = 16 * parameters * (1 / 8 - 1 / 128)  # parameters, gradients and two moments in float32
    nemo = resolve_text(
        {"group_size": 32, "kl_coef": 0.01, "minibatch_size": 512 * 1060},
        task={"data": "none.jsonl"}, model=model, num_prompts=4, sampling={"max_new_tokens": 4096 - 132},
        generation={"name": "server", "urls": [f"http://127.0.0.1:{8000 + n}" for n in range(16)]},
    )  # fmt: skip
    plan = plan_run(nemo, 16, h100, 132, 1060)
    return {
        "torchtitan, tokens/s and GPU, planned without recomputation": [rate[False], 5762],
        "torchtitan, tokens/s and GPU, planned with all recomputed": [rate[True], 5762],
        "torchtitan compiled, planned without recomputation": [rate[False], 6667],
        "torchtitan compiled, planned with all recomputed": [rate[True], 6667],
        "torchtitan, GB less on 128 GPUs than on 8": [saved / 1e9, (82.4 - 67.0) * 2**30 / 1e9],
        "torchtitan compiled, GB less on 128 GPUs than on 8": [saved / 1e9, (77.0 - 62.0) * 2**30 / 1e9],
        # on the same GPUs, weights need no disk
        "NeMo RL, seconds of a step": [plan.step_seconds - plan.seconds["publishing"], 97.7],
        "NeMo RL, parts of the plan": plan.seconds,
    }


def show(name: str, pair) -> None:
    planned, measured = pair
    print(f"| {name} | {planned:.4g} | {measured:.4g} | {planned / measured - 1:+.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--worker")
    parser.add_argument("--folder")
    parser.add_argument("--file")
    args = parser.parse_args()
    if args.worker:
        worker(args.folder, args.worker, args.file)
        return
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        if not args.published:
            result["here"] = here(save(f"{folder}/smol", SMOL))
        result["published"] = published(save(f"{folder}/llama", LLAMA))
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    for name, found in result.get("here", {}).items():
        for part in ("memory", "seconds"):
            for what, pair in found[part].items():
                show(
                    f"{name}: {what}, {'MB' if part == 'memory' else 's'}",
                    [n / 1e6 for n in pair] if part == "memory" else pair,
                )
    for name, pair in result["published"].items():
        if isinstance(pair, list):
            show(name, pair)
        else:
            print(name, {key: round(value, 1) for key, value in pair.items()})


if __name__ == "__main__":
    main()
