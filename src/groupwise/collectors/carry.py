"""Groups that an iteration left unfinished, taken over into the next one's rollout."""

from heapq import heapify, heapreplace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from groupwise.collectors.schedule import Attempt, Group, Schedule
from groupwise.data.rollout import Nested, lengthen
from groupwise.lean_tensordict import TensorDict

_LABELS = {"valid", "loss_mask", "group_id", "episode_id", "step", "policy_version", "greedy"}
"""Written anew in each rollout."""

Versions = npt.NDArray[np.int64]


class Place(NamedTuple):
    """Where an attempt's steps go."""

    attempt: Attempt
    row: int
    began: int


class Carry:
    """What was left at the end of an iteration. It refers to that iteration's rollout, which the next one may still read.

    Args:
        versions: [N, T] iteration in which each step of the rollout was sampled.
    """

    def __init__(self, rollout: TensorDict, schedule: Schedule, versions: Versions) -> None:
        self.attempts = [a for a in schedule.attempts if a.group.fate == "open" and a.state != "stopped"]
        """Those that are running, and their siblings that ended."""
        self.waiting = schedule.waiting
        self._rollout = rollout
        self._versions = versions
        self.running = schedule.running
        """Rows that go on."""
        for attempt in schedule.unfinished():
            attempt.end = schedule.tick
        self._places, self.head = pack(self.attempts, rollout.shape[0])

    @property
    def steps(self) -> int:
        """Steps that were taken."""
        return sum(attempt.length for attempt in self.attempts)

    @property
    def obs(self) -> Nested:
        """What all rows saw last [N, ...]."""
        return self._rollout["obs"][:, -1]

    @property
    def groups(self) -> set[Group]:
        """The groups, those with members that wait included."""
        return {attempt.group for attempt in (*self.attempts, *self.waiting)}

    def unpack(self, rollout: TensorDict, schedule: Schedule, num_steps: int) -> tuple[TensorDict, Versions]:
        """The rollout with the steps in its first ``head`` columns, and the versions of these; ``schedule`` goes on from there.

        Args:
            num_steps: room behind the head.
        """
        if rollout.shape[1] <= self.head + num_steps:
            rollout = lengthen(rollout, self.head + num_steps + 1)
        source, target = self._indices()
        for key in set(rollout.keys()) - _LABELS:
            rollout[key][target] = self._rollout[key][source]
        versions = np.full((rollout.shape[0], self.head), -1)
        versions[target] = self._versions[source]
        for attempt, row, began in self._places:
            schedule.place(attempt, row, began)
        schedule.waiting = self.waiting
        return rollout, versions

    def _indices(self) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Rows and columns of all steps, where they are and where they go."""
        lengths = torch.tensor([attempt.length for attempt in self.attempts], dtype=torch.int64)
        offset = torch.cat([torch.arange(0), *(torch.arange(attempt.length) for attempt in self.attempts)])

        def at(rows: list[int], columns: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            row, column = torch.tensor([rows, columns], dtype=torch.int64).repeat_interleave(lengths, dim=1)
            return row, column + offset

        source = at([a.row for a in self.attempts], [a.began for a in self.attempts])
        target = at([place.row for place in self._places], [place.began for place in self._places])
        return source, target


def pack(attempts: list[Attempt], num_rows: int) -> tuple[list[Place], int]:
    """A place for each attempt, in as few columns as a simple rule finds, and how many these are.

    A running attempt goes on behind the last column of its own row. Others may lie anywhere: the longest first, each in
    the row that has most room, the first one of equals.
    """
    taken = [0] * num_rows
    for attempt in attempts:
        if attempt.state == "running":
            taken[attempt.row] = attempt.length
    spot: dict[Attempt, tuple[int, int]] = {}
    filled = [0] * num_rows
    rooms = [(columns, row) for row, columns in enumerate(taken)]
    heapify(rooms)
    for attempt in sorted((a for a in attempts if a.state == "ended"), key=lambda a: -a.length):
        row = rooms[0][1]
        spot[attempt] = row, filled[row]
        filled[row] += attempt.length
        taken[row] += attempt.length
        heapreplace(rooms, (taken[row], row))
    head = max(taken)
    return [Place(a, *spot.get(a, (a.row, head - a.length))) for a in attempts], head
