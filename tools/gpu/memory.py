"""Memory that runs out in an update, in generation, and of the optimiser's state.

On a GPU the process may allocate a share of what it used before. On a CPU a tensor of more than a number of bytes cannot be made.
"""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from shared import (
    CUDA,
    DEVICE,
    TINY,
    case,
    chosen,
    collect,
    control_cfg,
    control_parts,
    gib,
    language_config,
    language_model,
    peak_bytes,
    prompt_texts,
    reset_peak,
    wait,
    word_tokenizer,
)
from text_speed import reward
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import groupwise as gw
from groupwise.config.policy import SamplingCfg
from groupwise.speed.decoding import FastDecoder
from groupwise.text.collector import TextRow, text_rollout
from groupwise.text.generation import complete
from groupwise.text.policy import CausalLM

PROMPTS, GROUP, PROMPT, NEW = (8, 8, 128, 256) if not TINY else (4, 8, 8, 32)
LEARNING = {"num_epochs": 1, "minibatch_size": None, "learning_rate": 1e-5, "objective": {"old_log_prob": "recomputed"}}


SCARCE = 0.05
"""A share that is too little for anything."""


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor, and refuses larger ones than ``most`` bytes."""

    def __init__(self, most: float = float("inf")) -> None:
        super().__init__()
        self.most, self.found = most, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                size = leaf.untyped_storage().nbytes()
                if size > self.most:
                    raise torch.OutOfMemoryError(f"a tensor of {size} bytes, at most {self.most:.0f} are allowed")
                self.found = max(self.found, size)
        return out


class Memory:
    """Limits of the memory of this process, as shares of what a computation needed."""

    def __init__(self) -> None:
        self.held = self.peak = 0
        self.least = 4 * language_config().vocab_size * language_config().hidden_size
        """Bytes of the largest weight in float32, which no tensor of a smaller batch undercuts."""

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure what the block needs above what is held before it."""
        reset_peak()
        if CUDA:
            self.held = torch.cuda.memory_allocated()
            yield
            self.peak = peak_bytes()
        else:
            with Largest() as largest:
                yield
            self.peak = largest.found

    @contextmanager
    def limited(self, share: float) -> Iterator[None]:
        """Allow the block that share of what was measured."""
        reset_peak()
        most = self.held + share * (self.peak - self.held)
        if not CUDA:
            with Largest(most if share < SCARCE else max(most, self.least)):
                yield
            return
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total))
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


class Said(logging.Handler):
    """Keeps the warnings of groupwise."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


SAID = Said()
logging.getLogger("groupwise").addHandler(SAID)


def language_policy() -> CausalLM:
    return CausalLM(language_model(), SamplingCfg(max_new_tokens=NEW), eos_ids=())


def text_update(**settings: Any) -> tuple[gw.GRPO, Any]:
    """An algorithm, and a rollout whose tokens were drawn at random."""
    size, generator = language_config().vocab_size, torch.Generator().manual_seed(0)
    rows = []
    for number in range(PROMPTS):
        prompt = torch.randint(4, size, (PROMPT,), generator=generator).tolist()
        for member in range(GROUP):
            completion = torch.randint(4, size, (NEW,), generator=generator).tolist()
            rows.append(TextRow(prompt, completion, [-11.0] * NEW, float(member % 3), False, number))
    cfg = gw.GRPOCfg(group_size=GROUP, **LEARNING | settings)
    return gw.GRPO(cfg, language_policy()), text_rollout(rows).to(DEVICE)


def norm(metrics: dict[str, float]) -> float:
    return metrics["train/grad_norm"]


def advice(error: BaseException) -> str:
    """The error with its notes, in one line."""
    return " | ".join([" ".join(str(error).split())[-300:], *getattr(error, "__notes__", ())])


def update(found: dict[str, Any]) -> None:
    """An update of texts with a half and a third of its memory: smaller micro-batches and the same gradient."""
    memory = Memory()
    algorithm, rollout = text_update(optimizer={"name": "sgd"})
    with memory.measured():
        whole = norm(algorithm.update(rollout.clone()))
    found |= {"whole_gib": gib(memory.peak), "grad_norm": whole, "shares": {}}
    for share in (0.6, 0.35):
        algorithm, rollout = text_update(optimizer={"name": "sgd"})
        with memory.limited(share):
            limited = norm(algorithm.update(rollout.clone()))
            wait()
        difference = abs(limited - whole) / whole
        halvings = algorithm.micro_batches.halvings
        found["shares"][share] = {"halvings": halvings, "difference": difference, "peak_gib": gib(peak_bytes())}
    found["said"] = SAID.lines[-1:]
    found["ok"] = all(one["halvings"] and one["difference"] < 0.01 for one in found["shares"].values())


def control(found: dict[str, Any]) -> None:
    """An update of control with half of its memory, from a rollout of many rows."""
    count, steps = (16384, 64) if not TINY else (1024, 16)
    parts = control_parts(control_cfg("ppo", steps, None, num_epochs=1, optimizer={"name": "sgd"}), count)
    rollout, memory = collect(parts).clone(), Memory()
    with memory.measured():
        whole = norm(parts.algorithm.update(rollout.clone()))
    parts = control_parts(control_cfg("ppo", steps, None, num_epochs=1, optimizer={"name": "sgd"}), count)
    with memory.limited(0.7):
        limited = norm(parts.algorithm.update(rollout.clone()))
    found |= {"grad_norm": whole, "difference": abs(limited - whole) / whole, "whole_gib": gib(memory.peak)}
    found["halvings"] = parts.algorithm.micro_batches.halvings
    found["ok"] = found["halvings"] > 0 and found["difference"] < 1e-4


def generation(found: dict[str, Any]) -> None:
    """Generation with a part of its memory: fewer rows at once; with next to none: an error with advice."""
    policy, memory = language_policy(), Memory()
    policy.decoder, policy.sampling = FastDecoder(), SamplingCfg(max_new_tokens=NEW // 4)
    prompts = [[5 + number] * PROMPT for number in range(4 * PROMPTS)]
    seeds = torch.arange(len(prompts) * GROUP).view(len(prompts), GROUP)
    with memory.measured():
        whole = complete(policy, prompts, seeds)
    found |= {"whole_gib": gib(memory.peak), "rows": seeds.numel()}
    with memory.limited(0.6):
        fewer = complete(policy, prompts, seeds)
    pairs = [(a, b) for one, other in zip(whole, fewer, strict=True) for a, b in zip(one, other, strict=True)]
    found["same_first_tokens"] = sum(a.tokens[0] == b.tokens[0] for a, b in pairs) / len(pairs)
    found["said"] = SAID.lines[-1:]
    try:
        with memory.limited(SCARCE / 2):
            complete(policy, prompts, seeds)
    except (torch.OutOfMemoryError, MemoryError) as error:
        found["error_says"] = advice(error)
    # in bfloat16, rounding in another batch changes some tokens
    found["ok"] = found["same_first_tokens"] > 0.9 and "fix:" in found.get("error_says", "")


def optimizer(found: dict[str, Any]) -> None:
    """The state of Adam that does not fit: an error with advice."""
    size, memory = language_config().vocab_size, Memory()
    sampling, tokenizer = SamplingCfg(max_new_tokens=8), word_tokenizer(size)
    policy = CausalLM(language_model(), sampling, eos_ids=(), tokenizer=tokenizer)

    class Scarce(gw.Callback):
        def on_training_start(self, trainer: Any) -> None:
            self.inside = trainer.algorithm.optimizer.step
            trainer.algorithm.optimizer.step = self.step

        def step(self, *args: Any, **options: Any) -> Any:
            with memory.limited(SCARCE / 2):
                if CUDA:  # gradients are there: next to nothing is left for the state
                    total = torch.cuda.get_device_properties(0).total_memory
                    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 2**27) / total)
                return self.inside(*args, **options)

    task = gw.TextTask([{"prompt": text} for text in prompt_texts(8, PROMPT, size)], reward=reward, chat="never")
    settings = {"policy": policy, "num_prompts": 2, "device": DEVICE, "total_iterations": 2, "callbacks": [Scarce()]}
    settings |= {"evaluation": {"interval": 10**12}, "logging": {"progress": "none"}}
    try:
        with tempfile.TemporaryDirectory() as folder:
            gw.train(task, gw.GRPOCfg(group_size=GROUP, **LEARNING), run_dir=Path(folder, "run"), **settings)
        found["trained"] = True
    except (torch.OutOfMemoryError, MemoryError) as error:
        found["error_says"] = advice(error)
    found["ok"] = "fix:" in found.get("error_says", "")


def main() -> None:
    torch.set_num_threads(1)
    cases = {"update": update, "control": control, "generation": generation, "optimizer": optimizer}
    for name in chosen(list(cases)):
        with case(name) as found:
            cases[name](found)


if __name__ == "__main__":
    main()
