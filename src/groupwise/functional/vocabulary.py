"""Scores of tokens under the head of a language model, without a matrix of all tokens by the whole vocabulary.

Axes: token = the positions that are scored, width = the model's hidden size, vocabulary = all token ids, kept = how many
could be drawn at a position. A tile is some tokens by some of the ids they choose from.
"""

from collections.abc import Iterator
from math import isqrt
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**22
"""Logits held at once: 16 MiB, of which two or three copies live for a moment."""
_NEVER = -1e30
"""Below every logit; unlike minus infinity, 0 times it is 0."""


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
    chunk_elements: int = CHUNK_ELEMENTS,
) -> TokenScores:
    """Log-probability of each token, and entropy, under ``softmax(hidden @ weight.T / temperature)``.

    Tile by tile, forwards and, once more, backwards. Half-precision inputs are multiplied, and gradients summed over tiles,
    in float32. Logits outside a support are not computed. Where ``weight`` is frozen, the gradient of the log-probabilities
    comes out of the forward pass; one of the entropies takes a second pass.

    Args:
        hidden: last hidden state at the position *before* each token.
        support: ids that the softmax is over, each once and the token among them; rows of -1: over all ids.
        chunk_elements: most logits held at once; with a support most numbers of its weights, but for one token at least all.
    """
    choice = _Choice(temperature, chunk_elements, support)
    if support is None or bool((support[:, 0] >= 0).all()):
        return _scores(hidden, weight, token, choice)
    some = support[:, 0] >= 0
    places = some.nonzero()[:, 0], (~some).nonzero()[:, 0]
    choices = choice._replace(support=support[places[0]]), choice._replace(support=None)
    parts = (_scores(hidden[rows], weight, token[rows], its) for rows, its in zip(places, choices, strict=True))
    back = torch.cat(places).argsort()
    # each score by itself: where the entropies have no gradient, their part of it is not computed
    return TokenScores(*(torch.cat(score)[back] for score in zip(*parts, strict=True)))


class _Choice(NamedTuple):
    """What there was to choose from at each token."""

    temperature: float
    chunk_elements: int
    support: Tensor | None

    def parts(self, count: int, weight: Tensor) -> Iterator[tuple[slice, list[slice]]]:
        """Tokens that are scored together, and the places of their ids, tile by tile: four times as wide as high."""
        if self.support is None:
            width, ids = min(len(weight), 2 * isqrt(self.chunk_elements), self.chunk_elements), len(weight)
            rows = max(1, self.chunk_elements // width)
        else:
            width = ids = self.support.shape[1]
            rows = max(1, self.chunk_elements // (width * weight.shape[1]))
        tiles = [slice(i, min(i + width, ids)) for i in range(0, ids, width)]
        return ((slice(i, min(i + rows, count)), tiles) for i in range(0, count, rows))

    def logits(self, hidden: Tensor, weight: Tensor, rows: slice, tile: slice, space: "_Space") -> Tensor:
        """Of a tile, divided by the temperature."""
        if self.support is None:
            logits = _product(hidden[rows], weight[tile], space)
        else:
            logits = torch.einsum("tw,tkw->tk", hidden[rows].float(), weight[self.support[rows]].float())
        return logits.div_(self.temperature)

    def place(self, token: Tensor, rows: slice, tile: slice) -> tuple[Tensor, Tensor]:
        """[row, 1] where each token stands in the tile, and whether it does."""
        if self.support is not None:
            found = self.support[rows] == token[rows, None]
            return found.int().argmax(dim=-1, keepdim=True), found.any(dim=-1, keepdim=True)
        place, width = token[rows, None] - tile.start, tile.stop - tile.start
        return place.clamp(0, width - 1), (place >= 0) & (place < width)

    def add_times_weight(
        self, total: Tensor, factor: Tensor, weight: Tensor, rows: slice, tile: slice, space: "_Space"
    ) -> None:
        """Add ``factor @ weight`` of a tile, which is how gradients reach hidden states."""
        if self.support is None:
            total.addmm_(factor, space.wide("weight", weight[tile]))
        else:
            total += torch.einsum("tk,tkw->tw", factor, weight[self.support[rows]].float())

    def add_grad_weight(
        self, total: Tensor, grad: Tensor, hidden: Tensor, rows: slice, tile: slice, space: "_Space"
    ) -> None:
        """Add the head's gradient from a tile's."""
        if self.support is None:
            total[tile].addmm_(grad.T, space.wide("hidden", hidden[rows]))
        else:
            outer = torch.einsum("tk,tw->tkw", grad, hidden[rows].float())
            total.index_add_(0, self.support[rows].flatten(), outer.flatten(0, 1))


def _scores(hidden: Tensor, weight: Tensor, token: Tensor, choice: _Choice) -> TokenScores:
    # of a frozen head 2 products do, in place of 3: half the time on a CPU, as exponentials are taken once
    pulling = torch.is_grad_enabled() and hidden.requires_grad and not weight.requires_grad
    return TokenScores(*_Scores.apply(hidden, weight, token, choice, pulling))  # type: ignore[no-untyped-call]


class _Scores(torch.autograd.Function):
    """Keeps the inputs and a few numbers of each token; the logits are computed again on the way back.

    Or, ``pulling``, keeps how the log-probability of each token changes with its hidden state, ``[token, width]``.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, token: Tensor, choice: _Choice, pulling: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.choice = choice
        space = _Space(hidden.device)
        log_prob, entropy, peak, log_total = hidden.new_empty(4, len(hidden), dtype=torch.float32)
        pull = torch.empty_like(hidden, dtype=torch.float32) if pulling else None
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, tiles in choice.parts(len(hidden), weight):
                sums = _Sums(peak[rows], None if pull is None else pull[rows], space)
                for tile in tiles:
                    logits = choice.logits(hidden, weight, rows, tile, space)
                    exp = sums.add(logits, *choice.place(token, rows, tile))
                    if sums.pull is not None:
                        choice.add_times_weight(sums.pull, exp, weight, rows, tile, space)
                log_total[rows] = sums.total.log()
                log_prob[rows] = sums.chosen - sums.peak - log_total[rows]
                entropy[rows] = log_total[rows] - sums.weighted / sums.total
                if sums.pull is not None:
                    # d log_prob / d hidden = (1 - p) weight[token] - sum over the others of p weight
                    own = log_prob[rows, None].expm1() * weight[token[rows]].float()
                    sums.pull.div_(sums.total[:, None]).add_(own).div_(-choice.temperature)
        ctx.save_for_backward(hidden, weight, token, log_prob, entropy, peak, log_total, pull)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, token, log_prob, entropy, peak, log_total, pull = ctx.saved_tensors
        grad_log_prob = torch.zeros_like(log_prob) if grad_log_prob is None else grad_log_prob
        if pull is not None and grad_entropy is None:
            return (grad_log_prob[:, None] * pull).to(hidden.dtype), None, None, None, None
        choice: _Choice = ctx.choice
        space = _Space(hidden.device)
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        # d log_prob / d logit = [token] - p;  d entropy / d logit = -p (log p + entropy)
        at_token = -grad_log_prob * log_prob.expm1()
        if grad_entropy is not None:
            at_token -= grad_entropy * log_prob.exp() * (log_prob + entropy)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, tile in ((rows, tile) for rows, tiles in choice.parts(len(hidden), weight) for tile in tiles):
                log_p = choice.logits(hidden, weight, rows, tile, space)
                log_p.sub_(peak[rows, None]).sub_(log_total[rows, None])
                grad, upstream = torch.exp(log_p, out=space.take("exp", *log_p.shape)), grad_log_prob[rows, None]
                if grad_entropy is not None:
                    upstream = log_p.add_(entropy[rows, None]).mul_(grad_entropy[rows, None]).add_(upstream)
                _put(grad.mul_(-upstream), *choice.place(token, rows, tile), at_token[rows, None])
                grad.div_(choice.temperature)
                if grad_hidden is not None:
                    choice.add_times_weight(grad_hidden[rows], grad, weight, rows, tile, space)
                if grad_weight is not None:
                    choice.add_grad_weight(grad_weight, grad, hidden, rows, tile, space)
        grads = ((grad_hidden, hidden), (grad_weight, weight))
        return *(None if grad is None else grad.to(to.dtype) for grad, to in grads), None, None, None


class _Space:
    """Memory that each tile uses again: new memory of this size comes from the system page by page, for longer than ``exp`` takes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[str, Tensor] = {}
        self._wide: dict[str, tuple[int, torch.Size]] = {}

    def take(self, name: str, rows: int, columns: int) -> Tensor:
        """A matrix, whose numbers are those that were last in the memory of this name."""
        held = self._held.get(name)
        if held is None or held.numel() < rows * columns:
            held = self._held[name] = torch.empty(rows * columns, device=self._device)
        return held[: rows * columns].view(rows, columns)

    def wide(self, name: str, part: Float[Tensor, "row column"]) -> Float[Tensor, "row column"]:
        """The part in float32, converted once until another of this name is asked for."""
        if part.dtype == torch.float32:
            return part
        known, wide = (part.data_ptr(), part.shape), self.take(name, *part.shape)
        if self._wide.get(name) != known:
            wide.copy_(part)
            self._wide[name] = known
        return wide


class _Sums:
    """Sums over the tiles so far, of some tokens; exponentials are of logits less the largest so far."""

    def __init__(self, peak: Tensor, pull: Tensor | None, space: _Space) -> None:
        self._space = space
        self.peak = peak.fill_(_NEVER)
        self.total, self.weighted, self.chosen = peak.new_zeros(3, len(peak))
        """Of the exponentials, of each times its logit less the largest, and the logit of the token itself."""
        self.pull = None if pull is None else pull.zero_()
        """Of each exponential times the weights of its id, but for the token's own."""

    def add(self, logits: Tensor, place: Tensor, inside: Tensor) -> Tensor:
        """Take in a tile, which is overwritten; the exponentials, 0 at the token."""
        self.chosen += torch.where(inside, logits.gather(1, place), 0)[:, 0]
        peak = torch.maximum(self.peak, logits.amax(dim=-1))
        change, shrink = self.peak - peak, (self.peak - peak).exp()
        self.weighted.add_(self.total * change).mul_(shrink)
        self.total.mul_(shrink)
        if self.pull is not None:
            self.pull.mul_(shrink[:, None])
        self.peak.copy_(peak)
        exp = torch.exp(logits.sub_(peak[:, None]), out=self._space.take("exp", *logits.shape))
        self.total.add_(exp.sum(dim=-1))
        self.weighted.add_(logits.mul_(exp).sum(dim=-1))
        return _put(exp, place, inside, torch.zeros_like(peak)[:, None])


def _put(tile: Tensor, place: Tensor, inside: Tensor, value: Tensor) -> Tensor:
    """The tile with the values at these places, where they are inside of it; in place."""
    return tile.scatter_(1, place, torch.where(inside, value, tile.gather(1, place)))


def _product(left: Tensor, right: Tensor, space: _Space) -> Tensor:
    """``left @ right.T`` of hidden states and weights, multiplied and added up in float32.

    A product of two bfloat16 numbers is exact in float32, and processors with AMX multiply those several times faster. But on
    CPUs torch offers no such product with a float32 result, only a setting of the whole process: factors (not sums) of float32
    products may be rounded to bfloat16, which changes none that came from there. It is held for this one product.
    """
    if left.is_cuda and left.dtype == right.dtype == torch.bfloat16:
        return torch.mm(left, right.T, out_dtype=torch.float32)
    factors = space.wide("hidden", left), space.wide("weight", right).T
    out = space.take("logits", len(left), len(right))
    if not left.dtype == right.dtype == torch.bfloat16:
        return torch.mm(*factors, out=out)
    setting: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before, setting.fp32_precision = setting.fp32_precision, "bf16"
    try:
        return torch.mm(*factors, out=out)
    finally:
        setting.fp32_precision = before
