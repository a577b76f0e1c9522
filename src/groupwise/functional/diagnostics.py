"""Numbers that tell how an update went: 0-dim, over all ranks, without gradient, never NaN for an empty mask.

Axes: batch = any shape, [B] or [B, T].
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.functional.reduce import AllSum, local, masked_mean, masked_var, segment_min_max, segment_sum


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
