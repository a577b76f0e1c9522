"""Texts as a rollout: tokens are observations, the next tokens actions."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from groupwise.data.rollout import RolloutBuffer, TensorSpec
from groupwise.errors import DataError


class TextRow(NamedTuple):
    """A prompt and one completion of it.

    The completion is the model's tokens and, over several turns, the tool's answers in between. Sequences after
    ``completion`` have an entry for each of its tokens; entries of the tool's tokens are ignored.
    """

    prompt: Sequence[int]
    completion: Sequence[int]
    log_probs: Sequence[float]
    """Under the distribution that the tokens were drawn from."""
    reward: float | Sequence[float] | None
    """Of the completion, or of each of its tokens. None: unscorable, so that the row neither has a loss nor is a baseline."""
    terminated: bool
    """Whether the model ended it; False: it was cut at the length limit."""
    group: int
    """Number of the prompt in this iteration."""
    turn: Sequence[int] | None = None
    """The model's turn that wrote each token, from 0; -1: the tool's. None: one turn wrote all."""
    support: Sequence[Tensor] | None = None
    """The tokens that could be drawn at each step, ``[kept]``; -1 fills up. None: all of them."""
    policy_version: Sequence[int] | None = None
    """From servers: the iteration whose policy generated each token; -1: the tool's."""
    trained: bool = True
    """False: the row counts in its group, but has no loss."""
    greedy: bool = False
    """Whether the most likely token was taken each time: such a row is the baseline of the others (ReMax)."""
    reward_parts: tuple[float, ...] = ()
    """The unweighted score of each reward function; 0 where it has none."""


def text_rollout(rows: Sequence[TextRow], *, device: torch.device | str = "cpu") -> TensorDict:
    """The rollout ``[N, T+1]`` of the rows, padded on the right; ``loss_mask`` is True where the model wrote the action.

    Slot t holds token t and, as its action, token t+1; a completion's reward is at its last token. ``step`` counts from
    the prompt's first token, so that members' steps correspond. Keys that no row has are left out: ``support`` and
    ``policy_version`` (-1 at tokens of others), ``trained``, ``greedy``, ``reward_parts``.

    Raises:
        DataError: a prompt or completion without tokens, or not one log-probability for each token.
    """
    for number, row in enumerate(rows):
        lengths = len(row.prompt), len(row.completion), len(row.log_probs)
        if 0 in lengths or lengths[1] != lengths[2]:
            raise DataError(
                f"row {number} has {lengths[0]} prompt tokens, {lengths[1]} completion tokens and {lengths[2]} log_probs; fix: at "
                "least one token in each, and a log-probability for each completion token"
            )
    prompt = torch.tensor([len(row.prompt) for row in rows])
    total = prompt + torch.tensor([len(row.completion) for row in rows])
    num_slots = int(total.max())
    place = torch.arange(num_slots)
    valid, last = place < total[:, None] - 1, place == total[:, None] - 2
    tokens = _spread([[*row.prompt, *row.completion] for row in rows], torch.zeros_like(prompt), num_slots, 0)
    turn = _spread([row.turn or [0] * len(row.completion) for row in rows], prompt - 1, num_slots, -1)
    counts = torch.tensor([row.reward is not None and not row.greedy for row in rows])
    ended = torch.tensor([row.terminated for row in rows])
    rewards = [
        row.reward if isinstance(row.reward, Sequence) else [0.0] * (len(row.completion) - 1) + [row.reward or 0.0]
        for row in rows
    ]
    keys = {
        "obs": tokens,
        "action": tokens.roll(-1, dims=1) * valid,
        "reward": _spread(rewards, prompt - 1, num_slots, 0.0),
        "terminated": last & ended[:, None],
        "truncated": last & ~ended[:, None],
        "valid": valid,
        "loss_mask": valid & (place >= prompt[:, None] - 1) & (turn >= 0) & counts[:, None],
        "sample_log_prob": _spread([row.log_probs for row in rows], prompt - 1, num_slots, 0.0),
        "group_id": torch.where(valid, torch.tensor([row.group for row in rows])[:, None], -1),
        "episode_id": torch.where(valid, torch.arange(len(rows))[:, None], -1),
        "step": place * valid,
        "turn_id": turn,
    }
    if rows[0].support:
        kept = pad_sequence([ids for row in rows for ids in row.support or ()], batch_first=True, padding_value=-1)
        keys["support"] = torch.full((len(rows), num_slots, kept.shape[1]), -1, dtype=torch.int32)
        keys["support"][_places([row.support or () for row in rows], prompt - 1)] = kept.int()
    if rows[0].policy_version:
        keys["policy_version"] = _spread([row.policy_version or () for row in rows], prompt - 1, num_slots, -1)
    if not all(row.trained for row in rows):
        keys["trained"] = valid & torch.tensor([row.trained for row in rows])[:, None]
    if any(row.greedy for row in rows):
        keys["greedy"] = valid & torch.tensor([row.greedy and row.reward is not None for row in rows])[:, None]
    if any(row.reward_parts for row in rows):
        keys["reward_parts"] = torch.tensor([row.reward_parts for row in rows])[:, None] * last[..., None]
    return TensorDict(keys, batch_size=(len(rows), num_slots)).to(device)


class TextBuffer(RolloutBuffer):
    """Checks rollouts of texts; their size varies, so nothing is allocated before."""

    row_name = "completion"

    def __init__(self, action_spec: TensorSpec, **settings: Any) -> None:
        super().__init__(0, 0, obs_spec=action_spec, action_spec=action_spec, **settings)

    def start_rollout(self) -> TensorDict:
        """An empty rollout, which the collector replaces."""
        return self._empty

    def add(self, rollout: TensorDict) -> None:
        """Take a collected rollout, of any number of rows, after checking it."""
        self.num_rows = rollout.shape[0]
        super().add(rollout)


def _spread(entries: Sequence[Sequence[Any]], first: Tensor, num_slots: int, empty: Any) -> Tensor:
    """Entries of each row from its slot ``first`` on, ``empty`` elsewhere."""
    fill = torch.tensor(empty)
    out = fill.expand(len(entries), num_slots).clone()
    out[_places(entries, first)] = torch.tensor([entry for values in entries for entry in values], dtype=fill.dtype)
    return out


def _places(entries: Sequence[Sequence[Any]], first: Tensor) -> tuple[Tensor, Tensor]:
    """Row and slot of each entry, where each row's entries begin at its slot ``first``."""
    lengths = torch.tensor([len(values) for values in entries])
    row = torch.arange(len(entries)).repeat_interleave(lengths)
    return row, torch.arange(len(row)) + (first - lengths.cumsum(0) + lengths)[row]
