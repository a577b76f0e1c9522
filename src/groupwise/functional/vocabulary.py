"""Scores of tokens under the head of a language model, without a matrix of all tokens by the whole vocabulary.

Axes: token = the positions that are scored, width = the model's hidden size, vocabulary = all token ids.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 4_194_304
"""Logits held at once: 16 MiB in float32, of which two or three copies live for a moment."""


class TokenScores(NamedTuple):
    """What the head says of each token, in float32."""

    log_prob: Float[Tensor, " token"]
    entropy: Float[Tensor, " token"]
    """Of the distribution over the vocabulary that the token was drawn from, in nats."""


def token_scores(
    hidden: Float[Tensor, "token width"],
    weight: Float[Tensor, "vocabulary width"],
    token: Int[Tensor, " token"],
    *,
    temperature: float = 1.0,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> TokenScores:
    """Log-probability of each token, and entropy, under ``softmax(hidden @ weight.T / temperature)``.

    Some rows at a time, forwards and, once more, backwards. Half-precision inputs are multiplied, and gradients summed over
    chunks, in float32.

    Args:
        hidden: last hidden state at the position *before* each token.
        chunk_elements: most logits held at once; at least one row is.
    """
    rows = max(1, chunk_elements // weight.shape[0])
    log_prob, entropy = _Scores.apply(  # type: ignore[no-untyped-call]
        hidden, weight, token, temperature, rows
    )
    return TokenScores(log_prob, entropy)


class _Scores(torch.autograd.Function):
    """Keeps the inputs and each row's normaliser; the logits are computed again on the way back."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, token: Tensor, temperature: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        head = weight.float()
        log_prob, entropy, normaliser = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for part in _parts(len(hidden), rows):
            logits = _logits(hidden[part], head, temperature)
            normaliser[part] = logits.logsumexp(dim=-1)
            log_prob[part] = logits.gather(1, token[part, None])[:, 0] - normaliser[part]
            probability = (logits - normaliser[part, None]).exp_()
            entropy[part] = normaliser[part] - torch.einsum("tv,tv->t", probability, logits)
        ctx.save_for_backward(hidden, weight, token, normaliser, entropy)
        ctx.temperature, ctx.rows = temperature, rows
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, token, normaliser, entropy = ctx.saved_tensors
        head = weight.float()
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in _parts(len(hidden), ctx.rows):
            # d log_prob / d logit = [token] - p;  d entropy / d logit = -p (log p + entropy)
            log_p = _logits(hidden[part], head, ctx.temperature).sub_(normaliser[part, None])
            factor = log_p.add(entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_log_prob[part, None])
            grad = log_p.exp_().mul_(factor).neg_()
            grad.scatter_add_(1, token[part, None], grad_log_prob[part, None])
            grad.div_(ctx.temperature)
            if grad_hidden is not None:
                grad_hidden[part] = (grad @ head).to(hidden.dtype)
            if grad_weight is not None:
                grad_weight.addmm_(grad.T, hidden[part].float())
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _parts(count: int, rows: int) -> Iterator[slice]:
    return (slice(i, i + rows) for i in range(0, count, rows))


def _logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    return (hidden.float() @ head.T).div_(temperature)
