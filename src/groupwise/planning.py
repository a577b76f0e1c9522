"""GPU memory that a run on texts will need, by its settings and the model's config. No weights are loaded."""

import functools
import math
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from groupwise.config.algorithm import AdamCfg
from groupwise.config.load import ADAPTER_CONFIG, merge
from groupwise.config.policy import ModelCfg
from groupwise.config.run import TextRunCfg
from groupwise.errors import ConfigError
from groupwise.text.load import failures, find_model, with_adapters
from groupwise.text.policy import decoder_layers
from groupwise.text.vocabulary import CHUNK_ELEMENTS

GPUS = {"a100": 80e9, "h100": 80e9, "h200": 141e9, "b200": 180e9, "l40s": 48e9, "rtx4090": 24e9}
"""Bytes by the name that ``groupwise plan --gpu`` takes."""
USABLE = 0.9
"""Share of the memory that tensors may take, as CUDA and gaps between tensors need some."""
_QUANTIZED = {"nf4": 0.5 + 4 / 64, "int8": 1.0}
"""Bytes of a weight. nf4 has a number in float32 for each block of 64."""
_PROBE = 16
"""Tokens of the rows that activations are counted on: so few that the mask, which a GPU's kernels do without, weighs little."""


class Weight(NamedTuple):
    """One parameter."""

    shape: tuple[int, ...]
    element_bytes: float
    trained: bool

    def part(self, ranks: int) -> int:
        """Elements of the largest part where ranks divide it: FSDP2 cuts the first dimension."""
        return math.ceil(self.shape[0] / ranks) * math.prod(self.shape[1:])


class ModelSizes(NamedTuple):
    """Sizes of a model that its memory depends on."""

    name: str
    blocks: tuple[tuple[Weight, ...], ...]
    """The layers that a model repeats."""
    rest: tuple[Weight, ...]
    """Embeddings, norms and head."""
    body: int
    """Weights that each token is multiplied with, without the head."""
    head: int
    """Weights of the output embeddings: vocabulary times width."""
    trains_head: bool
    width: int
    kv_width: int
    """Numbers that a token adds to the cache of keys and values: ``2 * layers * kv_heads * head_width`` (https://arxiv.org/abs/2211.05102, section 3.3)."""
    activations: tuple[float, float]
    """Bytes that the layers keep for the backward pass: a constant part, and a part per token."""

    @property
    def weights(self) -> list[Weight]:
        """All parameters; tied ones once."""
        return [*self.rest, *(weight for block in self.blocks for weight in block)]

    @property
    def trained(self) -> list[Weight]:
        """Trained parameters."""
        return [weight for weight in self.weights if weight.trained]


class Plan(NamedTuple):
    """Bytes that a run needs on each GPU, by purpose."""

    cfg: TextRunCfg
    ranks: int
    gpu: float
    """Memory of a GPU."""
    sizes: ModelSizes
    prompt: int
    """Tokens of a prompt."""
    completion: int
    """Tokens of the longest completion."""
    rows: int
    """Completions of a rank in a step."""
    row: int
    """Tokens of the longest prompt with the longest completion."""
    kept: dict[str, float]
    """Bytes that are needed all the time."""
    passing: dict[str, dict[str, float]]
    """Bytes that only one phase of a step needs, by the name of the phase."""
    host: dict[str, float]
    """All the time, in the host's memory (``cpu_offload``)."""

    @property
    def fullest(self) -> str:
        """The phase that needs most."""
        return max(self.passing, key=lambda name: sum(self.passing[name].values()))

    @property
    def peak(self) -> float:
        """Memory of everything that is kept and of the fullest phase."""
        return sum(self.kept.values()) + sum(self.passing[self.fullest].values())

    @property
    def parameters(self) -> dict[str, int]:
        """Numbers of all parameters, and of those that are trained."""
        return {
            "all": sum(w.part(1) for w in self.sizes.weights),
            "trained": sum(w.part(1) for w in self.sizes.trained),
        }

    @property
    def room(self) -> float:
        """Bytes that tensors may take."""
        return USABLE * self.gpu

    @property
    def fits(self) -> bool:
        """Whether there is room for the peak."""
        return self.peak <= self.room


def plan_run(cfg: TextRunCfg, gpus: int, gpu: float, prompt: int) -> Plan:
    """The plan of a run with one process on each of ``gpus``. Servers, if any, have GPUs of their own.

    Args:
        gpu: bytes of one.
        prompt: tokens of a prompt. ``task.max_prompt_tokens`` counts where it is larger.
    """
    algorithm, sizes = cfg.algorithm, sizes_of(cfg.model)
    completion = (cfg.task.max_turns if cfg.task.has_env else 1) * cfg.sampling.max_new_tokens
    row = max(cfg.task.max_prompt_tokens or 0, prompt) + completion
    rows = cfg.num_prompts * algorithm.groups.size
    parts = gpus if cfg.engine == "fsdp" else 1
    kept = {"policy": total_bytes(sizes.weights)}
    if parts > 1:
        kept["learner"] = total_bytes(sizes.weights, parts)
    optimizer: Any = algorithm.optimizer
    momenta = int(optimizer.name == "rmsprop") + bool(getattr(optimizer, "momentum", 0))
    kept["gradients"] = total_bytes(sizes.trained, parts)
    kept["optimizer state"] = (2 if isinstance(optimizer, AdamCfg) else momenta) * kept["gradients"]
    if algorithm.has_reference:
        shared = cfg.model.lora is not None and parts == 1  # the base; adapters are copied
        kept["reference"] = total_bytes(sizes.trained) if shared else total_bytes(sizes.weights, parts)
    host = {}
    if parts > 1 and cfg.cpu_offload:
        host = {name: kept.pop(name) for name in [*kept] if name != "policy"}

    size = algorithm.minibatch_size
    minibatches = 1 if size is None else max(1, round(gpus * rows * completion / size))
    whole = math.ceil(rows / minibatches) * row
    tokens = min(max(algorithm.micro_batch_size or whole, row), whole)  # of a micro-batch
    (fixed, of_token), layers = sizes.activations, len(sizes.blocks)
    activations = fixed + of_token * tokens
    if cfg.model.gradient_checkpointing:  # each layer keeps its input (autocast: float32), and one at a time all
        stream = 2 if cfg.model.precision == "bfloat16" else 4
        activations = fixed + of_token * tokens / layers + layers * tokens * sizes.width * stream
    # logits exist in chunks, three copies of one; hidden states and their gradient are in float32
    chunk = min(CHUNK_ELEMENTS[True], tokens * sizes.head // sizes.width)
    logits = 3 * chunk + 2 * tokens * sizes.width + (sizes.head if sizes.trains_head else 0)
    update = {f"activations of {tokens:,} tokens": activations, "logits and gradient of the head": 4 * logits}
    if parts > 1:  # the next layer is fetched while one computes; its gradient is whole until it is summed
        update["layers, whole for a pass"] = total_bytes(sizes.rest) + 3 * max(map(total_bytes, sizes.blocks))
    passing = {"update": update}
    if cfg.generation.name == "native":  # decoding copies the layers, unless adapters are between them, and the head
        element = 4 if cfg.model.precision == "float32" else 2
        passing["generation"] = {
            f"cache of {rows:,} completions": element * sizes.kv_width * rows * row,
            "weights for decoding": (0 if cfg.model.lora else element * sizes.body) + 4 * sizes.head,
        }
    if gpus > parts:  # one exchange of all gradients
        passing["sum over ranks"] = {"gradients, in one tensor": total_bytes(sizes.trained)}
    return Plan(cfg, gpus, gpu, sizes, prompt, completion, rows, row, kept, passing, host)


def fixes(plan: Plan) -> dict[str, float]:
    """Options with which the run fits, and the peak that is left; each by itself. Empty: none is enough alone."""
    half = "autocast" if plan.cfg.model.lora is None else "bfloat16"  # in which trained weights lose small steps
    options: dict[str, dict[str, Any]] = {
        f"--algorithm.micro-batch-size {plan.row}": {"algorithm": {"micro_batch_size": plan.row}},
        f"--model.precision {half}": {"model": {"precision": half}},
        "--model.gradient-checkpointing": {"model": {"gradient_checkpointing": True}},
        "--engine fsdp": {"engine": "fsdp"},
        "--generation server": {"generation": "server"},
        "--engine fsdp --cpu-offload": {"engine": "fsdp", "cpu_offload": True},
        "--model.lora.r 16": {"model": {"lora": {"r": 16}}},
    }
    settings, found = plan.cfg.model_dump(), dict[str, float]()
    for option, changed in options.items():
        with suppress(ConfigError):  # it does not go with the other settings
            other = plan_run(TextRunCfg(**merge(settings, changed)), plan.ranks, plan.gpu, plan.prompt)
            found |= {option: other.peak} if other.fits else {}
    return found


@functools.lru_cache
def sizes_of(cfg: ModelCfg) -> ModelSizes:
    """The sizes of the model that ``cfg`` describes.

    Raises:
        ConfigError: no such model, or one that is not planned: a mixture of experts, no transformer, or saved adapters.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = find_model(cfg.path)
    if (Path(path) / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"{path} has adapters alone; fix: model.path of their base, and model.lora with their rank")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except failures() as error:
        raise ConfigError(f"{path} has no config that transformers reads: {error}; fix: a model's folder") from None
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError(f"{path} is a mixture of experts; plan knows dense models only; fix: a dense model")
    if getattr(text, "num_attention_heads", None) is None:
        raise ConfigError(f"{path} is a model without attention; plan knows transformers only; fix: a transformer")
    with torch.device("meta"):
        dtype = torch.bfloat16 if cfg.precision == "bfloat16" else torch.float32
        try:
            network: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        except failures() as error:
            raise ConfigError(f"{path} has a config of no language model: {error}; fix: a model's folder") from None
        if cfg.lora is not None:
            adapted: Any = with_adapters(network, cfg.lora)
            network = adapted.get_base_model()
    with FakeTensorMode():
        _leave_meta(network)
        one, two = (_saved_bytes(network.base_model, rows, cfg.precision == "autocast") for rows in (1, 2))
    layers, head = decoder_layers(network), network.get_output_embeddings().weight
    matrices = (module for module in network.modules() if not isinstance(module, nn.Embedding))
    products = {id(p) for module in matrices for p in module.parameters(recurse=False) if p.dim() == 2} - {id(head)}
    of_layers = {id(weight) for layer in layers for weight in layer.parameters()}
    heads = text.num_attention_heads
    head_width = getattr(text, "head_dim", None) or text.hidden_size // heads

    def weigh(parameters: Iterable[nn.Parameter]) -> tuple[Weight, ...]:
        small = _QUANTIZED.get(cfg.quantization, 0.0)
        sized = [(p, small if id(p) in products and not p.requires_grad else 0.0) for p in parameters]
        return tuple(Weight(tuple(p.shape), size or p.element_size(), p.requires_grad) for p, size in sized)

    return ModelSizes(
        name=type(network).__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel"),
        blocks=tuple(weigh(layer.parameters()) for layer in layers),
        rest=weigh(weight for weight in network.parameters() if id(weight) not in of_layers),
        body=sum(weight.numel() for weight in network.parameters() if id(weight) in products),
        head=head.numel(),
        trains_head=head.requires_grad,
        width=text.hidden_size,
        kv_width=2 * len(layers) * (getattr(text, "num_key_value_heads", None) or heads) * head_width,
        activations=(2 * one - two, (two - one) / _PROBE),
    )


def _leave_meta(network: nn.Module) -> None:
    """Put tensors of a CPU in the place of those on the meta device, on which attention takes another path."""
    made: dict[int, nn.Parameter | Tensor] = {}  # tied parameters are one
    for module in network.modules():
        for name, old in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            new: Any = torch.empty(old.shape, dtype=old.dtype, device="cpu")
            new = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
            setattr(module, name, made.setdefault(id(old), new))


def _saved_bytes(base: nn.Module, rows: int, autocast: bool) -> int:
    """Bytes that autograd keeps of a forward pass, without parameters and buffers; each storage once."""

    def storage(tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    own = {storage(tensor) for tensor in (*base.parameters(), *base.buffers())}
    saved: dict[int, tuple[Tensor, int]] = {}  # they stay alive, so that no number is used twice

    def pack(tensor: Tensor) -> Tensor:
        if (key := storage(tensor)) not in own:
            saved[key] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    cast = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with saved_tensors_hooks(pack, lambda tensor: tensor), cast:
        base(input_ids=torch.zeros(rows, _PROBE, dtype=torch.long), use_cache=False)
    return sum(size for _, size in saved.values())


def total_bytes(weights: Iterable[Weight], ranks: int = 1) -> float:
    """Bytes of the parameters, or of the largest part of them where ranks divide each."""
    return sum(weight.part(ranks) * weight.element_bytes for weight in weights)
