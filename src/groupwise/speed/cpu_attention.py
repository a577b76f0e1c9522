"""Attention of a few new tokens to a long context on CPUs, registered with transformers.

It serves completions after a shared prompt in training, and single tokens in generation. PyTorch's kernel is made for long
texts; plain matrix products take a third to a half of its time. The queries of a group share one product, so that keys are
not repeated.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "groupwise"
MOST = 128
"""Most new tokens of a row. The probabilities of more do not fit into the processor's cache."""


def attend_on_cpus(network: Any) -> None:
    """Use this attention where it is faster, in a transformers model that uses PyTorch's."""
    if network.config._attn_implementation == "sdpa" and network._can_set_attn_implementation():
        network.set_attn_implementation(NAME)


def autocast_off(device: str) -> AbstractContextManager:
    """No autocast on devices of this type. Nothing is entered if it is off already, which saves an operation's time."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def attend(
    query: Float[Tensor, "row head query width"],
    key: Float[Tensor, "row group context width"],
    value: Float[Tensor, "row group context out"],
    mask: Bool[Tensor, "#row #head #query context"] | Float[Tensor, "#row #head #query context"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "row head query out"]:
    """``scaled_dot_product_attention`` with ``enable_gqa``; probabilities are computed in float32.

    A query whose context is all masked attends to all of it: NaN would spread through later masks.
    """
    mask = None if mask is None else _finite(mask)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if not torch.is_grad_enabled():
        return _attended(query, key, value, mask, scale)[0]
    out: Tensor = _Attend.apply(query, key, value, mask, scale)  # type: ignore[no-untyped-call]
    return out


def _finite(mask: Tensor) -> Float[Tensor, "#row #head #query context"]:
    """The mask to add to scores, without -inf: a row of -inf alone would become NaN."""
    least = torch.finfo(torch.float32).min
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, least)
    return mask.float().clamp(min=least)


def _attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Float[Tensor, "row_group head_query context"]]:
    """Output and probabilities."""
    rows, heads, queries, _ = query.shape
    q, k, v = _by_group(query, key), key.flatten(0, 1), value.flatten(0, 1)
    with autocast_off("cpu"):
        scores = torch.bmm(q.float().mul(scale), k.float().transpose(1, 2))
        if mask is not None:
            scores.view(rows, heads, queries, -1).add_(mask)
        p = scores.softmax(dim=-1).to(value.dtype)
        return torch.bmm(p, v).view(rows, heads, queries, -1), p


class _Attend(torch.autograd.Function):
    """Keeps the probabilities, in the precision of the values."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        out, p = _attended(query, key, value, mask, scale)
        ctx.save_for_backward(query, key, value, p)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, p = ctx.saved_tensors
        q, k, v, grad = _by_group(query, key), key.flatten(0, 1), value.flatten(0, 1), _by_group(grad, key)
        with autocast_off("cpu"):
            grad_p, wide = (grad @ v.transpose(1, 2)).float(), p.float()
            scores = torch._softmax_backward_data(grad_p, wide, -1, torch.float32).mul_(ctx.scale).to(q.dtype)
            grads = scores @ k, scores.transpose(1, 2) @ q, p.transpose(1, 2) @ grad
        return *(one.view(of.shape) for one, of in zip(grads, (query, key, value), strict=True)), None, None


def _by_group(query: Tensor, key: Tensor) -> Tensor:
    """The queries of each group of heads that share keys: [row * group, head / group * query, width]."""
    return query.reshape(key.shape[0] * key.shape[1], -1, query.shape[-1])


def _forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls it."""
    if not _pays(query, attention_mask, dropout, more):
        output: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
        return output
    if torch.is_autocast_enabled("cpu"):  # rotary positions leave queries and keys in float32
        query, key, value = (x.to(torch.get_autocast_dtype("cpu")) for x in (query, key, value))
    return attend(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def _pays(query: Tensor, mask: Tensor | None, dropout: float, more: dict[str, Any]) -> bool:
    """Whether ``attend`` is faster than PyTorch's kernel, and covers the arguments."""
    has_context = mask is not None or query.shape[2] == 1  # otherwise attention is causal, and the kernel skips half
    few = query.device.type == "cpu" and query.shape[2] <= MOST and not torch.compiler.is_compiling()
    return few and has_context and not dropout and more.get("position_bias") is None and more.get("cache") is None


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
