"""Texts as a rollout: tokens are observations, the tokens that follow them actions."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor

from groupwise.data.rollout import RolloutBuffer, TensorSpec
from groupwise.errors import DataError


class TextRow(NamedTuple):
    """A prompt and one continuation of it, in the tokens that were really read and written.

    The continuation is what the model wrote and, over several turns, what it was answered in between. Sequences after
    ``completion`` have an entry for each of its tokens; what they say of tokens that the model did not write is ignored.
    """

    prompt: Sequence[int]
    completion: Sequence[int]
    log_probs: Sequence[float]
    """Under the distribution that the tokens were drawn from."""
    reward: float | Sequence[float] | None
    """Of the whole completion, or of each of its tokens, whoever wrote them; None: nobody can say, so that the row neither
    counts nor is compared."""
    terminated: bool
    """Whether the model ended it; else its length was cut."""
    group: int
    """Which prompt of this iteration."""
    turn: Sequence[int] | None = None
    """Which of the model's turns wrote the token, from 0; -1: none did. None: one turn wrote all."""
    support: Sequence[Sequence[int]] | None = None
    """The tokens that could be drawn, equally many each time. None: all of them."""
    trained: bool = True
    """False: the row counts in its group, but has no loss."""
    greedy: bool = False
    """Whether the likeliest token was taken each time: the others are compared with such a row (ReMax)."""
    reward_parts: tuple[float, ...] = ()
    """What each of several functions says, unweighted; 0 where it says nothing."""


def text_rollout(
    rows: Sequence[TextRow], *, padding: Literal["left", "right"] = "right", device: torch.device | str = "cpu"
) -> TensorDict:
    """The rollout ``[N, T+1]`` of the rows; ``loss_mask`` is True where the action is a token that the model wrote.

    Slot t holds token t and, as its action, token t+1; a completion's reward stands at its last token. ``step``
    counts from the prompt's first token, so that members' steps correspond. Keys that no row has are left out:
    ``turn_id``, ``support`` (-1 where any token could be drawn), ``trained``, ``greedy``, ``reward_parts``.

    Raises:
        DataError: a prompt or completion without tokens, or not one entry for each token.
    """
    for number, row in enumerate(rows):
        _check(number, row)
    lengths = [len(row.prompt) + len(row.completion) for row in rows]
    num_slots = max(lengths)
    starts = [num_slots - length if padding == "left" else 0 for length in lengths]
    tokens = _spread([[*row.prompt, *row.completion] for row in rows], starts, num_slots, torch.tensor(0))
    place = torch.arange(num_slots) - torch.tensor(starts)[:, None]
    prompt, total = torch.tensor([len(row.prompt) for row in rows]), torch.tensor(lengths)
    valid = (place >= 0) & (place < total[:, None] - 1)
    last = place == total[:, None] - 2
    first = [start + len(row.prompt) - 1 for row, start in zip(rows, starts, strict=True)]
    turn = _spread([row.turn or [0] * len(row.completion) for row in rows], first, num_slots, torch.tensor(-1))
    counts = torch.tensor([row.reward is not None and not row.greedy for row in rows])
    ended = torch.tensor([row.terminated for row in rows])
    rewards = [row.reward if isinstance(row.reward, Sequence) else _at_the_end(row) for row in rows]
    keys = {
        "obs": tokens,
        "action": tokens.roll(-1, dims=1) * valid,
        "reward": _spread(rewards, first, num_slots, torch.tensor(0.0)),
        "terminated": last & ended[:, None],
        "truncated": last & ~ended[:, None],
        "valid": valid,
        "loss_mask": valid & (place >= prompt[:, None] - 1) & (turn >= 0) & counts[:, None],
        "sample_log_prob": _spread([row.log_probs for row in rows], first, num_slots, torch.tensor(0.0)),
        "group_id": _where(valid, torch.tensor([row.group for row in rows])),
        "episode_id": _where(valid, torch.arange(len(rows))),
        "step": place.clamp(min=0) * valid,
    }
    keys |= _optional(rows, first, valid, last)
    if any(row.turn is not None for row in rows):
        keys["turn_id"] = turn
    return TensorDict(keys, batch_size=(len(rows), num_slots)).to(device)


class TextBuffer(RolloutBuffer):
    """Checks rollouts of texts, which are as long and as many as they happen to be: nothing is allocated beforehand."""

    def __init__(self, action_spec: TensorSpec, *, value: bool = False, device: torch.device | str = "cpu") -> None:
        super().__init__(0, 0, obs_spec=action_spec, action_spec=action_spec, value=value, device=device)

    def start_rollout(self) -> TensorDict:
        """An empty rollout, which the collector replaces."""
        return TensorDict({}, batch_size=(0, 0), device=self.device)

    def add(self, rollout: TensorDict) -> None:
        """Take a collected rollout after checking it.

        Raises:
            DataError: a missing key, a wrong shape or dtype, or a non-finite number in a valid slot (names row and step).
        """
        self.num_rows = rollout.shape[0]
        super().add(rollout)


def _optional(rows: Sequence[TextRow], first: Sequence[int], valid: Tensor, last: Tensor) -> dict[str, Tensor]:
    """Keys that rows may have."""
    keys: dict[str, Tensor] = {}
    width = max((len(row.support[0]) for row in rows if row.support), default=0)
    if width:
        anything = [-1] * width
        support = [row.support or [anything] * len(row.completion) for row in rows]
        keys["support"] = _spread(support, first, valid.shape[1], torch.full((width,), -1))
    if not all(row.trained for row in rows):
        keys["trained"] = valid & torch.tensor([row.trained for row in rows])[:, None]
    if any(row.greedy for row in rows):
        scored = torch.tensor([row.greedy and row.reward is not None for row in rows])
        keys["greedy"] = valid & scored[:, None]
    if any(row.reward_parts for row in rows):
        keys["reward_parts"] = (
            torch.tensor([row.reward_parts for row in rows], dtype=torch.float32)[:, None] * last[..., None]
        )
    return keys


def _spread(entries: Sequence[Sequence[Any]], first: Sequence[int], num_slots: int, empty: Tensor) -> Tensor:
    """Entries of each row from its first place on, ``empty`` elsewhere."""
    out = empty.expand(len(entries), num_slots, *empty.shape).clone()
    lengths = torch.tensor([len(values) for values in entries])
    row = torch.arange(len(entries)).repeat_interleave(lengths)
    place = torch.arange(len(row)) + (torch.tensor(first) - lengths.cumsum(0) + lengths)[row]
    out[row, place] = torch.tensor([entry for values in entries for entry in values], dtype=empty.dtype)
    return out


def _at_the_end(row: TextRow) -> list[float]:
    assert not isinstance(row.reward, Sequence)
    return [0.0] * (len(row.completion) - 1) + [float(row.reward or 0.0)]


def _where(valid: Tensor, number: Tensor) -> Tensor:
    return torch.where(valid, number[:, None], -1)


def _check(number: int, row: TextRow) -> None:
    if not row.prompt or not row.completion:
        empty = "completion" if row.prompt else "prompt"
        raise DataError(f"row {number} has no {empty}; fix: at least one token, such as the end of text")
    entries = {
        "log-probabilities": row.log_probs,
        "turns": row.turn,
        "supports": row.support,
        "rewards": row.reward if isinstance(row.reward, Sequence) else None,
    }
    for name, values in entries.items():
        if values is not None and len(values) != len(row.completion):
            raise DataError(
                f"row {number} has {len(values)} {name} for {len(row.completion)} tokens; fix: one for each"
            )
