"""Seconds of a step, from operations, bytes and the rates of a GPU."""

import math

from groupwise.config.generation import ServerGenerationCfg
from groupwise.config.run import TextRunCfg
from groupwise.planning.gpus import GPU, Assumptions
from groupwise.planning.memory import cache_bytes, rows_at_once
from groupwise.planning.sizes import ModelSizes, total_bytes, total_elements
from groupwise.planning.work import Work


def forward_flops(sizes: ModelSizes, context: float) -> float:
    """Operations of a token in a forward pass: ``2 * (body + head) + 4 * layers * attention_width * context``.

    Args:
        context: tokens that it attends to, in the mean; of a causal pass over a text, half of the text.

    Source: Kaplan et al. 2020, https://arxiv.org/abs/2001.08361, table 1.
    """
    return 2 * (sizes.body + sizes.head) + _attention_flops(sizes, context)


def training_flops(sizes: ModelSizes, context: float, *, recompute: bool) -> float:
    """Operations of a token in a forward and backward pass: ``6 * body`` where all is trained.

    Each trained weight takes 2 forward, 2 for the gradient of its input and 2 for its own; a frozen one lacks the last, a
    recomputed layer repeats the first. The head always repeats it. Attention takes three passes, or four.

    Source: Kaplan et al. 2020, https://arxiv.org/abs/2001.08361, section 2.1; recomputation: Korthikanti et al. 2022,
    https://arxiv.org/abs/2205.05198.
    """
    body = (4 + 2 * recompute) * sizes.body + 2 * sizes.trained_body
    head = 8 * sizes.head if sizes.trains_head else 4 * sizes.head
    return body + head + (3 + recompute) * _attention_flops(sizes, context)


def _attention_flops(sizes: ModelSizes, context: float) -> float:
    return 4 * len(sizes.blocks) * sizes.attention_width * context


def seconds_of(cfg: TextRunCfg, sizes: ModelSizes, work: Work, gpu: GPU, assumed: Assumptions) -> dict[str, float]:
    """Seconds of a step: generation, scoring, update, and what publishes the new weights. Rewards are not in it."""
    rate = _rate(cfg, gpu, assumed)
    context = (work.prompt + work.completion) / 2
    link = gpu.link if work.ranks <= assumed.per_machine else assumed.network
    share = (work.ranks - 1) / work.ranks  # of what is exchanged; a rank has its own part
    trained = total_bytes(sizes.trained)
    update = work.read * training_flops(sizes, context, recompute=cfg.model.gradient_checkpointing) / rate
    score = work.read * forward_flops(sizes, context) / rate
    if work.sharded:
        # ZeRO-3: parameters for each pass, and gradients in float32 once, all of it while others compute
        whole = share * total_bytes(sizes.weights) / link
        summed = share * 4 * total_elements(sizes.trained) / link
        update = max(update, work.micro_batches * (2 * whole + summed))
        score = max(score, work.micro_batches * whole)
    else:
        update += work.minibatches * 2 * share * trained / link  # a ring's sum
    published = share * trained / link if work.sharded else 0.0
    if isinstance(cfg.generation, ServerGenerationCfg):
        saved = trained if cfg.model.lora is not None else total_bytes(sizes.weights)
        # to a disk: written once, read by all at the same time
        published += 2 * saved / assumed.disk
    return {
        "generation": generation_seconds(cfg, sizes, work, gpu, assumed),
        "scoring": work.scorings * score,
        "update": work.epochs * update,
        "publishing": published,
    }


def generation_seconds(cfg: TextRunCfg, sizes: ModelSizes, work: Work, gpu: GPU, assumed: Assumptions) -> float:
    """Seconds to read the prompts and to write the completions.

    Each decoding step reads all weights once, and each written token reads the cache of its context. There are as many steps
    as the longest completion has tokens. The slower of memory and products counts.

    Source: Pope et al. 2022, https://arxiv.org/abs/2211.05102, section 2.
    """
    element = 4 if cfg.model.precision == "float32" else 2
    rate, bandwidth = _rate(cfg, gpu, assumed), assumed.bandwidth * gpu.bandwidth
    prompts, rows, waves, launches = float(work.prompts), float(work.rows), 1.0, 0.0
    if isinstance(cfg.generation, ServerGenerationCfg):
        servers = len(cfg.generation.urls)
        prompts, rows = prompts * work.ranks / servers, rows * work.ranks / servers
        at_once = rows_at_once(sizes, work, element, assumed.server_memory * gpu.memory)
        waves = max(rows / at_once, 1.0) if at_once else math.inf
        weights = element * (sizes.body + sizes.head)
    else:
        weights = element * sizes.body + 4 * sizes.head  # the head is in float32
        launches = work.longest * len(sizes.blocks) * assumed.operations * assumed.launch
    context = work.prompt + work.completion / 2
    written = rows * work.completion
    memory = waves * work.longest * weights + written * context * cache_bytes(sizes, element)
    products = written * forward_flops(sizes, context) / rate
    prefill = prompts * work.prompt * forward_flops(sizes, work.prompt / 2) / rate
    return prefill + max(memory / bandwidth, products, launches)


def _rate(cfg: TextRunCfg, gpu: GPU, assumed: Assumptions) -> float:
    return assumed.mfu * (gpu.float32 if cfg.model.precision == "float32" else gpu.bf16)
