"""Opens groups while an iteration's steps last."""

from typing import Literal

from groupwise.collectors.branching import Brancher, Start
from groupwise.collectors.schedule import Group, Schedule
from groupwise.config.algorithm import CollectionCfg
from groupwise.seeding import derive_seed


class Supply:
    """The groups of one iteration: branches of stems that ended, also in the last one, then harder starts that are due, then new ones.

    Args:
        budget: steps that the groups that are trained on should fill.
        group_size: attempts in a group that sample their actions.
        greedy: more attempts, which act greedily.
        limit: attempts are cut after so many steps.
    """

    def __init__(
        self,
        cfg: CollectionCfg,
        brancher: Brancher,
        schedule: Schedule,
        *,
        budget: int,
        group_size: int,
        greedy: int,
        limit: int | None,
        seed: int,
        rank: int,
        iteration: int,
    ) -> None:
        self._cfg = cfg
        self._brancher = brancher
        self._schedule = schedule
        self._budget = budget
        self._most = budget * (1 + cfg.resample_budget) if cfg.zero_variance == "resample" else budget
        self._group_size = group_size
        self._greedy = greedy
        self._limit = limit
        self._stream = (seed, "start", rank, iteration)
        self._iteration = iteration
        self._opened = 0
        self._replaced = 0
        """Steps of groups in whose place others are collected."""
        self._harder = 0
        """Groups that are to begin in harder states."""

    def is_open(self) -> bool:
        """Whether steps are left."""
        steps = self._schedule.steps
        return steps < self._most and steps - self._replaced < self._budget

    def __call__(self) -> Group | None:
        """The next group, None when the steps are taken."""
        if not self.is_open():
            return None
        branching, pool, queue = self._brancher.cfg, self._brancher.pool, self._brancher.queue
        if queue:
            return self._open_branch(queue.popleft())
        if self._harder and pool:
            self._harder -= 1
            return self._open_branch(pool.pop())
        role: Literal["stem", "whole"] = "stem" if branching.points and branching.stem == "single" else "whole"
        return self._open(role, None, self._limit)

    def skip(self, group: Group) -> None:
        """Take note that the members of a group did equally well."""
        if self._cfg.zero_variance == "resample":
            self._replaced += sum(attempt.length for attempt in group.members)
        if self._cfg.zero_variance == "harder":
            self._harder += 1

    def _open_branch(self, start: Start) -> Group:
        group = self._open("branch", start, self._brancher.limit(start))
        group.trained_steps = self._brancher.cfg.trained_steps
        return group

    def _open(self, role: Literal["whole", "stem", "branch"], start: Start | None, limit: int | None) -> Group:
        sampled, greedy = (1, 0) if role == "stem" else (self._group_size, self._greedy)
        group = Group(self._iteration, self._opened, sampled + greedy, sampled, role, limit=limit)
        if start is None:
            group.start_seed = derive_seed(*self._stream, self._opened)
        else:
            group.snapshot = start.snapshot
        self._opened += 1
        self._brancher.choose_stem(group)
        return group
