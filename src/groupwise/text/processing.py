"""Processed logits: penalties for tokens of the text so far, and filters that keep the likeliest tokens.

Penalties follow from the text, so that training computes them again. The tokens that filters keep depend on the policy
that sampled, and the order changes with each update: they are stored, and training scores among them (the "keep sampling
mask" of DeepSeek-AI, "DeepSeek-V3.2", 2025). So the probability of a sampled token never becomes 0.

Axes: row = texts, vocabulary = all token ids, place = tokens of a text, written = those of a completion, kept = ids that
a filter keeps. The id -1 fills up.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from groupwise.config.policy import MAX_KEPT, SamplingCfg
from groupwise.functional.vocabulary import LogitProcessor
from groupwise.policies.base import Batch

_NEVER = -1e30
"""The logit of a token that is not kept: finite, so that 0 times it is 0."""


def penalized(
    logits: Float[Tensor, "row vocabulary"],
    sampling: SamplingCfg,
    text: Int[Tensor, "row place"],
    written: Int[Tensor, "row written"],
) -> tuple[Float[Tensor, "row vocabulary"], Float[Tensor, "row vocabulary"]]:
    """Logits after the penalties, and their derivative.

    Args:
        text: prompt and completion so far, for the repetition penalty.
        written: the completion so far, or that of this turn, for the presence penalty.

    Source: Keskar et al., "CTRL", 2019, section 4.1, with the sign of transformers and vLLM; OpenAI's API for the presence
    penalty.
    """
    factor = torch.where(logits > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
    factor = factor.masked_fill(~_among(text, logits.shape[1]), 1)
    return logits * factor - sampling.presence_penalty * _among(written, logits.shape[1]), factor


def kept_tokens(logits: Float[Tensor, "row vocabulary"], sampling: SamplingCfg) -> Int[Tensor, "row kept"]:
    """Ids that ``top_k``, then ``top_p``, then ``min_p`` keep, by rising id; of equally likely tokens some.

    Of tokens equally likely at the border, as many are kept as have room. The most likely one is always kept.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, section 3.1; Nguyen et al., "Turning Up
    the Heat: Min-p Sampling", 2024, section 3.
    """
    vocabulary = logits.shape[1]
    top, ids = logits.topk(min(sampling.top_k or MAX_KEPT, vocabulary))
    likely = logits.softmax(dim=-1).gather(1, ids) if sampling.top_k is None else top.softmax(dim=-1)
    keep = torch.ones_like(ids, dtype=torch.bool)
    if sampling.top_p is not None:
        keep &= likely.cumsum(dim=-1) - likely < sampling.top_p
    if sampling.min_p is not None:
        keep &= likely >= sampling.min_p * likely[:, :1]
    keep[:, 0] = True  # where logits are NaN, too
    # by id, as rounding in another batch may change the order by likelihood
    ids = ids.masked_fill(~keep, vocabulary).sort(dim=-1).values[:, : int(keep.sum(dim=-1).max())]
    return ids.masked_fill(ids == vocabulary, -1)


def recorded_processor(batch: Batch, sampling: SamplingCfg) -> LogitProcessor:
    """What processed the logits of the tokens in ``loss_mask`` when they were sampled.

    Args:
        batch: ``obs``, ``valid`` and ``loss_mask``; with penalties ``turn_id``; and with filters ``support``: the ids that
            were kept, ``[N, T, kept]``.
    """
    mask = batch["loss_mask"]
    row, step = mask.nonzero(as_tuple=True)
    place = torch.arange(mask.shape[1], device=mask.device)
    tokens = batch["obs"].masked_fill(~batch["valid"], -1)

    def process(logits: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        derivative = None
        if sampling.has_penalties:
            # slot t holds token t, which precedes its action and was the action of slot t - 1
            text, turn = tokens[row[part]].masked_fill(place > step[part, None], -1), batch["turn_id"][row[part]]
            other_turn = functional.pad(turn, (1, -1), value=-1) != turn.gather(1, step[part, None])
            logits, derivative = penalized(logits, sampling, text, text.masked_fill(other_turn, -1))
        if sampling.has_filters:
            kept = _among(batch["support"][row[part], step[part]].long(), logits.shape[1])
            logits = logits.masked_fill(~kept, _NEVER)
        return logits, derivative

    return process


def _among(ids: Int[Tensor, "row place"], vocabulary: int) -> Bool[Tensor, "row vocabulary"]:
    """Whether each token is one of the ids."""
    found = torch.zeros(len(ids), vocabulary + 1, dtype=torch.bool, device=ids.device)
    return found.scatter_(1, ids.masked_fill(ids < 0, vocabulary), True)[:, :vocabulary]
