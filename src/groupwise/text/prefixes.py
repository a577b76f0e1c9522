"""The common prefix of a group's rows, which a language model encodes once (prefix sharing)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Prefixes(NamedTuple):
    """Rows ``[N, T]`` cut into U common prefixes and N suffixes."""

    number: Int[Tensor, " row"]
    """Which prefix each row has."""
    head: Int[Tensor, "prefix head"]
    """Tokens of the prefixes, padded on the left."""
    head_valid: Bool[Tensor, "prefix head"]
    tail: Int[Tensor, "row tail"]
    """Tokens of the suffixes, padded on the right."""
    tail_valid: Bool[Tensor, "row tail"]
    length: Int[Tensor, " row"]
    """Tokens of each row's prefix."""

    def gather(
        self,
        head: Float[Tensor, "prefix head width"],
        tail: Float[Tensor, "row tail width"],
        mask: Bool[Tensor, "row step"],
    ) -> Float[Tensor, "token width"]:
        """The values at the slots of the mask, in their order, from the two parts."""
        row, place = mask.nonzero().unbind(dim=1)
        length, number = self.length[row], self.number[row]
        in_head = number * head.shape[1] + head.shape[1] - length + place
        in_tail = head.shape[0] * head.shape[1] + row * tail.shape[1] + place - length
        both = torch.cat([head.flatten(0, 1), tail.flatten(0, 1)])
        return both[torch.where(place < length, in_head, in_tail)]


@torch.no_grad()
def find_prefixes(
    tokens: Int[Tensor, "row step"], valid: Bool[Tensor, "row step"], group: Int[Tensor, "row step"]
) -> Prefixes | None:
    """The longest common prefix of each group's rows, which are padded on the right; None if no two rows share one.

    A row keeps at least one token for itself, so that every suffix has a part in the second pass.
    """
    rows, place = torch.arange(len(tokens), device=tokens.device), torch.arange(tokens.shape[1], device=tokens.device)
    known, number = torch.unique(group[:, 0], return_inverse=True)
    if len(known) == len(tokens):
        return None
    total = valid.sum(dim=1)
    first = rows.new_full((len(known),), len(tokens)).scatter_reduce(0, number, rows, "amin")
    alike = (tokens == tokens[first[number]]) & (place < total[:, None] - 1)
    common = alike.long().cumprod(dim=1).sum(dim=1)
    shared = common.new_full((len(known),), tokens.shape[1]).scatter_reduce(0, number, common, "amin")
    alone = torch.bincount(number) == 1  # such a row shares all of itself, which would make every head as wide
    shared[alone] = shared[alone].clamp(max=int(shared[~alone].amax()))
    if int(shared.min()) < 1:
        return None
    width, length = int(shared.max()), shared[number]
    back = torch.arange(width, device=tokens.device) - width + shared[:, None]
    ahead = torch.arange(int((total - length).max()), device=tokens.device) + length[:, None]
    return Prefixes(
        number=number,
        head=tokens[first].gather(1, back.clamp(min=0)),
        head_valid=back >= 0,
        tail=tokens.gather(1, ahead.clamp(max=tokens.shape[1] - 1)),
        tail_valid=ahead < total[:, None],
        length=length,
    )
