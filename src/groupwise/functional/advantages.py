"""Advantage estimators: from rewards, values and scores to how much better an action was than expected.

Axes: row = N environments or samples, step = T, batch = any shape, key = what is compared (a start, or a start and a
step). An id of -1 marks an absent element.
"""

from typing import Literal, assert_never

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.functional.reduce import AllSum, gather_segments, local, segment_min_max, segment_sum
from groupwise.functional.returns import discounted_sum

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["std", "population_std", "batch_std", "none"]


def gae(
    reward: Float[Tensor, "row step"],
    value: Float[Tensor, "row step"],
    next_value: Float[Tensor, "row step"],
    terminated: Bool[Tensor, "row step"],
    truncated: Bool[Tensor, "row step"],
    *,
    gamma: float,
    gae_lambda: float,
) -> Float[Tensor, "row step"]:
    """Generalised advantage estimate of each step.

    ``A_t = delta_t + gamma * lambda * (1 - done_t) * A_{t+1}``, with
    ``delta_t = r_t + gamma * (1 - terminated_t) * V(s_{t+1}) - V(s_t)``.

    Args:
        next_value: V of the true successor of each step, which is the final observation of a
            finished episode, never the first one of the next.
        terminated: the successor is terminal, its value counts as 0.
        truncated: the episode was cut, its value still counts but nothing flows back past it.

    Source: Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16.
    """
    delta = reward + gamma * next_value.masked_fill(terminated, 0) - value
    carry = torch.full_like(reward, gamma * gae_lambda).masked_fill(terminated | truncated, 0)
    return discounted_sum(delta, carry)


def group_relative(
    score: Float[Tensor, "*batch"],
    key: Int[Tensor, "*batch"],
    num_keys: int,
    *,
    baseline: Baseline,
    scale: Scale,
    eps: float = 1e-4,
    member: Bool[Tensor, "*batch"] | None = None,
    zeros: Float[Tensor, " key"] | None = None,
    all_sum: AllSum = local,
) -> Float[Tensor, "*batch"]:
    """Score of each element less a baseline of its key, over a deviation if asked.

    ``baseline="mean"`` subtracts the mean of the key, ``"leave_one_out"`` the mean of its other members,
    ``(sum - score) / (n - 1)``. With equal scores there is nothing to compare, and the advantage is exactly 0: so it
    is for a member alone in its key, and rounding errors are never divided by a tiny deviation.

    Args:
        key: 0..num_keys-1 in any order; keys may differ in size.
        scale: unbiased (``std``) or biased (``population_std``) deviation of the key, unbiased deviation of all
            members of the batch and all ranks (``batch_std``), or nothing.
        eps: added to the deviation, in units of the score.
        member: elements that take part; the others get 0. None: all whose key is not -1.
        zeros: how many further members with score 0 each key has. Those of a key without elements do not count.

    Source: mean and std: GRPO, https://arxiv.org/abs/2402.03300; without scale: Dr. GRPO,
        https://arxiv.org/abs/2503.20783; leave_one_out: RLOO, https://arxiv.org/abs/2402.14740; batch_std: Lite-PPO,
        https://arxiv.org/abs/2508.08221.
    """
    mask = _members(key, member)
    live = segment_sum(torch.ones_like(score), key, num_keys, mask)
    zeros = torch.zeros_like(live) if zeros is None else zeros.masked_fill(live == 0, 0)
    size = live + zeros
    mean = segment_sum(score, key, num_keys, mask) / size.clamp(min=1)
    advantage = score - gather_segments(mean, key)
    match scale:
        case "none":
            spread = torch.ones_like(score)
        case "batch_std":
            spread = _batch_deviation(score, mask, zeros, all_sum) + eps
        case "std" | "population_std":
            square = segment_sum(advantage.square(), key, num_keys, mask) + zeros * mean.square()
            variance = square / (size - int(scale == "std")).clamp(min=1)
            spread = gather_segments(variance.sqrt(), key) + eps
        case _:
            assert_never(scale)
    if baseline == "leave_one_out":
        advantage = advantage * gather_segments(size / (size - 1).clamp(min=1), key)
    return (advantage / spread).masked_fill(~mask | _all_equal(score, key, mask, zeros), 0)


def comparable(
    key: Int[Tensor, "*batch"],
    num_keys: int,
    member: Bool[Tensor, "*batch"] | None = None,
    zeros: Float[Tensor, " key"] | None = None,
) -> Bool[Tensor, "*batch"]:
    """True where an element is a member of its key and has company there.

    Args:
        member, zeros: as in ``group_relative``; a further member with score 0 is company too.
    """
    mask = _members(key, member)
    size = segment_sum(mask.float(), key, num_keys)
    return mask & (gather_segments(size if zeros is None else size + zeros, key) > 1)


def absorbed_count(
    group_id: Int[Tensor, "row step"],
    step: Int[Tensor, "row step"],
    ended: Bool[Tensor, "row step"],
    num_groups: int,
    num_steps: int,
) -> Float[Tensor, " key"]:
    """How many members of each group ended before each step, at key ``group_id * num_steps + step``.

    These are the ``zeros`` of ``group_relative`` when a member that ended counts with return 0 from then on.

    Args:
        step: index since the group's common start; what ends outside 0..num_steps-1 is ignored.
        ended: True at the last transition of the members that should count.
    """
    inside = ended & (group_id >= 0) & (step >= 0) & (step < num_steps - 1)
    first_missed = group_id * num_steps + step + 1
    ends = segment_sum(torch.ones_like(step, dtype=torch.float32), first_missed, num_groups * num_steps, inside)
    return ends.reshape(num_groups, num_steps).cumsum(dim=1).flatten()


def _members(key: Int[Tensor, "*batch"], member: Bool[Tensor, "*batch"] | None) -> Bool[Tensor, "*batch"]:
    present = key >= 0
    return present if member is None else present & member


def _all_equal(
    score: Float[Tensor, "*batch"],
    key: Int[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"],
    zeros: Float[Tensor, " key"],
) -> Bool[Tensor, "*batch"]:
    """Whether the members of each element's key, absorbed zeros included, all have the same score."""
    lowest, highest = segment_min_max(score, key, zeros.shape[0], mask)
    lowest = torch.where(zeros > 0, lowest.clamp(max=0), lowest)
    highest = torch.where(zeros > 0, highest.clamp(min=0), highest)
    return gather_segments((lowest == highest).to(score), key) > 0


def _batch_deviation(
    score: Float[Tensor, "*batch"], mask: Bool[Tensor, "*batch"], zeros: Float[Tensor, " key"], all_sum: AllSum
) -> Float[Tensor, ""]:
    """Unbiased deviation of the members' scores over all keys and ranks, absorbed zeros included."""
    num_zeros = zeros.sum()
    sums = torch.stack([score.masked_fill(~mask, 0).sum(), mask.sum() + num_zeros])
    total, count = all_sum(sums).unbind()
    mean = total / count.clamp(min=1)
    square = (score - mean).masked_fill(~mask, 0).square().sum() + num_zeros * mean.square()
    return (all_sum(square) / (count - 1).clamp(min=1)).sqrt()
