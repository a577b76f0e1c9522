"""Opens groups while an iteration's steps last."""

from groupwise.collectors.schedule import Group, Schedule
from groupwise.config.algorithm import CollectionCfg
from groupwise.seeding import derive_seed


class Supply:
    """The groups of one iteration.

    Args:
        budget: steps that the groups that are trained on should fill.
        group_size: attempts in a group that sample their actions.
        greedy: more attempts, which act greedily.
        limit: attempts are cut after so many steps.
    """

    def __init__(
        self,
        cfg: CollectionCfg,
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
        self._schedule = schedule
        self._budget = budget
        self._most = budget * (1 + cfg.dynamic_sampling)
        self._group_size = group_size
        self._greedy = greedy
        self._limit = limit
        self._stream = (seed, "start", rank, iteration)
        self._iteration = iteration
        self._opened = 0
        self._replaced = 0
        """Steps of groups in whose place others are collected."""

    def __call__(self) -> Group | None:
        """The next group, None when the steps are taken."""
        steps = self._schedule.steps
        if steps >= self._most or steps - self._replaced >= self._budget:
            return None
        size, seed = self._group_size + self._greedy, derive_seed(*self._stream, self._opened)
        group = Group(self._iteration, self._opened, size, self._group_size, start_seed=seed, limit=self._limit)
        self._opened += 1
        return group

    def skip(self, group: Group) -> None:
        """Take note that the members of a group did equally well."""
        self._replaced += sum(attempt.length for attempt in group.members)
