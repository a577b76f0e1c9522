"""Which token comes next: the distribution that the sampling settings make of logits, and a draw from it."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from groupwise.config.policy import EvalSamplingCfg, SamplingCfg

BLOCK = 256
"""Probabilities summed at once where a drawn number is looked up: a running sum over a whole vocabulary is slow."""
_TINY = 1e-30


class Drawn(NamedTuple):
    """The next token of each row."""

    token: Int[Tensor, " row"]
    log_prob: Float[Tensor, " row"]
    """Under the distribution that the token was drawn from."""
    support: Int[Tensor, "row kept"] | None
    """With ``top_k``: the tokens that could be drawn, by rising id."""


def draw(
    logits: Float[Tensor, "row vocabulary"],
    chance: Float[Tensor, " row"],
    sampling: SamplingCfg,
    barred: Int[Tensor, " barred"] | None = None,
    *,
    deterministic: bool = False,
) -> Drawn:
    """A token of each row, from ``softmax(logits / temperature)`` among those that the settings keep.

    Exactly ``top_k`` tokens are kept, of several equally likely ones some.

    Args:
        chance: uniform in [0, 1); equal numbers draw equal tokens.
        barred: tokens that cannot be drawn.
        deterministic: the likeliest token instead, of equally likely ones the first.
    """
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if barred is not None:
        logits = logits.index_fill(1, barred, -torch.inf)
    support = None
    if sampling.top_k is not None:
        kept = logits.topk(min(sampling.top_k, logits.shape[1]), sorted=False).indices
        support = kept.sort(dim=-1).values  # by id, as rounding in another batch may change the order by likelihood
        logits = logits.gather(1, support)
    probability = logits.softmax(dim=-1)
    if isinstance(sampling, EvalSamplingCfg):
        probability = _nucleus(probability, sampling)
    place = probability.argmax(dim=-1) if deterministic else pick(probability, chance)
    log_prob = probability.gather(1, place[:, None])[:, 0].log()
    return Drawn(place if support is None else support.gather(1, place[:, None])[:, 0], log_prob, support)


def pick(probability: Float[Tensor, "row place"], chance: Float[Tensor, " row"]) -> Int[Tensor, " row"]:
    """The place at which the running sum reaches 1 - chance of the total; never one of probability 0."""
    goal = 1 - chance
    width = probability.shape[1]
    if width <= BLOCK:
        return _reach(probability, goal)[0]
    padded = functional.pad(probability, (0, -width % BLOCK)) if width % BLOCK else probability
    blocks = padded.view(len(padded), -1, BLOCK)
    mass = blocks.sum(dim=-1)
    block, summed, goal = _reach(mass, goal)
    before = (summed - mass).gather(1, block[:, None])[:, 0]
    rows = torch.arange(len(blocks), device=block.device)
    place = block * BLOCK + _reach(blocks[rows, block], (goal - before).clamp(min=_TINY))[0]
    return place.clamp(max=width - 1)  # what NaN leads to lies behind


def _reach(
    mass: Float[Tensor, "row place"], goal: Float[Tensor, " row"]
) -> tuple[Int[Tensor, " row"], Float[Tensor, "row place"], Float[Tensor, " row"]]:
    """The first place with mass at which the running sum reaches the goal; the running sums; and the goal itself.

    Where rounding leaves the goal above every sum, the greatest is the goal.
    """
    summed = mass.cumsum(dim=-1)
    # a CPU adds one by one, so that the sums rise where there is mass and stay where there is none
    place, goal = _first_in_order(summed, goal) if summed.device.type == "cpu" else _first(mass, summed, goal)
    return place, summed, goal


def _first_in_order(summed: Float[Tensor, "row place"], goal: Float[Tensor, " row"]) -> tuple[Tensor, Tensor]:
    """The first place at which sums in rising order reach the goal, and the goal itself: in a third of the time."""
    goal = torch.minimum(goal, summed[:, -1])
    place = torch.searchsorted(summed, goal[:, None])[:, 0]
    return place.clamp(max=summed.shape[1] - 1), goal  # NaN is behind them all: who reads the log-probability will tell


def _first(
    mass: Float[Tensor, "row place"], summed: Float[Tensor, "row place"], goal: Float[Tensor, " row"]
) -> tuple[Tensor, Tensor]:
    """The same where rounding may let the sums rise or fall without mass."""
    reached = torch.where(mass > 0, summed, 0)
    goal = torch.minimum(goal, reached.amax(dim=-1))
    return (reached >= goal[:, None]).int().argmax(dim=-1), goal


def _nucleus(probability: Float[Tensor, "row place"], sampling: EvalSamplingCfg) -> Float[Tensor, "row place"]:
    """Probabilities among the tokens that ``top_p`` and then ``min_p`` keep; the likeliest always is.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, section 3.1; Nguyen et al., "Turning Up
    the Heat: Min-p Sampling", 2024, section 3.
    """
    if sampling.top_p is not None:
        ordered, order = probability.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0)
        probability = torch.zeros_like(probability).scatter(1, order, ordered)
    if sampling.min_p is not None:
        least = sampling.min_p * probability.amax(dim=-1, keepdim=True)
        probability = probability.masked_fill(probability < least, 0)
    return probability / probability.sum(dim=-1, keepdim=True)
