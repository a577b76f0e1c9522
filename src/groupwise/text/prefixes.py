"""The common prefix of a group's rows, which a language model encodes once (prefix sharing)."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Prefixes(NamedTuple):
    """Rows ``[N, T]`` cut into U common beginnings and N rests."""

    number: Int[Tensor, " row"]
    """Which beginning each row has."""
    head: Int[Tensor, "prefix head"]
    """Tokens of the beginnings, padded on the left."""
    head_valid: Bool[Tensor, "prefix head"]
    tail: Int[Tensor, "row tail"]
    """Tokens of the rests, padded on the right."""
    tail_valid: Bool[Tensor, "row tail"]
    place: Int[Tensor, "row step"]
    """Of each slot of the rows, its place in its row's text."""
    length: Int[Tensor, " row"]
    """Of each row's beginning."""

    def gather(
        self,
        head: Float[Tensor, "prefix head width"],
        tail: Float[Tensor, "row tail width"],
        mask: Bool[Tensor, "row step"],
    ) -> Float[Tensor, "token width"]:
        """What stands at the slots of the mask, in their order, from the two parts."""
        row = mask.nonzero()[:, 0]
        place, length, number = self.place[mask], self.length[row], self.number[row]
        in_head = number * head.shape[1] + head.shape[1] - length + place
        in_tail = head.shape[0] * head.shape[1] + row * tail.shape[1] + place - length
        both = torch.cat([head.flatten(0, 1), tail.flatten(0, 1)])
        return both[torch.where(place < length, in_head, in_tail)]


@torch.no_grad()
def find_prefixes(
    tokens: Int[Tensor, "row step"], valid: Bool[Tensor, "row step"], group: Int[Tensor, "row step"]
) -> Prefixes | None:
    """The longest beginning that all rows of a group share, for each group here; None where no two rows are of one group.

    A row keeps a token at least for itself, so that every rest has a part in the second pass.
    """
    rows = torch.arange(len(tokens), device=tokens.device)
    start = valid.long().argmax(dim=1)
    known, number = torch.unique(group[rows, start], return_inverse=True)
    if len(known) == len(tokens):
        return None
    total = valid.sum(dim=1)
    place = torch.arange(tokens.shape[1], device=tokens.device)
    text = tokens.gather(1, (place + start[:, None]).clamp(max=tokens.shape[1] - 1))  # begins in column 0
    first = rows.new_full((len(known),), len(tokens)).scatter_reduce(0, number, rows, "amin")
    alike = (text == text[first[number]]) & (place < total[:, None] - 1)
    common = alike.long().cumprod(dim=1).sum(dim=1)
    shared = common.new_full((len(known),), tokens.shape[1]).scatter_reduce(0, number, common, "amin")
    shared = _with_less_of_lone_rows(shared, number, total)
    if int(shared.min()) < 1:
        return None
    width, length = int(shared.max()), shared[number]
    back = torch.arange(width, device=tokens.device) - width + shared[:, None]
    ahead = torch.arange(int((total - length).max()), device=tokens.device) + length[:, None]
    return Prefixes(
        number=number,
        head=text[first].gather(1, back.clamp(min=0)),
        head_valid=back >= 0,
        tail=text.gather(1, ahead.clamp(max=tokens.shape[1] - 1)),
        tail_valid=ahead < total[:, None],
        place=place - start[:, None],
        length=length,
    )


def _with_less_of_lone_rows(
    shared: Int[Tensor, " prefix"], number: Int[Tensor, " row"], total: Int[Tensor, " row"]
) -> Int[Tensor, " prefix"]:
    """A row alone in its group shares all of itself, and all heads would be as wide: only as much as makes no tail wider."""
    alone = torch.bincount(number) == 1
    rest = (total - shared[number])[~alone[number]].amax()
    needed = shared.new_zeros(len(shared)).scatter_(0, number, total) - rest
    return torch.where(alone, torch.minimum(shared, needed.clamp(min=int(shared[~alone].amax()))), shared)
