"""Scores of tokens under the head of a language model, without a matrix of all tokens by the whole vocabulary.

Axes: token = the positions that are scored, width = the model's hidden size, vocabulary = all token ids, kept = how many
could be drawn at a position, barred = how many could not.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 4_194_304
"""Logits held at once: 16 MiB in float32, of which two or three copies live for a moment."""
_NEVER = -1e30
"""Logit of what cannot be drawn: its probability is 0, and 0 times it is 0, as of minus infinity it would not be."""


class TokenScores(NamedTuple):
    """What the head says of each token, in float32."""

    log_prob: Float[Tensor, " token"]
    entropy: Float[Tensor, " token"]
    """Of the distribution that the token was drawn from, in nats."""


def token_scores(
    hidden: Float[Tensor, "token width"],
    weight: Float[Tensor, "vocabulary width"],
    token: Int[Tensor, " token"],
    *,
    temperature: float = 1.0,
    support: Int[Tensor, "token kept"] | None = None,
    barred: Bool[Tensor, " token"] | None = None,
    barred_ids: Int[Tensor, " barred"] | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> TokenScores:
    """Log-probability of each token, and entropy, under ``softmax(hidden @ weight.T / temperature)``.

    Some rows at a time, forwards and, once more, backwards. Half-precision inputs are multiplied, and gradients summed over
    chunks, in float32. Logits outside a support are not computed.

    Args:
        hidden: last hidden state at the position *before* each token.
        support: ids that the softmax is over, each once and the token among them; rows of -1: over all ids.
        barred: where the softmax is not over ``barred_ids``; the two come together.
        chunk_elements: most numbers held at once; at least those of one row are.
    """
    choice = _Choice(temperature, chunk_elements, support, barred, barred_ids)
    if support is None or bool((support[:, 0] >= 0).all()):
        return _scores(hidden, weight, token, choice)
    some = support[:, 0] >= 0
    scores = torch.zeros(2, len(token), dtype=torch.float32, device=hidden.device)
    for rows, kept in ((some.nonzero()[:, 0], support), ((~some).nonzero()[:, 0], None)):
        part = _scores(hidden[rows], weight, token[rows], choice.at(rows, kept))
        scores = scores.index_copy(1, rows, torch.stack(part))
    return TokenScores(*scores)


class _Choice(NamedTuple):
    """What there was to choose from at each token."""

    temperature: float
    chunk_elements: int
    support: Tensor | None
    barred: Tensor | None
    barred_ids: Tensor | None

    def at(self, rows: Tensor, support: Tensor | None) -> "_Choice":
        """What there was at some of the tokens, which have this support."""
        return self._replace(
            support=None if support is None else support[rows],
            barred=None if self.barred is None else self.barred[rows],
        )

    def parts(self, count: int, weight: Tensor) -> Iterator[slice]:
        """Tokens that are scored together."""
        numbers = weight.shape[0] if self.support is None else self.support.shape[1] * weight.shape[1]
        rows = max(1, self.chunk_elements // numbers)
        return (slice(i, i + rows) for i in range(0, count, rows))

    def logits(self, hidden: Tensor, head: Tensor, part: slice) -> Tensor:
        """Of the ids that were kept, divided by the temperature."""
        if self.support is None:
            logits = hidden.float() @ head.T
        else:
            logits = torch.einsum("tw,tkw->tk", hidden.float(), head[self.support[part]].float())
        logits.div_(self.temperature)
        if self.barred is not None and self.barred_ids is not None:
            logits.masked_fill_(self._left_out(self.barred[part], self.barred_ids, part, logits.shape[1]), _NEVER)
        return logits

    def place(self, token: Tensor, part: slice) -> Tensor:
        """[token, 1] where each token stands among the ids that were kept."""
        if self.support is None:
            return token[part, None]
        return (self.support[part] == token[part, None]).int().argmax(dim=-1, keepdim=True)

    def grad_hidden(self, grad: Tensor, head: Tensor, part: slice) -> Tensor:
        """Gradient of the hidden states from the logits'."""
        if self.support is None:
            return grad @ head
        return torch.einsum("tk,tkw->tw", grad, head[self.support[part]].float())

    def add_grad_head(self, total: Tensor, grad: Tensor, hidden: Tensor, part: slice) -> None:
        """Add the head's gradient from the logits'."""
        if self.support is None:
            total.addmm_(grad.T, hidden.float())
        else:
            total.index_add_(
                0, self.support[part].flatten(), torch.einsum("tk,tw->tkw", grad, hidden.float()).flatten(0, 1)
            )

    def _left_out(self, barred: Tensor, ids: Tensor, part: slice, width: int) -> Tensor:
        offered = torch.arange(width, device=ids.device) if self.support is None else self.support[part]
        return barred[:, None] & torch.isin(offered, ids)


def _scores(hidden: Tensor, weight: Tensor, token: Tensor, choice: _Choice) -> TokenScores:
    return TokenScores(*_Scores.apply(hidden, weight, token, choice))  # type: ignore[no-untyped-call]


class _Scores(torch.autograd.Function):
    """Keeps the inputs and each row's normaliser; the logits are computed again on the way back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, token: Tensor, choice: _Choice) -> tuple[Tensor, Tensor]:
        head = weight.float() if choice.support is None else weight
        log_prob, entropy, normaliser = (hidden.new_empty(len(hidden), dtype=torch.float32) for _ in range(3))
        for part in choice.parts(len(hidden), weight):
            logits = choice.logits(hidden[part], head, part)
            normaliser[part] = logits.logsumexp(dim=-1)
            log_prob[part] = logits.gather(1, choice.place(token, part))[:, 0] - normaliser[part]
            probability = (logits - normaliser[part, None]).exp_()
            entropy[part] = normaliser[part] - torch.einsum("tv,tv->t", probability, logits)
        ctx.save_for_backward(hidden, weight, token, normaliser, entropy)
        ctx.choice = choice
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, token, normaliser, entropy = ctx.saved_tensors
        choice: _Choice = ctx.choice
        head = weight.float() if choice.support is None else weight
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for part in choice.parts(len(hidden), weight):
            # d log_prob / d logit = [token] - p;  d entropy / d logit = -p (log p + entropy)
            log_p = choice.logits(hidden[part], head, part).sub_(normaliser[part, None])
            factor = log_p.add(entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_log_prob[part, None])
            grad = log_p.exp_().mul_(factor).neg_()
            grad.scatter_add_(1, choice.place(token, part), grad_log_prob[part, None])
            grad.div_(choice.temperature)
            if grad_hidden is not None:
                grad_hidden[part] = choice.grad_hidden(grad, head, part).to(hidden.dtype)
            if grad_weight is not None:
                choice.add_grad_head(grad_weight, grad, hidden[part], part)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None
