"""Share of time in which the GPU is idle, and host synchronisations, in the halves of one iteration.

Busy time is that of the kernels in a profile; the wall time is that of the same half without the profiler.
"""

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from shared import (
    CUDA,
    TINY,
    case,
    chosen,
    collect,
    control_cfg,
    control_parts,
    language_config,
    language_model,
    prompt_texts,
    text_parts,
    wait,
    word_tokenizer,
)
from torch.autograd import DeviceType

ENVS, STEPS = (4096, 32) if not TINY else (64, 8)
WARM_UP = 3 if not TINY else 1
CALLS = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cudaGraphLaunch", "cudaMalloc")


class Limits(NamedTuple):
    """The most that one iteration may have."""

    idle_collecting: float
    idle_updating: float
    syncs: int
    """Host synchronisations besides one for each optimiser step."""
    syncs_of_step: int


LIMITS = {"control": Limits(0.6, 0.9, 2, 0), "text": Limits(0.6, 0.6, 2, 1)}


def busy(half: Callable[[], Any]) -> dict[str, Any]:
    """What a profile says of a half: seconds of kernels, numbers of kernels and of calls, and the longest ones."""
    with torch.profiler.profile() as profile:
        half()
        wait()
    events = profile.key_averages()
    kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    counts = {event.key: event.count for event in events if event.device_type == DeviceType.CPU}
    longest = sorted(kernels, key=lambda event: -event.self_device_time_total)[:8]
    return {
        "busy_s": round(sum(event.self_device_time_total for event in kernels) / 1e6, 4),
        "kernels": sum(event.count for event in kernels),
        "calls": {name: counts[name] for name in CALLS if name in counts},
        "longest_ms": [(e.key[:60], e.count, round(e.self_device_time_total / 1e3, 2)) for e in longest],
    }


def syncs(half: Callable[[], Any]) -> Counter[str]:
    """Host synchronisations of a half by the line of groupwise that causes them. None are seen on a CPU."""
    lines: Counter[str] = Counter()

    def show(message: Any, category: Any, filename: str, line: int, *rest: Any) -> None:
        if "synchroniz" not in str(message):
            return
        ours = [frame for frame in traceback.extract_stack() if "/groupwise/" in frame.filename]
        where = ours[-1] if ours else None
        lines[f"{where.filename.split('/groupwise/')[-1]}:{where.lineno}" if where else f"{filename}:{line}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        if CUDA:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            half()
        finally:
            if CUDA:
                torch.cuda.set_sync_debug_mode("default")
    return lines


def measure(found: dict[str, Any], parts: Any, limits: Limits) -> None:
    """Measure both halves, in iterations that follow some others."""
    rollout: Any = None
    metrics: Any = None

    def collecting() -> None:
        nonlocal rollout
        rollout = collect(parts)

    def updating() -> None:
        nonlocal metrics
        metrics = parts.algorithm.update(rollout)

    halves = {"collecting": collecting, "updating": updating}
    for _ in range(WARM_UP):
        for half in halves.values():
            half()
    seconds = {}
    for name, half in halves.items():
        wait()
        begin = time.perf_counter()
        half()
        wait()
        seconds[name] = time.perf_counter() - begin
    profiles = {name: busy(half) for name, half in halves.items()}
    caused = {name: syncs(half) for name, half in halves.items()}
    for name, profile in profiles.items():
        idle = round(1 - profile["busy_s"] / seconds[name], 3) if CUDA else None
        found[name] = {"seconds": round(seconds[name], 4), "idle": idle, **profile}
        found[name] |= {"syncs": caused[name].total(), "sync_lines": dict(caused[name].most_common(12))}
    steps = int(metrics["train/optimizer_steps"])
    most = limits.syncs + limits.syncs_of_step * steps
    found |= {"optimizer_steps": steps, "limits": limits._asdict(), "most_syncs": most}
    if CUDA:
        found["ok"] = (
            found["collecting"]["idle"] <= limits.idle_collecting
            and found["updating"]["idle"] <= limits.idle_updating
            and found["collecting"]["syncs"] + found["updating"]["syncs"] <= most
        )


def control(kind: str) -> Any:
    cfg = control_cfg(kind, STEPS, ENVS * STEPS // 8, num_epochs=1)
    return control_parts(cfg, ENVS, speed="auto")


def text() -> Any:
    from text_speed import NEW, PROMPT, PROMPTS, algorithm_cfg, reward

    from groupwise.config.policy import SamplingCfg
    from groupwise.text.policy import CausalLM

    size = language_config().vocab_size
    policy = CausalLM(language_model(), SamplingCfg(max_new_tokens=NEW), eos_ids=(), tokenizer=word_tokenizer(size))
    return text_parts(policy, algorithm_cfg(16), prompt_texts(PROMPTS * 8, PROMPT, size), reward, PROMPTS, "auto")


def main() -> None:
    cases = {"text": text, "ppo": lambda: control("ppo"), "grpo": lambda: control("grpo")}
    for name in chosen(list(cases)[: 2 if TINY else None]):
        with case(name) as found:
            measure(found, cases[name](), LIMITS["text" if name == "text" else "control"])


if __name__ == "__main__":
    main()
