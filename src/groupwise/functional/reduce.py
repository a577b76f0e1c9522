"""Sums over segments, masks and ranks: means, variances, weights that turn terms into one loss, largest elements.

Axes: batch = any shape, [B] or [B, T]; segment = dense ids 0..n-1, such as episodes or groups. An id of -1 marks an
absent element. Masked-out elements may hold anything, NaN included. Nothing here waits for the device, and no
shape depends on the data.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from groupwise.functional.random import hash_pair, unit

AllSum = Callable[[Tensor], Tensor]
"""Sum of a tensor over all ranks; carries no gradient where there are several."""

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant", "seq_mean_token_sum_norm"]


def local(tensor: Tensor) -> Tensor:
    """The tensor itself: its sum over the ranks of a single process."""
    return tensor


def segment_sum(
    x: Float[Tensor, "*batch"],
    segment: Int[Tensor, "*batch"],
    num_segments: int,
    mask: Bool[Tensor, "*batch"] | None = None,
) -> Float[Tensor, " segment"]:
    """Sum of each segment's elements, in their order; those with id -1 or outside the mask do not count."""
    bins = _bins(segment, num_segments, mask)
    if x.is_cuda and x.is_floating_point():  # `index_add` adds in any order there
        return _ordered_sum(x.flatten(), bins, num_segments)
    return x.new_zeros(num_segments + 1).index_add(0, bins, x.flatten())[:num_segments]


def segment_mean(
    x: Float[Tensor, "*batch"], segment: Int[Tensor, "*batch"], num_segments: int, mask: Bool[Tensor, "*batch"]
) -> Float[Tensor, " segment"]:
    """Mean of each segment's elements over the mask; 0 where it has none."""
    count = segment_sum(mask.to(x.dtype), segment, num_segments)
    return segment_sum(x, segment, num_segments, mask) / count.clamp(min=1)


def segment_min_max(
    x: Float[Tensor, "*batch"],
    segment: Int[Tensor, "*batch"],
    num_segments: int,
    mask: Bool[Tensor, "*batch"] | None = None,
) -> tuple[Float[Tensor, " segment"], Float[Tensor, " segment"]]:
    """Least and greatest element of each segment; infinity and minus infinity where it has none."""
    bins, flat = _bins(segment, num_segments, mask), x.flatten()
    lowest = x.new_full((num_segments + 1,), torch.inf).scatter_reduce(0, bins, flat, "amin")
    highest = x.new_full((num_segments + 1,), -torch.inf).scatter_reduce(0, bins, flat, "amax")
    return lowest[:num_segments], highest[:num_segments]


def gather_segments(per_segment: Float[Tensor, " segment"], segment: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """Each element's entry of ``per_segment``, 0 where its id is -1."""
    return pad(per_segment, (0, 1))[segment]  # index -1 is the appended 0


def masked_mean(x: Float[Tensor, "*batch"], mask: Bool[Tensor, "*batch"], all_sum: AllSum = local) -> Float[Tensor, ""]:
    """Mean over the mask and all ranks; 0 for an empty mask."""
    mean, _ = _mean_and_count(x, mask, all_sum)
    return mean


def whiten(
    x: Float[Tensor, "*batch"], mask: Bool[Tensor, "*batch"], *, eps: float = 1e-8, all_sum: AllSum = local
) -> Float[Tensor, "*batch"]:
    """Elements less their mean, over their unbiased standard deviation, of the mask on all ranks.

    0 outside the mask, and everywhere when all elements are equal.
    """
    centred, count = _centre(x.double(), mask, all_sum)  # squares of large elements would overflow
    variance = all_sum(centred.square().sum()) / (count - 1).clamp(min=1)
    return (centred / (variance.sqrt() + eps).clamp(min=1e-300)).to(x.dtype)


def whiten_segments(
    x: Float[Tensor, "*batch"],
    segment: Int[Tensor, "*batch"],
    num_segments: int,
    mask: Bool[Tensor, "*batch"],
    *,
    all_sum: AllSum = local,
) -> Float[Tensor, "*batch"]:
    """``whiten`` of each segment by itself; a number is the same segment on every rank. 0 where the id is -1."""
    mask = mask & (segment >= 0)

    def total(values: Tensor) -> Tensor:
        return all_sum(segment_sum(values, segment, num_segments, mask))

    count = total(torch.ones_like(x))
    centred = x
    for _ in range(2):  # as in ``_centre``
        centred = centred - gather_segments(total(centred) / count.clamp(min=1), segment)
    deviation = (total(centred.square()) / (count - 1).clamp(min=1)).sqrt()
    return (centred / (gather_segments(deviation, segment) + 1e-8)).masked_fill(~mask, 0)


def loss_weights(
    mask: Bool[Tensor, "*batch"],
    episode_id: Int[Tensor, "*batch"],
    num_episodes: int,
    aggregation: Aggregation,
    *,
    max_length: int | None = None,
    all_sum: AllSum = local,
) -> Float[Tensor, "*batch"]:
    """Weight of each element, such that ``(weight * term).sum()`` over micro-batches and ranks is the aggregated loss.

    With m the mask, T_i its sum over episode i and N the episodes whose sum is above 0, a weight is

    - ``token_mean``: ``m / sum_i T_i`` (DAPO, https://arxiv.org/abs/2503.14476);
    - ``seq_mean_token_mean``: ``m / (N T_i)`` (GRPO, https://arxiv.org/abs/2402.03300);
    - ``seq_mean_token_sum``: ``m / N``;
    - ``constant``: ``m / (N * max_length)`` (Dr. GRPO, https://arxiv.org/abs/2503.20783);
    - ``seq_mean_token_sum_norm``: ``m / max_length``: verl's name; it is a sum, and grows with the batch.

    Compute it once for the whole optimiser batch, before it is split: then no split changes the gradient.

    Args:
        mask: elements that count; those with ``episode_id`` -1 never do.
        num_episodes: of this rank; every count is then summed over ranks.

    Raises:
        ValueError: ``constant`` or ``seq_mean_token_sum_norm`` without ``max_length``.
    """
    if max_length is None and aggregation in ("constant", "seq_mean_token_sum_norm"):
        raise ValueError(f"aggregation {aggregation!r} got max_length None; fix: give the most steps of an episode")
    weight, longest = (mask & (episode_id >= 0)).float(), max_length or 1
    if aggregation == "token_mean":
        return weight / all_sum(weight.sum()).clamp(min=1)
    if aggregation == "seq_mean_token_sum_norm":
        return weight / longest
    length = segment_sum(weight, episode_id, num_episodes)
    num_counted = all_sum((length > 0).sum().to(weight)).clamp(min=1)
    match aggregation:
        case "seq_mean_token_mean":
            return weight / (gather_segments(length, episode_id).clamp(min=1) * num_counted)
        case "seq_mean_token_sum":
            return weight / num_counted
        case "constant":
            return weight / (num_counted * longest)


def token_mean_weights(
    mask: Bool[Tensor, "*batch"], segment: Int[Tensor, "*batch"], num_segments: int, *, all_sum: AllSum = local
) -> Float[Tensor, "*batch"]:
    """``loss_weights`` by ``token_mean`` of each segment by itself; a number is the same segment on every rank."""
    weight = mask.float()
    count = all_sum(segment_sum(weight, segment, num_segments)).clamp(min=1)
    return weight / gather_segments(count, segment)


def _bins(
    segment: Int[Tensor, "*batch"], num_segments: int, mask: Bool[Tensor, "*batch"] | None
) -> Int[Tensor, " element"]:
    """Flat ids in which every element that does not count goes to one more segment behind the last."""
    absent = segment < 0 if mask is None else (segment < 0) | ~mask
    return segment.masked_fill(absent, num_segments).flatten()


def _ordered_sum(
    x: Float[Tensor, " element"], bins: Int[Tensor, " element"], num_segments: int
) -> Float[Tensor, " segment"]:
    """Sums of the segments 0 to ``num_segments`` - 1, the same in each call on every device."""
    # a radix sort takes as many kernels as a number has bytes
    bins, order = bins.to(torch.int16 if num_segments < 2**15 else torch.int32).sort(stable=True)
    ends = torch.searchsorted(bins, torch.arange(num_segments + 1, device=bins.device, dtype=bins.dtype))
    return torch.segment_reduce(x[order], "sum", offsets=ends, unsafe=True)


def _mean_and_count(
    x: Float[Tensor, "*batch"], mask: Bool[Tensor, "*batch"], all_sum: AllSum
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    sums = torch.stack([x.masked_fill(~mask, 0).sum(), mask.sum()])
    total, count = all_sum(sums).unbind()
    return total / count.clamp(min=1), count


def _centre(
    x: Float[Tensor, "*batch"], mask: Bool[Tensor, "*batch"], all_sum: AllSum
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, ""]]:
    """Elements less their mean, 0 outside the mask, and their count.

    The mean of the remainder after the first subtraction is subtracted too: it is the rounding error of the first
    mean, which a division by a tiny standard deviation would blow up when all elements are equal.
    """
    mean, count = _mean_and_count(x, mask, all_sum)
    rough = x - mean
    rest, _ = _mean_and_count(rough, mask, all_sum)
    return (rough - rest).masked_fill(~mask, 0), count


# --- the largest elements over all ranks, independent of how the batch is split ---

_DIGIT_BITS = 8


@torch.no_grad()
def kth_largest(
    x: Float[Tensor, "*batch"], k: Float[Tensor, ""], mask: Bool[Tensor, "*batch"], all_sum: AllSum = local
) -> Float[Tensor, ""]:
    """The k-th largest element over the mask and all ranks, in float32, k >= 1; minus infinity where there are fewer.

    A radix selection: four counts of 256 digits find the element's 32 bits, from the highest on.
    """
    bits = x.detach().float().contiguous().view(torch.int32)
    # whole numbers in [0, 2^32) in the order of the floats: the larger a negative float's bits, the less it is
    key, flat_mask = (torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits).long() + 2**31).flatten(), mask.flatten()
    prefix, left = key.new_zeros(1), k.to(key.dtype).reshape(1)
    enough = all_sum(flat_mask.sum()) >= k
    for shift in range(32 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        alike = flat_mask & (key >> (shift + _DIGIT_BITS) == prefix)
        digit = key >> shift & (2**_DIGIT_BITS - 1)
        count = all_sum(key.new_zeros(2**_DIGIT_BITS + 1).index_add(0, digit, alike.to(key.dtype)))
        from_here_on = count.flip(0).cumsum(0).flip(0)  # how many have this digit or a higher one
        chosen = ((from_here_on >= left).sum(0, keepdim=True) - 1).clamp(min=0)
        left = left - from_here_on.gather(0, chosen + 1)
        prefix = (prefix << _DIGIT_BITS) | chosen
    ordered = (prefix - 2**31).int()
    bits = torch.where(ordered < 0, ordered ^ 0x7FFF_FFFF, ordered)
    return torch.where(enough, bits.view(torch.float32)[0], -torch.inf)


@torch.no_grad()
def highest(
    x: Float[Tensor, "*batch"], share: float, mask: Bool[Tensor, "*batch"], all_sum: AllSum = local
) -> Bool[Tensor, "*batch"]:
    """True on the elements at or above the ``1 - share`` quantile over the mask and all ranks, with what equals it.

    The quantile is the interpolated one: the k-th largest of n, ``k = n - ceil((1 - share)(n - 1))``, is the least that
    reaches it.

    Source: the entropy filter of https://arxiv.org/abs/2506.01939 as in TRL, https://github.com/huggingface/trl.
    """
    count = all_sum(mask.sum()).double()
    # the tolerance keeps 0.2 * 10 at 2 despite rounding
    k = (count - ((1 - share) * (count - 1) - 1e-9).ceil()).clamp(min=1)
    return (x.float() >= kth_largest(x, k, mask, all_sum)) & mask


@torch.no_grad()
def covariance(
    log_prob: Float[Tensor, "*batch"],
    advantage: Float[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"],
    all_sum: AllSum = local,
) -> Float[Tensor, "*batch"]:
    """``(A - mean A)(log_prob - mean log_prob)`` with means over the mask and all ranks; 0 outside the mask.

    Where it is high, following the advantage costs entropy.

    Source: https://arxiv.org/abs/2505.22617.
    """
    centred = [x - masked_mean(x, mask, all_sum) for x in (advantage, log_prob)]
    return (centred[0] * centred[1]).masked_fill(~mask, 0)


@torch.no_grad()
def top_fraction(
    x: Float[Tensor, "*batch"], fraction: float, mask: Bool[Tensor, "*batch"], all_sum: AllSum = local
) -> Bool[Tensor, "*batch"]:
    """True on the ``fraction`` of the mask (of all ranks) with the largest elements, at least one.

    Elements that tie at the border are all left out: if all are equal, none is chosen.
    """
    beyond = kth_largest(x, _number(fraction, mask, all_sum) + 1, mask, all_sum)
    return (x.float() > beyond) & mask


@torch.no_grad()
def random_fraction(
    noise: Float[Tensor, "*batch"],
    fraction: float,
    candidate: Bool[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"],
    all_sum: AllSum = local,
) -> Bool[Tensor, "*batch"]:
    """True on as many random candidates as are ``fraction`` of the mask (of all ranks), at least one; all, if fewer.

    Args:
        noise: a random number of each element.
    """
    least = kth_largest(noise, _number(fraction, mask, all_sum), candidate, all_sum)
    return (noise >= least) & candidate


@torch.no_grad()
def element_noise(seed: int, *content: Float[Tensor, "*batch"] | Int[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """A number of each element, uniform in [0, 1), that follows from the seed and the contents of the element.

    Unlike numbers drawn in order it depends neither on the place of the element nor on how the batch is spread over
    ranks. Elements of the same content have the same number.
    """
    state = torch.full_like(content[0], seed, dtype=torch.int64)
    for tensor in content:
        # + 0.0 makes one zero of two
        bits = (tensor + 0.0).float().view(torch.int32).long() if tensor.is_floating_point() else tensor.long()
        state = hash_pair(state ^ bits, torch.zeros_like(state))
    return unit(state)


def _number(fraction: float, mask: Bool[Tensor, "*batch"], all_sum: AllSum) -> Float[Tensor, ""]:
    """Elements in the fraction of the mask, rounded down but at least one."""
    return (fraction * all_sum(mask.sum()).double() + 1e-9).floor().clamp(min=1)


# --- metrics of an update: 0-dim, over all ranks, never NaN for an empty mask ---


@torch.no_grad()
def explained_variance(
    value: Float[Tensor, "*batch"],
    target: Float[Tensor, "*batch"],
    mask: Bool[Tensor, "*batch"],
    all_sum: AllSum = local,
) -> Float[Tensor, ""]:
    """``1 - Var(target - value) / Var(target)``: 1 is perfect, 0 no better than a constant; 0 if the target is constant."""
    centred, count = _centre(target, mask, all_sum)
    total = all_sum(centred.square().sum()) / count.clamp(min=1)
    centred, _ = _centre(target - value, mask, all_sum)
    unexplained = all_sum(centred.square().sum()) / count.clamp(min=1)
    return (1 - unexplained / total).masked_fill(total == 0, 0)


@torch.no_grad()
def zero_variance_groups(
    score: Float[Tensor, " episode *part"],
    group_id: Int[Tensor, " episode"],
    num_groups: int,
    member: Bool[Tensor, " episode"],
    all_sum: AllSum = local,
) -> Float[Tensor, ""]:
    """Share of the groups of two or more whose members all have the same score, so that they teach nothing.

    Where the score has parts, all of them must be the same.
    """
    parts = score.unbind(dim=-1) if score.dim() > 1 else (score,)
    bounds = [segment_min_max(part, group_id, num_groups, member) for part in parts]
    equal = torch.stack([lowest == highest for lowest, highest in bounds]).all(dim=0)
    compared = segment_sum(member.to(score), group_id, num_groups) > 1
    return masked_mean(equal.to(score), compared, all_sum)
