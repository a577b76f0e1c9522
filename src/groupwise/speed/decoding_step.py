"""One token of each row through a model of the Llama shape, without what its modules do around their arithmetic.

The shape: root mean square norms, rotary positions, attention of grouped queries, a gated perceptron (Llama, SmolLM,
Mistral, Qwen2, Qwen3). transformers computes the same, and reads the prompts; ``FastDecoder`` compares the two.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers.cache_utils import DynamicLayer

from groupwise.errors import SlowPathWarning
from groupwise.policies.base import has_hooks
from groupwise.speed.cpu_attention import attend, autocast_off
from groupwise.text.generation import Decoder, Head, Prompts, Step, TransformersStep
from groupwise.text.policy import CausalLM

_Map = Callable[[Tensor], Tensor]

PACKED = 2**18
"""Weights in a matrix from which on it pays to lay them out anew."""
ROOM = 64
"""Tokens that a cache grows by."""
_BATCH = 32
"""Rows that the layout is chosen for; it serves any other number."""
_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose angles do not depend on how long the text is."""


class FastDecoder(Decoder):
    """Reads tokens by ``LlamaStep`` where the model has its shape, once that has been seen to agree with its modules."""

    def __init__(self) -> None:
        self.reads_by: Literal["untried", "own step", "modules"] = "untried"

    def context(self, policy: CausalLM) -> AbstractContextManager:
        """``inference_mode``, a sixth less time for a small model; hooks and unknown modules may keep tensors for training."""
        known = self.reads_by == "own step" and not has_hooks(policy.network)
        return torch.inference_mode() if known else torch.no_grad()

    def head(self, policy: CausalLM) -> Head:
        """The output embeddings, laid out for the processor."""
        product = linear_map(policy.head.float())

        def logits(hidden: Tensor) -> Tensor:
            with autocast_off(hidden.device.type):
                return product(hidden.float())

        return logits

    def step(self, policy: CausalLM, prompts: Prompts, token: Int[Tensor, " row"], head: Head) -> Step:
        """The step that extends the rows, whose first tokens are ``token``.

        Warns:
            SlowPathWarning: the model computes something else, so that its modules read from now on.
        """
        if self.reads_by == "modules" or not has_llama_shape(policy.network, prompts.cache):
            return TransformersStep(policy, prompts)
        if self.reads_by == "untried":
            off = _difference(policy, prompts, token, head)
            self.reads_by = "own step" if off <= policy.rounding else "modules"
            if self.reads_by == "modules":
                warnings.warn(
                    f"{type(policy.network).__name__} decodes through its own modules (no fast step): log-probabilities of our "
                    f"own step differ by {off:.2g}, at most {policy.rounding} is rounding",
                    SlowPathWarning,
                    stacklevel=4,
                )
                return TransformersStep(policy, prompts)
        return LlamaStep(policy, prompts)


def _difference(policy: CausalLM, prompts: Prompts, token: Tensor, head: Head) -> float:
    """Root mean square difference of log-probabilities between the two steps behind the same prompts."""
    steps = (LlamaStep(policy, prompts), TransformersStep(policy, prompts._replace(cache=deepcopy(prompts.cache))))
    own, theirs = (head(step(token)).log_softmax(dim=-1) for step in steps)
    return float((own - theirs).square().mean().sqrt())


def has_llama_shape(network: Any, cache: Any) -> bool:
    """Whether ``LlamaStep`` knows all parts of the model, and its cache holds the keys and values of every token."""
    family = next((name for name in _FAMILIES if type(network).__name__ == f"{name}ForCausalLM"), None)
    if family is None or network.config.rope_parameters["rope_type"] not in _ROPES:
        return False
    base = network.base_model
    expected = {base: "Model", base.norm: "RMSNorm", base.rotary_emb: "RotaryEmbedding"}
    for layer in base.layers:
        expected |= {layer: "DecoderLayer", layer.self_attn: "Attention", layer.mlp: "MLP"}
        expected |= {layer.input_layernorm: "RMSNorm", layer.post_attention_layernorm: "RMSNorm"}
    # Mistral has taken its positions from Llama
    known = all(type(module).__name__ in (family + name, "Llama" + name) for module, name in expected.items())
    return known and all(type(layer) is DynamicLayer for layer in cache.layers)


class _Layer(NamedTuple):
    """What a layer computes with."""

    norm: _Map
    qkv: _Map
    """Queries, keys and values of all heads, one after the other."""
    head_norm: _Map | None
    """Of queries and keys."""
    out: _Map
    mlp_norm: _Map
    gate_up: _Map
    act: _Map
    down: _Map


class LlamaStep(Step):
    """Extends each row by one token.

    Weights are taken over when it is made: make one for each call that generates.
    """

    def __init__(self, policy: CausalLM, prompts: Prompts) -> None:
        base, cached = policy.network.base_model, prompts.cache.layers
        valid, most = prompts.valid.repeat_interleave(prompts.group_size, dim=0), prompts.max_new_tokens
        self._embed, self._norm = base.embed_tokens, _norm(base.norm)
        self._layers = [_layer(policy, layer) for layer in base.layers]
        self._head_width, self._groups = cached[0].keys.shape[-1], cached[0].keys.shape[1]
        # where heads share their keys, plain products on a CPU take half the time of PyTorch's own kernel
        shared = base.config.num_attention_heads > self._groups and policy.device.type == "cpu"
        self._attend = attend if shared else functional.scaled_dot_product_attention
        self._stores = [_store(layer, prompts.group_size) for layer in cached]
        self._length, self._rows = valid.shape[1], len(valid)
        self._slots: Tensor | None = None  # the places of the rows in the caches, once they are in another order
        self._position = valid.sum(dim=1)
        self._rotary = self._angles(base.rotary_emb, self._length + most)
        self._mask = self._additive(valid, most)

    def __call__(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row width"]:
        """The last hidden state of each row, after its token."""
        if self._slots is not None:
            token = torch.empty_like(token).index_copy_(0, self._slots, token)
        self._grow()
        mask = None if self._mask is None else self._mask[: self._rows, :, :, : self._length + 1]
        hidden = self._hidden(token, mask)
        self._length, self._position = self._length + 1, self._position + 1
        return hidden if self._slots is None else hidden[self._slots]

    def keep(self, kept: Bool[Tensor, " row"]) -> None:
        """Drop the other rows: the last ones of the caches move into their places."""
        slots = kept.nonzero()[:, 0] if self._slots is None else self._slots[kept]
        count = self._rows = len(slots)
        free = torch.ones_like(kept).index_fill_(0, slots, False)[:count].nonzero()[:, 0]
        moved = (slots >= count).nonzero()[:, 0]
        source = slots[moved]
        if len(free):
            masks = [] if self._mask is None else [self._mask]
            for rows in (*(half for store in self._stores for half in store), self._position, *masks):
                rows[free] = rows[source]
        self._position = self._position[:count]
        self._slots = slots.index_copy(0, moved, free)

    def _hidden(self, token: Int[Tensor, " row"], mask: Tensor | None) -> Float[Tensor, "row width"]:
        """Last hidden states of rows as the caches have them, their tokens written to the caches."""
        with autocast_off(token.device.type):
            hidden = self._embed(token)
            cos, sin = self._rotary[self._position].unbind(1)
            for layer, store in zip(self._layers, self._stores, strict=True):
                hidden = hidden + self._attention(layer, store, layer.norm(hidden), (cos, sin), mask)
                gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
                hidden = hidden + layer.down(layer.act(gate) * up)
            return self._norm(hidden)

    def _attention(
        self, layer: _Layer, store: Tensor, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Float[Tensor, "row width"]:
        qkv = layer.qkv(x).view(self._rows, -1, self._head_width)
        qk, value = qkv.tensor_split([-self._groups], dim=1)
        if layer.head_norm is not None:
            qk = layer.head_norm(qk)
        qk = torch.addcmul(qk * rotary[0], qk.roll(self._head_width // 2, dims=-1), rotary[1])
        query, key = qk.tensor_split([-self._groups], dim=1)
        keys, values = self._extended(store, key, value)
        # queries that share their keys are as good as a row of queries to one head
        query = query.reshape(self._rows, self._groups, -1, self._head_width).to(store.dtype)
        found = self._attend(query, keys, values, mask)
        return layer.out(found.reshape(self._rows, -1).to(value.dtype))

    def _extended(self, store: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, the new ones written behind the others."""
        keys, values = store[:, : self._rows, :, : self._length + 1].unbind(0)
        keys[:, :, -1], values[:, :, -1] = key, value
        return keys, values

    def _grow(self) -> None:
        if self._length < self._stores[0].shape[3]:
            return
        for number, store in enumerate(self._stores):
            shape = (2, self._rows, self._groups, self._length + ROOM, self._head_width)
            grown = self._stores[number] = store.new_empty(shape)
            grown[:, :, :, : self._length] = store[:, : self._rows]

    def _angles(self, rotary: Any, count: int) -> Float[Tensor, "position 2 1 width"]:
        """Cosine and sine of each position; the sine with the sign that its half of a head takes."""
        places = torch.arange(count, device=self._position.device)[None]
        cos, sin = rotary(self._embed(places[:, :1]), places)
        half = self._head_width // 2
        return torch.stack([cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)], dim=1)[:, :, None]

    def _additive(self, valid: Tensor, most: int) -> Float[Tensor, "row 1 1 context"] | None:
        """What is added to the scores of each place, in the prompts and behind them; None where that is 0 everywhere."""
        if bool(valid.all()):
            return None
        mask = torch.zeros(len(valid), valid.shape[1] + most, device=valid.device, dtype=self._stores[0].dtype)
        mask[:, : valid.shape[1]].masked_fill_(~valid, -torch.inf)
        return mask[:, None, None]


def _layer(policy: CausalLM, layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        norm=_norm(layer.input_layernorm),
        qkv=_linear(policy, attention.q_proj, attention.k_proj, attention.v_proj),
        head_norm=_head_norm(attention) if type(attention).__name__ == "Qwen3Attention" else None,
        out=_linear(policy, attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_linear(policy, mlp.gate_proj, mlp.up_proj),
        act=mlp.act_fn,
        down=_linear(policy, mlp.down_proj),
    )


def _norm(module: Any) -> _Map:
    return _root_mean_square(module.weight, module.variance_epsilon)


def _head_norm(attention: Any) -> _Map:
    """Of all heads of queries and keys at once."""
    heads = [attention.q_norm.weight] * attention.config.num_attention_heads
    weight = torch.stack(heads + [attention.k_norm.weight] * attention.config.num_key_value_heads)
    return _root_mean_square(weight, attention.q_norm.variance_epsilon)


def _root_mean_square(weight: Float[Tensor, "*head width"], epsilon: float) -> _Map:
    """Of inputs, each over its root mean square, times the weight."""
    width = weight.shape[-1]
    scaled, root = weight.float() * math.sqrt(width), torch.tensor(width * epsilon, device=weight.device).sqrt()

    def norm(x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and x.device.type == "cpu":  # where `rms_norm` takes twice as long
            return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), root) * scaled
        # rounded before the weight comes to it, as in transformers
        return functional.rms_norm(x, x.shape[-1:], eps=epsilon) * weight

    return norm


def _linear(policy: CausalLM, *modules: Any) -> _Map:
    """Outputs of all the modules, one after the other: as one product where they are plain."""
    biases = [module.bias for module in modules if module.bias is not None]
    if not all(_is_plain(module) for module in modules) or len(biases) not in (0, len(modules)):
        return lambda x: _called(policy, modules, x)
    dtype = policy.autocast or modules[0].weight.dtype
    weight = torch.cat([module.weight.to(dtype) for module in modules])
    product = linear_map(weight, torch.cat(biases).to(dtype) if biases else None)
    return product if policy.autocast is None else lambda x: product(x.to(dtype))


def linear_map(weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None) -> _Map:
    """The linear map, its weights laid out once as oneDNN wants them: a quarter of the time less on a CPU."""
    if weight.numel() < PACKED or not _reorders(weight):
        return lambda x: functional.linear(x, weight, bias)
    operations = torch.ops.mkldnn
    packed = operations._reorder_linear_weight(weight, _BATCH)
    return lambda x: operations._linear_pointwise(x, packed, bias, "none", [], "")


def _reorders(weight: Tensor) -> bool:
    """Whether oneDNN lays such weights out on this machine; of bfloat16, many processors know nothing."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    knows_bfloat16 = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 or bool(knows_bfloat16)


def _is_plain(module: Any) -> bool:
    return type(module) is nn.Linear and not has_hooks(module)


def _called(policy: CausalLM, modules: Sequence[Any], x: Tensor) -> Tensor:
    with policy.computing():
        return torch.cat([module(x) for module in modules], dim=-1)


def _store(layer: Any, group_size: int) -> Float[Tensor, "2 row group room width"]:
    """Keys and values of a layer, repeated, with room; in float32 on a CPU, which is slow to attend in bfloat16."""
    prompts, groups, length, width = layer.keys.shape
    dtype = torch.float32 if layer.values.device.type == "cpu" else layer.values.dtype
    shape = (2, prompts * group_size, groups, length + ROOM, width)
    store = torch.empty(shape, dtype=dtype, device=layer.values.device)
    for half, known in zip(store, (layer.keys, layer.values), strict=True):
        half[:, :, :length] = known.repeat_interleave(group_size, dim=0)
    return store
