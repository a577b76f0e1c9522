"""The sizes of a language model by its config: no weights are loaded, and none are in memory."""

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from groupwise.config.load import ADAPTER_CONFIG
from groupwise.config.policy import ModelCfg
from groupwise.errors import ConfigError
from groupwise.text.layers import decoder_layers
from groupwise.text.load import find_model, with_adapters

_QUANTIZED = {"nf4": 0.5 + 4 / 64, "int8": 1.0}
"""Bytes of a weight. nf4 has a number in float32 for each block of 64."""
_PROBE = 16
"""Tokens of the rows that activations are counted on: so few that the mask, which a GPU's kernels do without, weighs little."""


class Weight(NamedTuple):
    """One parameter."""

    shape: tuple[int, ...]
    element_bytes: float
    trained: bool

    @property
    def elements(self) -> int:
        """Of the whole parameter."""
        return math.prod(self.shape)

    def part(self, ranks: int) -> int:
        """Elements of the largest part where ranks divide it: FSDP2 cuts the first dimension."""
        return math.ceil(self.shape[0] / ranks) * math.prod(self.shape[1:])


class ModelSizes(NamedTuple):
    """What memory and time depend on."""

    name: str
    blocks: tuple[tuple[Weight, ...], ...]
    """The layers that a model repeats."""
    rest: tuple[Weight, ...]
    """Embeddings, norms and head."""
    body: int
    """Weights that each token is multiplied with, without the head."""
    trained_body: int
    head: int
    """Weights of the output embeddings: vocabulary times width."""
    trains_head: bool
    width: int
    attention_width: int
    """Heads times their width."""
    kv_width: int
    """Numbers that a token adds to the cache of keys and values, in all layers."""
    activations: tuple[float, float]
    """Bytes that the layers keep for the backward pass: whatever the batch, and for each token."""

    @property
    def weights(self) -> Iterator[Weight]:
        """All parameters; tied ones once."""
        yield from self.rest
        for block in self.blocks:
            yield from block

    @property
    def trained(self) -> list[Weight]:
        """Trained parameters."""
        return [weight for weight in self.weights if weight.trained]


def sizes_of(cfg: ModelCfg) -> ModelSizes:
    """The sizes of the model that ``cfg`` describes.

    Raises:
        ConfigError: no such model, or one that is not planned: a mixture of experts, or saved adapters.
    """
    # recomputation changes no size, and has a formula of its own
    return _measured(cfg.model_copy(update={"gradient_checkpointing": False}))


@functools.lru_cache
def _measured(cfg: ModelCfg) -> ModelSizes:
    from transformers import AutoConfig, AutoModelForCausalLM

    path = find_model(cfg.path)
    if (Path(path) / ADAPTER_CONFIG).is_file():
        raise ConfigError(f"{path} has adapters alone; fix: model.path of their base, and model.lora with their rank")
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} has no config that transformers reads: {error}; fix: a model's folder") from None
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError(f"{path} is a mixture of experts; plan knows dense models only; fix: a dense model")
    with torch.device("meta"):
        dtype = torch.bfloat16 if cfg.precision == "bfloat16" else torch.float32
        network: Any = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        if cfg.lora is not None:
            adapted: Any = with_adapters(network, cfg.lora)
            network = adapted.get_base_model()
    with FakeTensorMode():
        _leave_meta(network)
        one, two = (_saved_bytes(network.base_model, rows, cfg.precision == "autocast") for rows in (1, 2))
    layers, head = decoder_layers(network), network.get_output_embeddings().weight
    products = {id(weight) for weight in _products(network)} - {id(head)}
    of_layers = {id(weight) for layer in layers for weight in layer.parameters()}
    heads, head_width = text.num_attention_heads, getattr(text, "head_dim", None)
    head_width = head_width or text.hidden_size // heads
    body = [weight for weight in network.parameters() if id(weight) in products]
    weigh = functools.partial(_weights, quantized=_QUANTIZED.get(cfg.quantization), products=products)
    return ModelSizes(
        name=type(network).__name__.removesuffix("ForCausalLM").removesuffix("LMHeadModel"),
        blocks=tuple(weigh(layer.parameters()) for layer in layers),
        rest=weigh(weight for weight in network.parameters() if id(weight) not in of_layers),
        body=sum(weight.numel() for weight in body),
        trained_body=sum(weight.numel() for weight in body if weight.requires_grad),
        head=head.numel(),
        trains_head=head.requires_grad,
        width=text.hidden_size,
        attention_width=heads * head_width,
        kv_width=2 * len(layers) * (getattr(text, "num_key_value_heads", None) or heads) * head_width,
        activations=(2 * one - two, (two - one) / _PROBE),
    )


def _leave_meta(network: nn.Module) -> None:
    """Put tensors of a CPU in the place of those on the meta device, on which attention takes another path."""
    made: dict[int, nn.Parameter | Tensor] = {}  # tied parameters are one
    for module in network.modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, old in tensors:
            new: Any = torch.empty(old.shape, dtype=old.dtype, device="cpu")
            new = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
            setattr(module, name, made.setdefault(id(old), new))


def _products(network: nn.Module) -> Iterator[nn.Parameter]:
    """Matrices that every token is multiplied with."""
    for module in network.modules():
        if not isinstance(module, nn.Embedding):
            yield from (weight for weight in module.parameters(recurse=False) if weight.dim() == 2)


def _weights(parameters: Iterable[nn.Parameter], quantized: float | None, products: set[int]) -> tuple[Weight, ...]:
    def element_bytes(parameter: nn.Parameter) -> float:
        is_quantized = quantized is not None and id(parameter) in products and not parameter.requires_grad
        return quantized if is_quantized and quantized is not None else parameter.element_size()

    return tuple(Weight(tuple(p.shape), element_bytes(p), p.requires_grad) for p in parameters)


def _saved_bytes(base: nn.Module, rows: int, autocast: bool) -> int:
    """Bytes that autograd keeps of a forward pass, without parameters and buffers; each storage once."""
    own = {_storage(tensor) for tensor in (*base.parameters(), *base.buffers())}
    saved: dict[int, tuple[Tensor, int]] = {}  # they stay alive, so that no number is used twice

    def pack(tensor: Tensor) -> Tensor:
        if (key := _storage(tensor)) not in own:
            saved[key] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    cast = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with saved_tensors_hooks(pack, lambda tensor: tensor), cast:
        base(input_ids=torch.zeros(rows, _PROBE, dtype=torch.long), use_cache=False)
    return sum(size for _, size in saved.values())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def total_bytes(weights: Iterable[Weight], ranks: int = 1) -> float:
    """Bytes of the parameters, or of the largest part of them where ranks divide each."""
    return sum(weight.part(ranks) * weight.element_bytes for weight in weights)


def total_elements(weights: Sequence[Weight]) -> int:
    """Elements of the parameters."""
    return sum(weight.elements for weight in weights)
