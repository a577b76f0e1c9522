"""Which elements of a batch stand out, over all ranks: the same ones however the batch is cut and spread.

Axes: batch = any shape, [B] or [B, T]. What is masked out may hold anything, NaN included. Nothing here waits for the
device, and no shape depends on the data.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.functional.reduce import AllSum, local, masked_mean
from groupwise.functional.row_random import hash_pair, unit

_DIGIT_BITS = 8


@torch.no_grad()
def kth_largest(
    x: Float[Tensor, "*batch"],
    k: Float[Tensor, ""],
    mask: Bool[Tensor, "*batch"],
    all_sum: AllSum = local,
) -> Float[Tensor, ""]:
    """The k-th largest element over the mask and all ranks, in float32, k >= 1; minus infinity where there are fewer.

    A radix selection: four counts of 256 digits find the element's 32 bits, from the highest on.
    """
    key, flat_mask = _sortable(x).flatten(), mask.flatten()
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
    return torch.where(enough, _unsortable(prefix)[0], -torch.inf)


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
    # the tolerance keeps 0.2 * 10 at 2 whatever the rounding
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
    """A number of each element, uniform in [0, 1), that follows from the seed and what the element holds.

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


def _sortable(x: Float[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """Whole numbers in [0, 2^32) in the order of the floats."""
    bits = x.detach().float().contiguous().view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFF_FFFF, bits)  # the larger a negative float's bits, the less it is
    return ordered.long() + 2**31


def _unsortable(key: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    ordered = (key - 2**31).int()
    bits: Tensor = torch.where(ordered < 0, ordered ^ 0x7FFF_FFFF, ordered)
    return bits.view(torch.float32)
