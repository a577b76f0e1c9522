"""What ``groupwise plan`` says beside what is measured: here, on one and two processes, and in a published run.

Here: a model of SmolLM2-135M's sizes with random weights in float32, one thread a process. Memory is what the tensors hold,
and the growth of the resident memory to its peak.

Published: torchtitan, Llama 3.1 8B, FSDP on 8 and 128 H100 (96 GB, 500 W), 2 texts of 8,192 tokens a GPU:
https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md

    python benchmarks/plan_check.py             # or: --published alone
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from groupwise.algorithms.grpo import GRPO
from groupwise.config import resolve_text
from groupwise.engines import DistributedEngine, from_environment
from groupwise.planning import plan_run, sizes_of
from groupwise.text.collector import TextRow, text_rollout
from groupwise.text.generation import complete
from groupwise.text.policy import CausalLM
from groupwise.text.sharding import ShardedEngine

RESULT = Path(__file__).parent / "results" / "plan_check.json"
SMOL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMOL |= {"num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "vocab_size": 128256}
PROMPTS, GROUP, PROMPT, COMPLETION = 4, 4, 32, 48
SMALLEST = {"hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 256}
CASES = {"1 process": (1, "ddp"), "2 processes, ddp": (2, "ddp"), "2 processes, fsdp": (2, "fsdp")}


def save(folder: str, sizes: dict) -> str:
    """A folder with the config of a Llama, without weights."""
    from transformers import LlamaConfig

    LlamaConfig(**sizes, max_position_embeddings=8192).save_pretrained(folder)
    return folder


# --- here ---


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def local_bytes(tensors) -> int:
    own = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in own)


def worker(folder: str, name: str, out: str) -> None:
    """Measure a case on this rank; the first writes it beside its plan."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    ranks, kind = CASES[name]
    engine = from_environment("cpu", ShardedEngine if kind == "fsdp" else DistributedEngine)
    before = resident()
    cfg = resolve_text(
        {"group_size": GROUP, "learning_rate": 1e-6},
        task={"data": "none.jsonl"}, model={"path": folder}, sampling={"max_new_tokens": COMPLETION},
        num_prompts=PROMPTS, engine=kind,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    policy = CausalLM(model, cfg.sampling, eos_ids=())
    from groupwise.speed.decoding import FastDecoder

    policy.decoder = FastDecoder()
    algorithm = GRPO(cfg.algorithm, policy, engine)
    generator = torch.Generator().manual_seed(engine.rank)
    for step in range(3):
        prompts = torch.randint(4, model.config.vocab_size, (PROMPTS, PROMPT), generator=generator).tolist()
        seeds = torch.arange(PROMPTS * GROUP).view(PROMPTS, GROUP) + 1000 * step
        groups = complete(policy, prompts, seeds)
        rows = [
            TextRow(prompts[n], c.tokens, c.log_probs, float(m), True, n)
            for n, group in enumerate(groups)
            for m, c in enumerate(group)
        ]
        algorithm.update(text_rollout(rows))
    state = [entry for entries in algorithm.optimizer.state.values() for entry in entries.values() if entry.dim()]
    held = {"policy": local_bytes(policy.parameters())}
    if kind == "fsdp":
        held["learner"] = local_bytes(algorithm.learner.parameters())
    held |= {"gradients": local_bytes(p.grad for p in algorithm.parameters), "optimizer state": local_bytes(state)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    if engine.rank == 0:
        plan = plan_run(cfg, ranks, 8e9, PROMPT)
        planned = plan.kept | {"peak": plan.peak}
        Path(out).write_text(
            json.dumps({part: [planned[part], found] for part, found in (held | {"peak": peak}).items()})
        )
    if ranks > 1:
        engine.close()


def here(folder: str, cases: list[str]) -> dict:
    found = {}
    for name in cases:
        ranks, _ = CASES[name]
        with tempfile.NamedTemporaryFile() as file:
            torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
            command = [sys.executable, *torchrun, __file__, "--worker", name, "--folder", folder, "--file", file.name]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            found[name] = json.loads(Path(file.name).read_text())
    return found


# --- published ---


def published(folder: str) -> dict:
    """Planned and published GB that a GPU holds less on 128 than on 8."""
    sizes = sizes_of(resolve_text(task={"data": "none.jsonl"}, model={"path": folder}).model)
    saved = 16 * sum(weight.part(1) for weight in sizes.weights) * (1 / 8 - 1 / 128)  # two moments, all in float32
    return {
        "torchtitan, GB less on 128 GPUs than on 8": [saved / 1e9, (82.4 - 67.0) * 2**30 / 1e9],
        "torchtitan compiled, GB less on 128 GPUs than on 8": [saved / 1e9, (77.0 - 62.0) * 2**30 / 1e9],
    }


def show(name: str, pair) -> None:
    planned, measured = pair
    print(f"| {name} | {planned:.4g} | {measured:.4g} | {planned / measured - 1:+.1%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--smallest", action="store_true", help="a tiny model on one process")
    parser.add_argument("--worker")
    parser.add_argument("--folder")
    parser.add_argument("--file")
    args = parser.parse_args()
    if args.worker:
        worker(args.folder, args.worker, args.file)
        return
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        if not args.published:
            sizes, cases = (SMOL | SMALLEST, ["1 process"]) if args.smallest else (SMOL, [*CASES])
            result["here"] = here(save(f"{folder}/smol", sizes), cases)
        result["published"] = published(save(f"{folder}/llama", LLAMA))
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    for name, found in result.get("here", {}).items():
        for what, pair in found.items():
            show(f"{name}: {what}, MB", [n / 1e6 for n in pair])
    for name, pair in result["published"].items():
        show(name, pair)


if __name__ == "__main__":
    main()
