"""Scores of tokens under the head of a language model, without holding the logits of all tokens.

Axes: token = the scored positions, width = the model's hidden size, vocabulary = all token ids.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from groupwise.config.policy import SamplingCfg
from groupwise.policies.base import Batch

CHUNK_ELEMENTS = {False: 2**22, True: 2**25}
"""Logits held at once, by whether they are on a GPU, which small products leave idle: 16 or 128 MiB. Two or three copies exist for a moment."""
_NEVER = -1e30
"""The logit of a token that could not be drawn: finite, so that 0 times it is 0."""


class TokenScores(NamedTuple):
    """Scores of each token, in float32."""

    log_prob: Float[Tensor, " token"]
    entropy: Float[Tensor, " token"]
    """Entropy of the distribution that the token was drawn from, in nats."""


def token_scores(
    hidden: Float[Tensor, "token width"],
    weight: Float[Tensor, "vocabulary width"],
    token: Int[Tensor, " token"],
    *,
    temperature: float = 1.0,
    support: Int[Tensor, "token kept"] | None = None,
    chunk_elements: int | None = None,
) -> TokenScores:
    """Log-probability of each token, and entropy, under ``softmax(hidden @ weight.T / temperature)``.

    Tokens are scored in chunks, and once more in the backward pass. Half-precision inputs are multiplied, and gradients
    summed, in float32.

    Args:
        hidden: last hidden state at the position *before* each token.
        support: ids that each token could be drawn from; -1 fills up. None: all.
        chunk_elements: most logits held at once, but at least those of one token. None: as fits the device.
    """
    rows = max(1, (chunk_elements or CHUNK_ELEMENTS[hidden.is_cuda]) // len(weight))
    chunks = [slice(i, i + rows) for i in range(0, max(len(hidden), 1), rows)]
    frozen = torch.is_grad_enabled() and hidden.requires_grad and not weight.requires_grad
    with torch.autocast(hidden.device.type, enabled=False):
        return TokenScores(*_Scores.apply(hidden, weight, token, temperature, support, chunks, frozen))  # type: ignore[no-untyped-call]


class _Scores(torch.autograd.Function):
    """Keeps the inputs and a few numbers of each token; the backward pass recomputes the logits.

    With a frozen head it keeps d log_prob / d hidden instead: two products in place of three. Only the gradient of the
    entropies then needs the logits again.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, token: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        temperature, support, chunks, frozen = settings
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.support, ctx.chunks = temperature, support, chunks
        wide = widened(weight, hidden)
        log_prob, entropy, peak, log_total = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        slope = torch.empty_like(hidden, dtype=torch.float32) if frozen else None
        for c in chunks:
            logits = logits_of(hidden[c], wide, None if support is None else support[c]).div_(temperature)
            peak[c] = logits.amax(dim=-1)
            exp = logits.sub_(peak[c, None]).exp()
            total, place = exp.sum(dim=-1), token[c, None]
            log_total[c] = total.log()
            log_prob[c] = logits.gather(1, place)[:, 0] - log_total[c]
            entropy[c] = log_total[c] - logits.mul_(exp).sum(dim=-1) / total
            if slope is not None:
                # d log_prob / d logit = [token] - p; expm1 is exact where p is near 1
                p = exp.div_(total[:, None]).scatter_(1, place, log_prob[c, None].expm1())
                slope[c] = _back_product(p, wide).div_(-temperature)
        ctx.save_for_backward(hidden, weight, token, log_prob, entropy, peak, log_total, slope)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, token, log_prob, entropy, peak, log_total, slope = ctx.saved_tensors
        grad_log_prob = torch.zeros_like(log_prob) if grad_log_prob is None else grad_log_prob
        if slope is not None and grad_entropy is None:
            return (grad_log_prob[:, None] * slope).to(hidden.dtype), *(None,) * 6
        wide = widened(weight, hidden)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        # d log_prob / d logit = [token] - p;  d entropy / d logit = -p (log p + entropy)
        at_token = -grad_log_prob * log_prob.expm1()
        if grad_entropy is not None:
            at_token -= grad_entropy * log_prob.exp() * (log_prob + entropy)
        with torch.autocast(hidden.device.type, enabled=False):
            for c in ctx.chunks:
                log_p = logits_of(hidden[c], wide, None if ctx.support is None else ctx.support[c])
                log_p.div_(ctx.temperature).sub_(peak[c, None]).sub_(log_total[c, None])
                grad, upstream = log_p.exp(), grad_log_prob[c, None]
                if grad_entropy is not None:
                    upstream = log_p.add_(entropy[c, None]).mul_(grad_entropy[c, None]).add_(upstream)
                grad.mul_(-upstream).scatter_(1, token[c, None], at_token[c, None]).div_(ctx.temperature)
                if grad_hidden is not None:
                    grad_hidden[c] = _back_product(grad, wide)
                if grad_weight is not None:
                    if wide.dtype == torch.float32:
                        grad_weight.addmm_(grad.T, hidden[c].float())
                    else:
                        grad_weight += _back_product(grad.T, hidden[c])
        grads = ((grad_hidden, hidden), (grad_weight, weight))
        return *(None if grad is None else grad.to(to.dtype) for grad, to in grads), *(None,) * 5


def widened(weight: Tensor, hidden: Tensor) -> Tensor:
    """The weights in float32. A GPU multiplies bfloat16 into float32, and needs no copy, which may be gigabytes."""
    return weight if weight.is_cuda and weight.dtype == hidden.dtype == torch.bfloat16 else weight.float()


def _back_product(grad: Tensor, wide: Tensor) -> Tensor:
    """``grad @ wide`` in float32. With weights in bfloat16, the gradient is the sum of two numbers in bfloat16."""
    if wide.dtype == torch.float32:
        return grad @ wide
    high = grad.to(wide.dtype)
    low = (grad - high).to(wide.dtype)
    return torch.mm(high, wide, out_dtype=torch.float32) + torch.mm(low, wide, out_dtype=torch.float32)


def logits_of(hidden: Tensor, wide: Tensor, support: Tensor | None = None) -> Tensor:
    """Logits in float32, of ids outside the support ``_NEVER``; ``wide`` is as ``widened`` gives it."""
    if wide.dtype == torch.float32:
        logits = torch.mm(hidden.float(), wide.T)
    else:
        logits = torch.mm(hidden, wide.T, out_dtype=torch.float32)
    if support is None:
        return logits
    return logits.masked_fill_(~_among(support, len(wide)), _NEVER)


def _among(ids: Int[Tensor, "row place"], vocabulary: int) -> Bool[Tensor, "row vocabulary"]:
    """Whether each token is one of the ids; -1 fills up."""
    found = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device)
    return found.scatter_(1, ids.long().masked_fill(ids < 0, vocabulary), True)[:, :-1]


# Penalties of tokens that the text has already


def penalized(
    logits: Float[Tensor, "row vocabulary"],
    sampling: SamplingCfg,
    text: Int[Tensor, "row place"],
    written: Int[Tensor, "row written"],
    eos: Int[Tensor, " eos"] | None = None,
) -> Float[Tensor, "row vocabulary"]:
    """Logits after the penalties, and without the end of a text that is shorter than ``min_new_tokens``.

    Args:
        text: prompt and completion so far, for the repetition penalty; -1 fills up.
        written: the completion so far, or that of this turn, for the presence penalty and ``min_new_tokens``.
        eos: tokens that end a completion.

    Source: Keskar et al., "CTRL", 2019, section 4.1, with the sign of transformers and vLLM; OpenAI's API for the presence
    penalty.
    """
    factor = torch.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
    factor = factor.masked_fill(~_among(text, logits.shape[1]), 1)
    logits = logits * factor - sampling.presence_penalty * _among(written, logits.shape[1])
    if eos is None or not sampling.min_new_tokens:
        return logits
    early = (written >= 0).sum(dim=1, keepdim=True) < sampling.min_new_tokens
    return logits.masked_fill(early & _among(eos[None], logits.shape[1]), _NEVER)


def penalized_scores(
    batch: Batch,
    sampling: SamplingCfg,
    hidden: Float[Tensor, "token width"],
    weight: Float[Tensor, "vocabulary width"],
    token: Int[Tensor, " token"],
    *,
    temperature: float,
    support: Int[Tensor, "token kept"] | None = None,
    eos: Int[Tensor, " eos"] | None = None,
    chunk_elements: int | None = None,
) -> TokenScores:
    """``token_scores`` of the tokens in the batch's ``loss_mask``, after the penalties that they were sampled with.

    Autograd derives it, and computes each chunk again in the backward pass.
    """
    (row, step), tokens = batch["loss_mask"].nonzero(as_tuple=True), batch["obs"].masked_fill(~batch["valid"], -1)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    rows = max(1, (chunk_elements or CHUNK_ELEMENTS[hidden.is_cuda]) // len(weight))

    def scores(hidden: Tensor, wide: Tensor, start: int) -> tuple[Tensor, Tensor]:
        c = slice(start, start + rows)
        # slot t holds token t, which precedes its action and was the action of slot t - 1
        text, turn = tokens[row[c]].masked_fill(place > step[c, None], -1), batch["turn_id"][row[c]]
        other_turn = functional.pad(turn, (1, -1), value=-1) != turn.gather(1, step[c, None])
        logits = penalized(hidden @ wide.T, sampling, text, text.masked_fill(other_turn, -1), eos)
        if support is not None:
            logits = logits.masked_fill(~_among(support[c], len(wide)), _NEVER)
        log_p = (logits / temperature).log_softmax(dim=-1)
        return log_p.gather(1, token[c, None])[:, 0], -(log_p.exp() * log_p).sum(dim=-1)

    with torch.autocast(hidden.device.type, enabled=False):
        wide, chunks = weight.float(), torch.split(hidden.float(), rows)
        parts = [checkpoint(scores, h, wide, i * rows, use_reentrant=False) for i, h in enumerate(chunks)]
    return TokenScores(*(torch.cat(part) for part in zip(*parts, strict=True)))
