"""Texts as a rollout: tokens are observations, the tokens that follow them actions."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from groupwise.errors import DataError


class TextRow(NamedTuple):
    """A prompt and one completion of it, in the tokens that were really read and written."""

    prompt: Sequence[int]
    completion: Sequence[int]
    log_probs: Sequence[float]
    """Of the completion's tokens, under the distribution that they were drawn from."""
    reward: float | None
    """Of the whole completion; None: nobody can say, so that the row neither counts nor is compared."""
    terminated: bool
    """Whether the model ended it; else its length was cut."""
    group: int
    """Which prompt of this iteration."""


def text_rollout(
    rows: Sequence[TextRow], *, padding: Literal["left", "right"] = "right", device: torch.device | str = "cpu"
) -> TensorDict:
    """The rollout ``[N, T+1]`` of the rows; ``loss_mask`` is True where the action is a token of a completion.

    Slot t holds token t and, as its action, token t+1; the reward stands at the completion's last token. ``step``
    counts from the prompt's first token, so that siblings' steps correspond.

    Raises:
        DataError: a prompt or completion without tokens, or not one log-probability for each token.
    """
    for number, row in enumerate(rows):
        _check(number, row)
    lengths = [len(row.prompt) + len(row.completion) for row in rows]
    num_slots = max(lengths)
    shape = (len(rows), num_slots)
    tokens, log_prob = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        first = num_slots - length if padding == "left" else 0
        begin = first + len(row.prompt) - 1
        tokens[number, first : first + length] = torch.tensor([*row.prompt, *row.completion])
        log_prob[number, begin : first + length - 1] = torch.tensor(row.log_probs)
    start = torch.tensor([num_slots - n if padding == "left" else 0 for n in lengths])
    place = torch.arange(num_slots) - start[:, None]
    prompt, total = torch.tensor([len(row.prompt) for row in rows]), torch.tensor(lengths)
    valid = (place >= 0) & (place < total[:, None] - 1)
    last = place == total[:, None] - 2
    scored = torch.tensor([row.reward is not None for row in rows])
    ended = torch.tensor([row.terminated for row in rows])
    reward = torch.tensor([row.reward or 0.0 for row in rows])
    keys = {
        "obs": tokens,
        "action": tokens.roll(-1, dims=1) * valid,
        "reward": reward[:, None] * last,
        "terminated": last & ended[:, None],
        "truncated": last & ~ended[:, None],
        "valid": valid,
        "loss_mask": valid & (place >= prompt[:, None] - 1) & scored[:, None],
        "sample_log_prob": log_prob,
        "group_id": _where(valid, torch.tensor([row.group for row in rows])),
        "episode_id": _where(valid, torch.arange(len(rows))),
        "step": place.clamp(min=0) * valid,
    }
    return TensorDict(keys, batch_size=shape).to(device)


def _where(valid: Tensor, number: Tensor) -> Tensor:
    return torch.where(valid, number[:, None], -1)


def _check(number: int, row: TextRow) -> None:
    if not row.prompt or not row.completion:
        empty = "completion" if row.prompt else "prompt"
        raise DataError(f"row {number} has no {empty}; mend: at least one token, such as the end of text")
    if len(row.log_probs) != len(row.completion):
        raise DataError(
            f"row {number} has {len(row.log_probs)} log-probabilities for {len(row.completion)} tokens; mend: one for each"
        )
