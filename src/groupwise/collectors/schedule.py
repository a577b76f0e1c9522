"""Which row works on which attempt, step by step: rows take attempts as they come free, groups are opened on demand."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from groupwise.envs.base import Mask, Seeds

NEVER = np.iinfo(np.int64).max


@dataclass(slots=True, eq=False)
class Group:
    """Attempts that begin in the same state."""

    born: int
    """Iteration in which it was opened."""
    number: int
    """Among the groups opened in that iteration."""
    size: int
    """Attempts."""
    sampled: int
    """The first so many of them sample their actions, the others act greedily."""
    start_seed: int = 0
    limit: int | None = None
    """Attempts are cut after so many steps."""
    members: list["Attempt"] = field(default_factory=list)
    """Attempts that reached their end."""
    fate: Literal["open", "complete", "skipped", "dropped"] = "open"


@dataclass(slots=True, eq=False)
class Attempt:
    """One member's try."""

    group: Group
    member: int
    tries: int = 0
    """How often this member was lost before."""
    row: int = -1
    began: int = -1
    """Column of the rollout that holds its first step."""
    end: int = -1
    """Column behind its last step."""
    state: Literal["waiting", "running", "ended", "stopped"] = "waiting"
    """``stopped``: it will never reach its end."""
    terminated: bool = False

    @property
    def greedy(self) -> bool:
        """Whether it takes the policy's most likely actions."""
        return self.member >= self.group.sampled

    @property
    def length(self) -> int:
        """Steps it took."""
        return self.end - self.began


class Schedule:
    """Attempts in the order in which they were handed out, and the rows that they run in.

    Args:
        block_size: rows come in blocks of so many, each for a whole group; 1: each row on its own.
    """

    def __init__(self, num_rows: int, *, block_size: int = 1) -> None:
        self.tick = 0
        """Column of the step that comes next."""
        self.steps = 0
        """Environment steps taken."""
        self.running: Mask = np.zeros(num_rows, dtype=np.bool_)
        self.greedy: Mask = np.zeros(num_rows, dtype=np.bool_)
        """Rows that act greedily."""
        self.attempts: list[Attempt] = []
        self.waiting: deque[Attempt] = deque()
        """Members of open groups that no row has taken yet."""
        self._block_size = block_size
        self._current: Seeds = np.full(num_rows, -1, dtype=np.int64)
        """Number of the attempt that each row works on."""
        self._deadline: Seeds = np.full(num_rows, NEVER, dtype=np.int64)
        self._next_deadline: int = NEVER
        self._nobody: Mask = np.zeros(num_rows, dtype=np.bool_)
        self._log: list[Seeds] = []

    def assign(self, supply: Callable[[], Group | None]) -> list[Attempt]:
        """Attempts that free rows take now, of groups that wait or that ``supply`` opens until it has no more."""
        rows = np.flatnonzero(self._free_rows()).tolist()
        while len(self.waiting) < len(rows) and (group := supply()) is not None:
            self.waiting.extend(Attempt(group, member) for member in range(group.size))
        begun = [self._begin(self.waiting.popleft(), row) for row in rows[: len(self.waiting)]]
        self._next_deadline = int(self._deadline.min())
        return begun

    def cut(self, ended: Mask) -> Mask:
        """Rows whose attempt reaches its limit with the step that is being taken, without having ended (or failed) in it."""
        if self.tick + 1 < self._next_deadline:
            return self._nobody
        return self.running & (self.tick + 1 >= self._deadline) & ~ended

    def advance(self) -> None:
        """Count the step that every running row just took."""
        self._log.append(self._current.copy())
        self.steps += int(np.count_nonzero(self.running))
        self.tick += 1

    def finish(self, rows: Mask) -> list[Attempt]:
        """The attempts of these rows, which are free from now on."""
        attempts = [self.attempts[number] for number in self._current[rows].tolist()]
        for attempt in attempts:
            attempt.end, attempt.state = self.tick, "ended"
        self.running = self.running & ~rows
        self._current[rows] = -1
        self.greedy[rows] = False
        self._deadline[rows] = NEVER
        return attempts

    def drop(self, group: Group) -> Mask:
        """Rows whose attempts of this group were stopped; those that wait never begin."""
        self.waiting = deque(attempt for attempt in self.waiting if attempt.group is not group)
        rows = np.zeros_like(self.running)
        rows[[a.row for a in self.attempts if a.group is group and a.state == "running"]] = True
        for attempt in self.finish(rows):
            attempt.state = "stopped"
        return rows

    def history(self) -> npt.NDArray[np.int64]:
        """Number of the attempt of each row and step [N, T], -1 where there was none."""
        return np.stack(self._log, axis=1)

    def _free_rows(self) -> Mask:
        if self._block_size == 1:
            return ~self.running
        blocks = self.running.reshape(-1, self._block_size).any(axis=1)
        return ~blocks.repeat(self._block_size)

    def _begin(self, attempt: Attempt, row: int) -> Attempt:
        attempt.state, attempt.row, attempt.began = "running", row, self.tick
        limit = attempt.group.limit
        self._current[row] = len(self.attempts)
        self._deadline[row] = NEVER if limit is None else attempt.began + limit
        self.running[row] = True
        self.greedy[row] = attempt.greedy
        self.attempts.append(attempt)
        return attempt
