"""Numbers that tell how an update went: 0-dim, over all ranks, without gradient, never NaN for an empty mask.

Axes: batch = any shape, [B] or [B, T].
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.functional.kl import k3
from groupwise.functional.reduce import AllSum, local, masked_mean, masked_var, segment_min_max, segment_sum


@torch.no_grad()
def clip_fraction(
    ratio: Float[Tensor, "*batch"],
    clip_low: float,
    clip_high: float,
    mask: Bool[Tensor, "*batch"],
    all_sum: AllSum = local,
) -> Float[Tensor, ""]:
    """Share of elements whose ratio is outside ``[1 - clip_low, 1 + clip_high]``."""
    outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    return masked_mean(outside.to(ratio), mask, all_sum)


@torch.no_grad()
def approx_kl(
    log_prob: Float[Tensor, "*batch"],
    old_log_prob: Float[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"],
    all_sum: AllSum = local,
) -> Float[Tensor, ""]:
    """KL(old || now) estimated from the old policy's samples: mean of ``(ratio - 1) - log(ratio)``, never negative.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html (k3).
    """
    return masked_mean(k3(old_log_prob, log_prob), mask, all_sum)


@torch.no_grad()
def explained_variance(
    value: Float[Tensor, "*batch"],
    target: Float[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"],
    all_sum: AllSum = local,
) -> Float[Tensor, ""]:
    """``1 - Var(target - value) / Var(target)``: 1 is perfect, 0 no better than a constant; 0 if the target is constant."""
    total = masked_var(target, mask, unbiased=False, all_sum=all_sum)
    unexplained = masked_var(target - value, mask, unbiased=False, all_sum=all_sum)
    return (1 - unexplained / total).masked_fill(total == 0, 0)


@torch.no_grad()
def effective_sample_size(
    ratio: Float[Tensor, "*batch"], mask: Bool[Tensor, "*batch"], all_sum: AllSum = local
) -> Float[Tensor, ""]:
    """``(sum w)^2 / (n sum w^2)``, the share of samples left after weighting: 1 for equal ratios, 1/n if one has all."""
    weight = ratio.masked_fill(~mask, 0)
    sums = torch.stack([weight.sum(), weight.square().sum(), mask.sum()])
    total, square, count = all_sum(sums).unbind()
    return (total.square() / (count * square)).masked_fill(square == 0, 0)


@torch.no_grad()
def zero_variance_groups(
    score: Float[Tensor, " episode *part"],
    group_id: Int[Tensor, " episode"],
    num_groups: int,
    member: Bool[Tensor, " episode"],
    all_sum: AllSum = local,
) -> Float[Tensor, ""]:
    """Share of the groups of two or more whose members all have the same score, and so teach nothing.

    Where the score has parts, all of them must be the same.
    """
    parts = score.unbind(dim=-1) if score.dim() > 1 else (score,)
    bounds = [segment_min_max(part, group_id, num_groups, member) for part in parts]
    equal = torch.stack([lowest == highest for lowest, highest in bounds]).all(dim=0)
    compared = segment_sum(member.to(score), group_id, num_groups) > 1
    return masked_mean(equal.to(score), compared, all_sum)
