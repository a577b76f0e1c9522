"""Returns and advantages: from rewards, values and scores to how much better an action was than expected.

Axes: row = N environments or samples, step = T, batch = any shape, key = what is compared (a start, or a start and a
step). An id of -1 marks an absent element. A row may hold several episodes one after another.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.functional.reduce import AllSum, gather_segments, local, segment_min_max, segment_sum

Baseline = Literal["mean", "leave_one_out"]
BatchScale = Literal["none", "batch_std", "nonzero_share"]
"""Scales that are one number for the whole batch."""
Scale = Literal["std", "population_std", "mean"] | BatchScale


def discounted_sum(x: Float[Tensor, "row step"], discount: Float[Tensor, "row step"]) -> Float[Tensor, "row step"]:
    """The solution y of ``y_t = x_t + discount_t * y_{t+1}``, with y = 0 behind the last step.

    A discount of 0 stops even NaN from flowing back. Every round doubles how far each step has summed, so T steps take
    log2(T) rounds of whole-tensor operations; equal parts of a row give equal bits wherever they are.
    """
    span = 1
    while span < x.shape[1]:
        ahead = (discount[:, :-span] * x[:, span:]).masked_fill(discount[:, :-span] == 0, 0)
        x = torch.cat([x[:, :-span] + ahead, x[:, -span:]], dim=1)
        # The last steps keep a stale product: they are complete, and no later round reads it.
        discount = torch.cat([discount[:, :-span] * discount[:, span:], discount[:, -span:]], dim=1)
        span *= 2
    return x


def return_to_go(
    reward: Float[Tensor, "row step"], done: Bool[Tensor, "row step"], gamma: float
) -> Float[Tensor, "row step"]:
    """Discounted reward from each step to the end of its episode: ``R_t = r_t + gamma * (1 - done_t) * R_{t+1}``.

    Args:
        done: True at an episode's last step, however it ended. Without one, the sum stops at the end of the row.
    """
    return discounted_sum(reward, torch.full_like(reward, gamma).masked_fill(done, 0))


def episode_return(
    reward: Float[Tensor, "*batch"], episode_id: Int[Tensor, "*batch"], num_episodes: int
) -> Float[Tensor, " episode"]:
    """Undiscounted sum of each episode's rewards; elements with id -1 belong to none.

    Summed in float64, so that equal rewards in another order have the same sum.
    """
    return segment_sum(reward.double(), episode_id, num_episodes).to(reward.dtype)


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
    member: Bool[Tensor, "*batch"] | None = None,
    zeros: Float[Tensor, " key"] | None = None,
    *,
    baseline: Baseline,
    scale: Scale,
    eps: float = 1e-4,
    weight: Float[Tensor, "*batch"] | None = None,
    all_sum: AllSum = local,
) -> Float[Tensor, "*batch"]:
    """Score of each element less a baseline of its key, over a scale if asked.

    ``baseline="mean"`` subtracts the mean of the key, ``"leave_one_out"`` the mean of its other members,
    ``(sum - score) / (n - 1)``. With equal scores there is nothing to compare, and the advantage is exactly 0: so it is
    for a member alone in its key, and rounding errors are never divided by a tiny standard deviation.

    Args:
        key: 0..num_keys-1 in any order; keys may differ in size.
        member: elements that take part; the others get 0. None: all whose key is not -1.
        zeros: how many further members with score 0 each key has; they weigh nothing in a weighted mean. Members of a
            key without elements do not count at all.
        scale: unbiased (``std``) or biased (``population_std``) standard deviation of the key, unbiased one of all
            members of the batch and all ranks (``batch_std``), mean of the key (``mean``; 0 where that is not positive),
            share of the batch's scores that are not 0 (``nonzero_share``), or nothing.
        eps: added to a standard deviation, in units of the score.
        weight: of each element in the mean that ``baseline="mean"`` subtracts, ``sum(w * score) / sum(w)``; the plain
            mean where all weights of a key are 0.

    Source: mean and std: GRPO, https://arxiv.org/abs/2402.03300; without scale: Dr. GRPO,
        https://arxiv.org/abs/2503.20783; leave_one_out: RLOO, https://arxiv.org/abs/2402.14740; batch_std: Lite-PPO,
        https://arxiv.org/abs/2508.08221; scale by the mean: MaxRL, https://arxiv.org/abs/2602.02710; nonzero_share: GPG,
        as in verl, https://github.com/volcengine/verl.
    """
    mask, dtype = key >= 0 if member is None else (key >= 0) & member, score.dtype
    score = score.double()  # squares of large scores would overflow, and means of nearly equal ones round
    live = segment_sum(torch.ones_like(score), key, num_keys, mask)
    zeros = torch.zeros_like(live) if zeros is None else zeros.double().masked_fill(live == 0, 0)
    size = live + zeros
    mean = segment_sum(score, key, num_keys, mask) / size.clamp(min=1)
    advantage = centred = score - gather_segments(mean, key)
    if baseline == "leave_one_out":
        advantage = centred * gather_segments(size / (size - 1).clamp(min=1), key)
    elif weight is not None:
        total = segment_sum(weight.double(), key, num_keys, mask)
        weighted = segment_sum(weight.double() * score, key, num_keys, mask) / total
        advantage = score - gather_segments(torch.where(total > 0, weighted, mean), key)
    match scale:
        case "std" | "population_std":
            square = segment_sum(centred.square(), key, num_keys, mask) + zeros * mean.square()
            variance = square / (size - int(scale == "std")).clamp(min=1)
            advantage = advantage / (gather_segments(variance.sqrt(), key) + eps)
        case "mean":
            per_element = gather_segments(mean, key)
            advantage = (advantage / per_element).masked_fill(per_element <= 0, 0)
        case _:
            advantage = advantage / batch_scale(scale, score, mask, zeros, eps, all_sum)
    lowest, highest = segment_min_max(score, key, num_keys, mask)
    # infinite scores are never equal
    all_equal = (highest - lowest == 0) & ((zeros == 0) | (highest == 0))
    return advantage.masked_fill(~mask | (gather_segments(all_equal.to(score), key) > 0), 0).to(dtype)


def kl_shaping(
    distance: Float[Tensor, "*batch"],
    episode_id: Int[Tensor, "*batch"],
    num_episodes: int,
    mask: Bool[Tensor, "*batch"],
) -> Float[Tensor, "*batch"]:
    """``mean_t(KL_it) - KL_it``: how much nearer to the reference each step is than its episode on average.

    Added to advantages with a weight it moves credit between the steps of an episode; its sum over each is 0.

    Source: ART, https://github.com/OpenPipe/ART; AgileRL, https://github.com/AgileRL/AgileRL.
    """
    length = segment_sum(torch.ones_like(distance), episode_id, num_episodes, mask)
    mean = segment_sum(distance, episode_id, num_episodes, mask) / length.clamp(min=1)
    return (gather_segments(mean, episode_id) - distance).masked_fill(~mask, 0)


def finished_count(
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


def batch_scale(
    scale: BatchScale,
    score: Float[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"],
    zeros: Float[Tensor, " key"],
    eps: float,
    all_sum: AllSum,
) -> Float[Tensor, ""]:
    """The number that all advantages of the batch are divided by; ``zeros`` further members have score 0."""
    match scale:
        case "none":
            return score.new_ones(())
        case "batch_std":
            total, count = all_sum(torch.stack([score.masked_fill(~mask, 0).sum(), mask.sum() + zeros.sum()])).unbind()
            mean = total / count.clamp(min=1)
            square = (score - mean).masked_fill(~mask, 0).square().sum() + zeros.sum() * mean.square()
            deviation = (all_sum(square) / (count - 1).clamp(min=1)).sqrt()
            return deviation + eps + (deviation + eps == 0)  # 1 in place of 0
        case "nonzero_share":
            counts = torch.stack([((score != 0) & mask).sum().to(score), mask.sum() + zeros.sum()])
            nonzero, count = all_sum(counts).unbind()
            return nonzero.clamp(min=1) / count.clamp(min=1)
