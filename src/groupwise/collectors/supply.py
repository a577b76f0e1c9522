"""Opens groups while an iteration's steps last."""

from groupwise.algorithms.configs import CollectionCfg
from groupwise.collectors.schedule import Group, Schedule
from groupwise.seeding import derive_seed


class Supply:
    """The groups of one iteration.

    Args:
        budget: steps that the groups that are trained on should fill.
        members: attempts in a group.
        limit: attempts are cut after so many steps.
        stream: what the seeds of the starts are derived from; the iteration is part of it.
    """

    def __init__(
        self,
        cfg: CollectionCfg,
        schedule: Schedule,
        *,
        budget: int,
        members: int,
        limit: int | None,
        seed: int,
        rank: int,
        iteration: int,
    ) -> None:
        self._cfg = cfg
        self._schedule = schedule
        self._budget = budget
        self._most = budget * (1 + cfg.resample_budget) if cfg.zero_variance == "resample" else budget
        self._members = members
        self._limit = limit
        self._stream = (seed, "start", rank, iteration)
        self._iteration = iteration
        self.opened = 0
        """Groups so far."""
        self.replaced = 0
        """Steps of groups in whose place others are collected."""

    def is_open(self) -> bool:
        """Whether steps are left."""
        steps = self._schedule.steps
        return steps < self._most and steps - self.replaced < self._budget

    def __call__(self) -> Group | None:
        """The next group, None when the steps are taken."""
        if not self.is_open():
            return None
        group = Group(self._iteration, self.opened, self._members, limit=self._limit)
        group.start_seed = derive_seed(*self._stream, self.opened)
        self.opened += 1
        return group

    def skip(self, group: Group) -> None:
        """Take note that the members of a group did equally well."""
        if self._cfg.zero_variance == "resample":
            self.replaced += sum(attempt.length for attempt in group.members)
