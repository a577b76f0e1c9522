"""A training step of a language model of 0.4 billion parameters: seconds, and memory beside that of ``groupwise plan``.

64 completions of 256 tokens at prompts of 128, in bfloat16, one optimiser step.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from shared import (
    CUDA,
    TINY,
    case,
    chosen,
    gib,
    language_config,
    language_model,
    peak_bytes,
    prompt_texts,
    reset_peak,
    text_parts,
    wait,
    word_tokenizer,
)

import groupwise as gw
from groupwise.config import resolve_text
from groupwise.config.policy import SamplingCfg
from groupwise.planning import plan_run
from groupwise.text.policy import CausalLM

PROMPTS, GROUP = (8, 8) if not TINY else (2, 4)
PROMPT, NEW = (128, 256) if not TINY else (8, 8)
ENDS = 512 if not TINY else 64
"""Tokens that end a completion, where ends are random: one in 128 of all tokens."""
WARM_UP, STEPS = 1, 2 if not TINY else 1
"""Steps that do not count, and steps that do."""
CASES = {
    "16 rows, auto": (16, "auto", False),
    "64 rows, auto": (64, "auto", False),
    "16 rows, random ends, auto": (16, "auto", True),
    "16 rows, off": (16, "off", False),
}
"""Rows of a micro-batch, ``speed``, and whether completions end at random lengths."""
if TINY:
    CASES = {name: CASES[name] for name in ("16 rows, auto", "16 rows, off")}
PLAN = "16 rows, auto"
"""The case whose memory is compared with the plan."""


def reward(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Cheap, and never equal within a group."""
    return [sum(ids[:8]) % 97 / 97 + 1e-3 * number for number, ids in enumerate(completion_ids)]


def algorithm_cfg(rows: int) -> gw.GRPOCfg:
    """GRPO with micro-batches of so many rows, whose members count their prompt once."""
    rows = min(rows, PROMPTS * GROUP)
    tokens = rows * NEW + -(-rows // GROUP) * PROMPT
    return gw.GRPOCfg(
        group_size=GROUP,
        num_epochs=1,
        minibatch_size=None,
        micro_batch_size=None if rows == PROMPTS * GROUP else tokens,
        learning_rate=1e-6,
        max_grad_norm=1.0,
        optimizer={"name": "adamw", "eps": 1e-8},
        objective={"old_log_prob": "recomputed"},
    )


def measure(found: dict[str, Any], rows: int, speed: str, ends: bool) -> None:
    """Seconds of a step and of its halves, the least of ``STEPS``; peaks of memory in both."""
    reset_peak()
    size = language_config().vocab_size
    eos = tuple(range(size // 2, size // 2 + ENDS)) if ends else ()
    sampling, tokenizer = SamplingCfg(max_new_tokens=NEW), word_tokenizer(size)
    policy = CausalLM(language_model(), sampling, eos_ids=eos, tokenizer=tokenizer)
    prompts = prompt_texts(PROMPTS * (WARM_UP + STEPS), PROMPT, size)
    parts = text_parts(policy, algorithm_cfg(rows), prompts, reward, PROMPTS, speed)
    steps, peaks = [], [0, 0]
    for _ in range(WARM_UP + STEPS):
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        wait()
        begin = time.perf_counter()
        rollout = parts.collector.collect(1, rollout=parts.buffer.start_rollout())
        parts.buffer.add(rollout)
        wait()
        between, peaks[0] = time.perf_counter(), max(peaks[0], peak_bytes())
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        metrics = parts.algorithm.update(parts.buffer.get())
        wait()
        steps.append((between - begin, time.perf_counter() - between))
        peaks[1] = max(peaks[1], peak_bytes())
    generate, update = min(steps[WARM_UP:], key=sum)
    tokens = int(rollout["loss_mask"].sum())
    mismatch, norm = metrics["rollout/sampler_kl"], metrics["train/grad_norm"]
    found |= {
        "step_s": round(generate + update, 3),
        "generate_s": round(generate, 3),
        "update_s": round(update, 3),
        "first_s": round(sum(steps[0]), 2),
        "tokens": tokens,
        "tokens_per_second": round(tokens / (generate + update)),
        "peak_generate_gib": gib(peaks[0]),
        "peak_update_gib": gib(peaks[1]),
        "sampler_kl": mismatch,
        "grad_norm": norm,
        "decoder": getattr(policy.decoder, "used", "reference"),
        "ok": mismatch < 0.01 and norm > 0,
    }


def compare_with_plan(found: dict[str, Any], rows: int, measured: float) -> None:
    """The peak that ``groupwise plan`` gives for the settings, in GiB, and what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        language_config().save_pretrained(folder)
        model = {"path": folder, "precision": "bfloat16"}
        settings = {"task": {"data": str(Path(folder, "none.jsonl"))}, "sampling": {"max_new_tokens": NEW}}
        cfg = resolve_text(algorithm_cfg(rows), model=model, num_prompts=PROMPTS, **settings)
        plan = plan_run(cfg, 1, 80e9, PROMPT)
    found |= {"planned_gib": gib(plan.peak), "phase": plan.fullest, "measured_gib": measured}
    if CUDA:
        found["ratio"] = round(measured / gib(plan.peak), 2)
        found["ok"] = 0.6 <= found["ratio"] <= 1.15


def main() -> None:
    peak = 0.0
    for name in chosen(list(CASES)):
        with case(name) as found:
            measure(found, *CASES[name])
            if name == PLAN:
                peak = max(found["peak_generate_gib"], found["peak_update_gib"])
        if name == PLAN:
            with case("memory beside groupwise plan") as found:
                compare_with_plan(found, CASES[name][0], peak)


if __name__ == "__main__":
    main()
