"""Sampler against trainer: weights that make up for samples of slightly different probabilities. Without gradient.

Axes: batch = any shape, [B] or [B, T].
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.functional.objective import bounded_exp, sequence_product_ratio
from groupwise.functional.reduce import gather_segments, segment_mean


@torch.no_grad()
def token_weight(
    old_log_prob: Float[Tensor, "*batch"], sample_log_prob: Float[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """``exp(old_log_prob - sample_log_prob)`` of each step."""
    return bounded_exp(old_log_prob - sample_log_prob)


@torch.no_grad()
def sequence_weight(
    old_log_prob: Float[Tensor, "*batch"],
    sample_log_prob: Float[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"],
    episode_id: Int[Tensor, "*batch"],
    num_episodes: int,
) -> Float[Tensor, "*batch"]:
    """Product of the episode's ``token_weight`` over the mask, at each of its elements; 1 outside the mask."""
    return sequence_product_ratio(old_log_prob, sample_log_prob, mask, episode_id, num_episodes)


@torch.no_grad()
def truncated(weight: Float[Tensor, "*batch"], high: float) -> Float[Tensor, "*batch"]:
    """``min(weight, high)``: truncated importance sampling."""
    return weight.clamp(max=high)


@torch.no_grad()
def masked(weight: Float[Tensor, "*batch"], low: float | None, high: float) -> Float[Tensor, "*batch"]:
    """The weight within ``[low, high]``, 0 outside: masked importance sampling.

    Source: IcePop, https://arxiv.org/abs/2510.18855.
    """
    outside = weight > high if low is None else (weight > high) | (weight < low)
    return weight.masked_fill(outside, 0)


@torch.no_grad()
def off_policy_keeps(
    log_prob: Float[Tensor, "*batch"],
    sample_log_prob: Float[Tensor, "*batch"],
    advantage: Float[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"],
    episode_id: Int[Tensor, "*batch"],
    num_episodes: int,
    limit: float,
) -> Bool[Tensor, "*batch"]:
    """False at negative advantage in episodes whose mean of ``sample_log_prob - log_prob`` exceeds the limit.

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556.
    """
    distance = segment_mean(sample_log_prob - log_prob, episode_id, num_episodes, mask)
    return (advantage >= 0) | (gather_segments(distance, episode_id) <= limit)
