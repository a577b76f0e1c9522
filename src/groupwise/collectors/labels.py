"""What a rollout's slots are, written from the schedule when all steps are taken, and the numbers that come of it."""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool
from tensordict import TensorDict
from torch import Tensor

from groupwise.collectors.base import Episode
from groupwise.collectors.schedule import Attempt, Group, Schedule


class Tally(NamedTuple):
    """How the steps of an iteration were used."""

    episodes: list[Episode]
    """Whole episodes that ended, in the order of their ends."""
    groups: list[Group]
    """Whole groups."""
    wasted: int
    """Steps of attempts that will never be trained on."""
    skipped: int
    """Steps of groups that were left out because all members did equally well."""
    idle_fraction: float


def label(rollout: TensorDict, schedule: Schedule) -> Tally:
    """Fill masks, ids and steps of ``rollout``; returns how the steps were used.

    Only attempts of whole groups are valid. The rest of the slots look as if nothing had happened there.
    """
    history, attempts = schedule.history(), schedule.attempts
    valid = [a.state == "ended" and a.group.fate in ("complete", "skipped") for a in attempts]
    counts = [v and a.group.fate == "complete" and not a.greedy for v, a in zip(valid, attempts, strict=True)]
    group_number: dict[Group, int] = {}
    group_ids = [
        group_number.setdefault(a.group, len(group_number)) if v else -1 for v, a in zip(valid, attempts, strict=True)
    ]
    began = np.array([*(a.began for a in attempts), 0])
    step = np.arange(history.shape[1]) - began[history]
    is_valid = _table(valid, False)[history]
    labels = {
        "valid": is_valid,
        "loss_mask": _table(counts, False)[history],
        "episode_id": np.where(is_valid, (np.cumsum([*valid, False]) - 1)[history], -1),
        "group_id": _table(group_ids, -1)[history],
        "step": np.where(is_valid, step, 0),
    }
    for key, array in labels.items():
        rollout[key][:, :-1] = torch.from_numpy(array)
    return Tally(
        episodes=_episodes(rollout, schedule, history),
        groups=list(group_number),
        wasted=sum(a.length for a in attempts if _is_wasted(a)),
        skipped=sum(a.length for a in attempts if a.state == "ended" and a.group.fate == "skipped"),
        idle_fraction=1.0 - schedule.steps / history.size,
    )


def mark_greedy(rollout: TensorDict, schedule: Schedule) -> Bool[Tensor, "row slot"]:
    """True on the valid steps of greedy attempts."""
    greedy = _table([attempt.greedy for attempt in schedule.attempts], False)[schedule.history()]
    out = torch.zeros_like(rollout["valid"])
    out[:, :-1] = torch.from_numpy(greedy).to(out.device) & rollout["valid"][:, :-1]
    return out


def _table(values: list[bool] | list[int], absent: int) -> np.ndarray:
    """Values by number of the attempt; -1, where there was none, finds the last."""
    return np.array([*values, absent])


def _is_wasted(attempt: Attempt) -> bool:
    if attempt.state == "ended":
        return attempt.group.fate == "dropped"
    return attempt.state == "stopped"


def _episodes(rollout: TensorDict, schedule: Schedule, history: np.ndarray) -> list[Episode]:
    reward = rollout["reward"][:, :-1].cpu().numpy()
    worked = history >= 0
    returns = np.bincount(history[worked], weights=reward[worked], minlength=len(schedule.attempts))
    whole = [
        (attempt, episode_return)
        for attempt, episode_return in zip(schedule.attempts, returns.tolist(), strict=True)
        if attempt.state == "ended" and not attempt.greedy
    ]
    whole.sort(key=lambda pair: pair[0].end)
    return [Episode(episode_return, a.length, a.terminated) for a, episode_return in whole]
