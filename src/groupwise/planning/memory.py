"""Memory of a GPU in training, in bytes."""

import math
from typing import Any, NamedTuple

from groupwise.config.algorithm import AdamCfg, GRPOCfg
from groupwise.config.run import TextRunCfg
from groupwise.functional.vocabulary import CHUNK_ELEMENTS
from groupwise.planning.sizes import ModelSizes, total_bytes, total_elements
from groupwise.planning.work import Work

_FLOAT32 = 4


class Memory(NamedTuple):
    """Bytes by what takes them."""

    kept: dict[str, float]
    """All the time."""
    passing: dict[str, dict[str, float]]
    """In one phase of a step alone, by the name of the phase."""
    host: dict[str, float]
    """All the time, in the host's memory (``cpu_offload``)."""

    @property
    def fullest(self) -> str:
        """The phase that needs most."""
        return max(self.passing, key=lambda name: sum(self.passing[name].values()))

    @property
    def peak(self) -> float:
        """What is kept, and what the fullest phase needs."""
        return sum(self.kept.values()) + sum(self.passing[self.fullest].values())


def memory_of(cfg: TextRunCfg, sizes: ModelSizes, work: Work) -> Memory:
    """The memory of one rank."""
    parts = work.ranks if work.sharded else 1
    kept = {"policy": total_bytes(sizes.weights)}
    if work.sharded:
        kept["learner"] = total_bytes(sizes.weights, parts)
    kept |= {
        "gradients": total_bytes(sizes.trained, parts),
        "optimizer state": optimizer_slots(cfg.algorithm.optimizer) * total_bytes(sizes.trained, parts),
    }
    if isinstance(cfg.algorithm, GRPOCfg) and cfg.algorithm.kl_coef > 0:
        shared = cfg.model.lora is not None  # the base; adapters are copied
        kept["reference"] = total_bytes(sizes.trained) if shared else total_bytes(sizes.weights, parts)
    host = {}
    if work.sharded and cfg.cpu_offload:
        on_gpu = {"policy"} if cfg.model.lora is None else {"policy", "reference"}
        host = {name: kept.pop(name) for name in [*kept] if name not in on_gpu}
    passing = {"update": update_bytes(cfg, sizes, work)}
    if cfg.generation.name == "native":
        passing["generation"] = generation_bytes(cfg, sizes, work)
    if work.ranks > 1 and not work.sharded:  # one exchange of all gradients
        passing["sum over ranks"] = {"gradients, in one tensor": total_bytes(sizes.trained)}
    return Memory(kept, passing, host)


def optimizer_slots(optimizer: Any) -> int:
    """Numbers that the optimiser keeps for each trained parameter."""
    if isinstance(optimizer, AdamCfg):
        return 2
    return int(optimizer.name == "rmsprop") + bool(getattr(optimizer, "momentum", 0))


def update_bytes(cfg: TextRunCfg, sizes: ModelSizes, work: Work) -> dict[str, float]:
    """What a micro-batch needs.

    Activations are what autograd keeps of the layers. With gradient checkpointing each layer keeps its input, and one layer
    at a time everything. Logits exist in chunks: three copies of one, the gradient of the head, and hidden states in float32
    with their gradient.
    """
    fixed, of_token = sizes.activations
    layers, tokens = max(len(sizes.blocks), 1), work.micro_batch
    activations = fixed + of_token * tokens
    if cfg.model.gradient_checkpointing:
        # autocast keeps the stream between layers in float32
        element = 2 if cfg.model.precision == "bfloat16" else _FLOAT32
        activations = fixed + of_token * tokens / layers + layers * tokens * sizes.width * element
    logits = 3 * CHUNK_ELEMENTS + 2 * tokens * sizes.width + (sizes.head if sizes.trains_head else 0)
    needed = {f"activations of {tokens:,} tokens": activations, "logits and gradient of the head": _FLOAT32 * logits}
    if work.sharded:  # the next layer is fetched while one computes; its gradient is whole until it is summed
        largest = max(map(total_bytes, sizes.blocks), default=0)
        needed["layers, whole for a pass"] = total_bytes(sizes.rest) + 3 * largest
    return needed


def generation_bytes(cfg: TextRunCfg, sizes: ModelSizes, work: Work) -> dict[str, float]:
    """What the model's own decoding needs: the cache of all rows, and weights laid out for its step.

    The cache is as long as the longest row. Decoding copies the layers' weights, unless adapters are between them, and the
    head in float32.
    """
    element = _FLOAT32 if cfg.model.precision == "float32" else 2
    copied = 0 if cfg.model.lora is not None else element * sizes.body
    return {
        f"cache of {work.rows:,} completions": cache_bytes(sizes, element) * work.rows * work.row,
        "weights for decoding": copied + _FLOAT32 * sizes.head,
    }


def cache_bytes(sizes: ModelSizes, element: float) -> float:
    """Bytes of a token's keys and values.

    ``2 * layers * kv_heads * head_width * bytes``. Source: Pope et al. 2022, https://arxiv.org/abs/2211.05102, section 3.3.
    """
    return sizes.kv_width * element


def rows_at_once(sizes: ModelSizes, work: Work, element: float, room: float) -> int:
    """Rows of mean length whose cache fits on a server with the weights; 0 if the weights alone do not fit."""
    of_row = cache_bytes(sizes, element) * (work.prompt + work.completion)
    return max(math.floor((room - element * total_elements([*sizes.weights])) / of_row), 0)
