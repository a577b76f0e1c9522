"""A fast decoding step for models of the Llama family (Llama, SmolLM, Mistral, Qwen2, Qwen3), and norms of one kernel.

The architecture: RMSNorm, rotary positions, grouped-query attention, a gated MLP. The step does their arithmetic without
calling the modules of transformers. The modules still encode the prompts, and ``FastDecoder`` compares both once.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from groupwise.algorithms.memory import ran_out_of_memory
from groupwise.errors import SlowPathWarning
from groupwise.policies.base import has_hooks
from groupwise.speed.control import first_line
from groupwise.speed.graphs import Replay
from groupwise.text.generation import Decoder, Head, Past, Prompts, Step, holds_all
from groupwise.text.policy import CausalLM

_Map = Callable[[Tensor], Tensor]

ROOM = 64
"""Tokens by which a cache grows."""
_FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose angles do not depend on the length of the text."""


class FastDecoder(Decoder):
    """Decodes with ``LlamaStep`` if the model is of the Llama family and the first step agrees with transformers.

    Args:
        fast: by default ``StaticStep`` on CUDA, and ``LlamaStep`` elsewhere.
    """

    def __init__(self, fast: "type[LlamaStep] | None" = None) -> None:
        self._fast = fast
        self.used: Literal["untried", "llama", "transformers"] = "untried"

    def step(self, policy: CausalLM, prompts: Prompts, token: Int[Tensor, " row"], head: Head) -> Step:
        """The step that extends the rows, whose first tokens are ``token``.

        Warns:
            SlowPathWarning: the model computes other numbers than this step, so transformers decodes from now on.
        """
        if not has_llama_shape(policy.network, prompts.cache):
            return Step(policy, prompts)
        fast = self._fast or (StaticStep if token.is_cuda else LlamaStep)
        if self.used == "untried":
            self._try(fast, policy, prompts, token, head)
            return self.step(policy, prompts, token, head)
        return fast(policy, prompts) if self.used == "llama" else Step(policy, prompts)

    def _try(self, fast: "type[LlamaStep]", policy: CausalLM, prompts: Prompts, token: Tensor, head: Head) -> None:
        """Compare a step with that of transformers. A graph that cannot be recorded is given up."""
        steps = (fast(policy, prompts), Step(policy, prompts._replace(cache=deepcopy(prompts.cache))))
        try:
            ours, theirs = (head(step(token)).log_softmax(dim=-1) for step in steps)
        except RuntimeError as error:
            if fast is not StaticStep or ran_out_of_memory(error):
                raise
            self._fast = LlamaStep
            message = f"tokens are not decoded by a CUDA graph: {first_line(error)}; speed='off' is silent"
            warnings.warn(message, SlowPathWarning, stacklevel=5)
            return
        off = float((ours - theirs).square().mean().sqrt())
        self.used = "llama" if off <= policy.rounding else "transformers"
        if self.used == "transformers":
            message = f"{type(policy.network).__name__} decodes with transformers (no fast step)"
            why = f"log-probabilities of the fast step differ by {off:.2g}, at most {policy.rounding} is rounding"
            warnings.warn(f"{message}: {why}", SlowPathWarning, stacklevel=5)


def has_llama_shape(network: Any, cache: Any) -> bool:
    """Whether ``LlamaStep`` covers all parts of the model, and its cache holds the keys and values of every token."""
    family = next((name for name in _FAMILIES if type(network).__name__ == f"{name}ForCausalLM"), None)
    if family is None or network.config.rope_parameters["rope_type"] not in _ROPES:
        return False
    base = network.base_model
    expected = {base: "Model", base.norm: "RMSNorm", base.rotary_emb: "RotaryEmbedding"}
    for layer in base.layers:
        expected |= {layer: "DecoderLayer", layer.self_attn: "Attention", layer.mlp: "MLP"}
        expected |= {layer.input_layernorm: "RMSNorm", layer.post_attention_layernorm: "RMSNorm"}
    # Mistral uses Llama's rotary positions
    known = all(type(module).__name__ in (family + name, "Llama" + name) for module, name in expected.items())
    return known and holds_all(cache)


class _Layer(NamedTuple):
    """The operations of a layer."""

    norm: _Map
    qkv: _Map
    """Queries, keys and values of all heads, concatenated."""
    head_norm: _Map | None
    """Norm of queries and keys."""
    out: _Map
    mlp_norm: _Map
    gate_up: _Map
    act: _Map
    down: _Map


class LlamaStep(Step):
    """Extends each row by one token.

    It copies the weights when it is made: make one for each call that generates.

    Args:
        places: tokens that the caches have room for at first. None: a few more than the prompts have.
    """

    def __init__(self, policy: CausalLM, prompts: Prompts, places: int | None = None) -> None:
        base, cached = policy.network.base_model, prompts.cache.layers
        valid, most = prompts.valid.repeat_interleave(prompts.group_size, dim=0), prompts.max_new_tokens
        self._embed, self._norm = base.embed_tokens, _norm(base.norm.weight, base.norm.variance_epsilon)
        self._layers = [_layer(policy, layer) for layer in base.layers]
        self._head_width, self._groups = cached[0].keys.shape[-1], cached[0].keys.shape[1]
        self._start = self._length = valid.shape[1]
        self._stores = [_store(layer, prompts.group_size, places or self._start + ROOM) for layer in cached]
        self._dtype, self._position = cached[0].keys.dtype, valid.sum(dim=1)
        # cosine and sine of each position; the sine of a head's first half is negated
        positions = torch.arange(self._length + most, device=valid.device)[None]
        cos, sin = base.rotary_emb(self._embed(positions[:, :1]), positions)
        half = self._head_width // 2
        sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        self._rotary = torch.stack([cos[0], sin], dim=1)[:, :, None]
        # 0 or -inf for each place of prompt and completion; None without padding
        self._mask: Tensor | None = None
        if not bool(valid.all()):
            mask = torch.zeros(len(valid), self._length + most, device=valid.device, dtype=self._stores[0].dtype)
            mask[:, : self._length].masked_fill_(~valid, -torch.inf)
            self._mask = mask[:, None, None]

    def __call__(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row width"]:
        """The last hidden state of each row, after its token."""
        if self._length == self._stores[0].shape[3]:
            for number, store in enumerate(self._stores):
                grown = self._stores[number] = store.new_empty(*store.shape[:3], self._length + ROOM, self._head_width)
                grown[:, :, :, : self._length] = store
        place, self._length = self._length, self._length + 1
        mask = None if self._mask is None else self._mask[:, :, :, : self._length]
        hidden = self._hidden(
            token, slice(place, self._length), [store[:, :, :, : self._length] for store in self._stores], mask
        )
        self._position = self._position + 1
        return hidden

    def keep(self, kept: Bool[Tensor, " row"]) -> None:
        """Drop the other rows."""
        self._stores = [store[:, kept] for store in self._stores]
        self._position = self._position[kept]
        self._mask = None if self._mask is None else self._mask[kept]

    def past(self, row: int, count: int) -> Past:
        """Keys and values of a row: of its prompt, and of ``count`` tokens."""
        read = slice(self._start + count)
        mask = slice(None) if self._mask is None else self._mask[row, 0, 0, read] == 0
        # a part of the store would keep all of it
        parts = (store[:, row, :, read].to(self._dtype, copy=True)[:, :, mask] for store in self._stores)
        return [(keys, values) for keys, values in parts]

    def _hidden(self, token: Tensor, place: Any, stores: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """The last hidden state of each row; keys and values of its token go to this place of the stores."""
        with torch.autocast(token.device.type, enabled=False):
            hidden = self._embed(token)
            rotary = self._rotary[self._position].unbind(1)
            for layer, store in zip(self._layers, stores, strict=True):
                qkv = layer.qkv(layer.norm(hidden)).view(len(hidden), -1, self._head_width)
                qk, value = qkv.tensor_split([-self._groups], dim=1)
                if layer.head_norm is not None:
                    qk = layer.head_norm(qk)
                qk = torch.addcmul(qk * rotary[0], qk.roll(self._head_width // 2, dims=-1), rotary[1])
                query, key = qk.tensor_split([-self._groups], dim=1)
                keys, values = store.unbind(0)
                keys[:, :, place], values[:, :, place] = key.unsqueeze(2), value.unsqueeze(2)
                # the queries of a group are like several tokens of one head
                query = query.reshape(len(hidden), self._groups, -1, self._head_width).to(store.dtype)
                out = functional.scaled_dot_product_attention(query, keys, values, mask)
                hidden = hidden + layer.out(out.reshape(len(hidden), -1).to(value.dtype))
                gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
                hidden = hidden + layer.down(layer.act(gate) * up)
            return self._norm(hidden)


class StaticStep(LlamaStep):
    """``LlamaStep`` on tensors of fixed shapes and places, which a GPU replays as one graph: launched one by one, its many small
    kernels leave a GPU idle most of the time.

    The stores have room for all tokens, and the mask is of all places. Rows that have ended stay in the batch until half of it has,
    and as many as pay for another graph.
    """

    patience = 16
    share = 0.5
    least = 64

    def __init__(self, policy: CausalLM, prompts: Prompts) -> None:
        most = prompts.valid.shape[1] + prompts.max_new_tokens
        super().__init__(policy, prompts, -(-most // ROOM) * ROOM)
        store, rows = self._stores[0], len(self._position)
        mask = torch.full((rows, 1, 1, store.shape[3]), -torch.inf, device=store.device, dtype=store.dtype)
        mask[..., : self._start] = 0 if self._mask is None else self._mask[..., : self._start]
        self._mask: Tensor = mask
        self._place = torch.full((1,), self._start, device=store.device)
        self._token = torch.zeros(rows, dtype=torch.int64, device=store.device)
        self._replay: Replay | None = None
        self._is_first = getattr(policy.decoder, "used", "untried") == "untried"

    def __call__(self, token: Int[Tensor, " row"]) -> Float[Tensor, "row width"]:
        """The last hidden state of each row, after its token; the next call writes over it."""
        self._token.copy_(token)
        self._mask.index_fill_(3, self._place, 0.0)
        if self._replay is None:
            step = partial(self._hidden, self._token, self._place, self._stores, self._mask)
            self._replay = Replay(step, token.device, check=self._is_first)
        hidden: Tensor = self._replay()
        self._place += 1
        self._position += 1
        return hidden

    def keep(self, kept: Bool[Tensor, " row"]) -> None:
        """Drop the other rows."""
        super().keep(kept)
        self._token, self._replay = self._token[kept], None


def _layer(policy: CausalLM, layer: Any) -> _Layer:
    attention, mlp, before, between = layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm
    head_norm = None
    if type(attention).__name__ == "Qwen3Attention":
        heads = [attention.q_norm.weight] * attention.config.num_attention_heads
        weight = torch.stack(heads + [attention.k_norm.weight] * attention.config.num_key_value_heads)
        head_norm = _norm(weight, attention.q_norm.variance_epsilon)
    return _Layer(
        norm=_norm(before.weight, before.variance_epsilon),
        qkv=_linear(policy, attention.q_proj, attention.k_proj, attention.v_proj),
        head_norm=head_norm,
        out=_linear(policy, attention.o_proj),
        mlp_norm=_norm(between.weight, between.variance_epsilon),
        gate_up=_linear(policy, mlp.gate_proj, mlp.up_proj),
        act=mlp.act_fn,
        down=_linear(policy, mlp.down_proj),
    )


def _norm(weight: Float[Tensor, "*head width"], epsilon: float) -> _Map:
    """RMSNorm."""
    width = weight.shape[-1]
    scaled, root = weight.float() * math.sqrt(width), torch.full((), width * epsilon, device=weight.device).sqrt()

    def norm(x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and x.device.type == "cpu":  # here `rms_norm` takes twice as long
            return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), root) * scaled
        # rounded before the product with the weight, as in transformers
        return functional.rms_norm(x, x.shape[-1:], eps=epsilon) * weight

    return norm


def fuse_norms(model: nn.Module) -> None:
    """Compute each RMSNorm of the family by one kernel, rounded as before: its eight are a third of what an update launches."""
    for module in model.modules():
        if type(module).__name__ in (f"{family}RMSNorm" for family in _FAMILIES):
            module.forward = MethodType(_fused_norm, module)  # bound, so that it can be copied


def _fused_norm(norm: Any, x: Tensor) -> Tensor:
    scaled: Tensor = norm.weight * functional.rms_norm(x, x.shape[-1:], eps=norm.variance_epsilon).to(x.dtype)
    return scaled


def _linear(policy: CausalLM, *modules: Any) -> _Map:
    """The concatenated outputs of the modules: one product if they are plain linear layers."""
    biases = [module.bias for module in modules if module.bias is not None]
    plain = all(type(module) is nn.Linear and not has_hooks(module) for module in modules)
    if not plain or len(biases) not in (0, len(modules)):

        def called(x: Tensor) -> Tensor:
            with policy.computing():
                return torch.cat([module(x) for module in modules], dim=-1)

        return called
    dtype = policy.autocast or modules[0].weight.dtype
    weight = torch.cat([module.weight.to(dtype) for module in modules])
    bias = torch.cat(biases).to(dtype) if biases else None
    return lambda x: functional.linear(x if policy.autocast is None else x.to(dtype), weight, bias)


def _store(layer: Any, group_size: int, places: int) -> Float[Tensor, "2 row group place width"]:
    """Keys and values of a layer, repeated for each row, with room; float32 on CPUs, where bfloat16 attention is slow."""
    prompts, groups, length, width = layer.keys.shape
    dtype = torch.float32 if layer.values.device.type == "cpu" else layer.values.dtype
    store = torch.zeros(2, prompts * group_size, groups, places, width, dtype=dtype, device=layer.values.device)
    for half, cached in zip(store, (layer.keys, layer.values), strict=True):
        half[:, :, :length] = cached.repeat_interleave(group_size, dim=0)
    return store
