"""What becomes of attempts that end or are lost, and of their groups."""

import numpy as np
import torch
from tensordict import TensorDict

from groupwise.collectors.schedule import Attempt, Group, Schedule
from groupwise.collectors.supply import Supply
from groupwise.config.algorithm import CollectionCfg
from groupwise.envs.base import Mask
from groupwise.errors import EnvError
from groupwise.functional.diagnostics import zero_variance_groups
from groupwise.functional.returns import episode_return

MAX_TRIES = 5
"""A member that is lost more often than this is lost for a reason that trying again does not fix."""


class Outcomes:
    """Of one iteration."""

    def __init__(self, cfg: CollectionCfg, schedule: Schedule, supply: Supply, *, env_id: str) -> None:
        self.env_errors = 0
        self._cfg = cfg
        self._schedule = schedule
        self._supply = supply
        self._env_id = env_id

    def end(self, rows: Mask, terminated: Mask, rollout: TensorDict) -> None:
        """The attempts of these rows reached their end."""
        for attempt in self._schedule.finish(rows):
            group = attempt.group
            attempt.terminated = bool(terminated[attempt.row])
            group.members.append(attempt)
            if len(group.members) == group.size:
                self._close(group, rollout)

    def lose(self, rows: Mask) -> Mask:
        """The environments of these rows failed; returns the rows whose attempts were stopped with them.

        Raises:
            EnvError: nobody asked to go on, or a member is lost again and again.
        """
        stopped = np.zeros_like(rows)
        if not rows.any():
            return stopped
        if self._cfg.on_env_error == "raise":
            raise EnvError(
                f"environment {int(np.flatnonzero(rows)[0])} of {self._env_id} failed; fix: the environment, or "
                "collection.on_env_error='retry' or 'drop'"
            )
        for attempt in self._schedule.finish(rows):
            attempt.state = "stopped"
            self.env_errors += 1
            if self._cfg.on_env_error == "drop":
                stopped |= self._drop(attempt.group)
            else:
                self._try_again(attempt)
        return stopped

    def _close(self, group: Group, rollout: TensorDict) -> None:
        """All members of the group reached their end."""
        group.fate = "complete"
        if self._cfg.filter_groups and did_equally_well(group, rollout):
            group.fate = "skipped"
            self._supply.skip(group)

    def _drop(self, group: Group) -> Mask:
        group.fate = "dropped"
        return self._schedule.drop(group)

    def _try_again(self, attempt: Attempt) -> None:
        if attempt.tries == MAX_TRIES:
            raise EnvError(
                f"a member of a group was lost {MAX_TRIES + 1} times in a row in {self._env_id}; fix: the environment, "
                "or collection.on_env_error='drop'"
            )
        self._schedule.waiting.appendleft(Attempt(attempt.group, attempt.member, attempt.tries + 1))


def did_equally_well(group: Group, rollout: TensorDict) -> bool:
    """Whether the group is one of those that ``rollout/zero_variance_groups`` counts."""
    reward = rollout["reward"]
    members = [attempt for attempt in group.members if not attempt.greedy]
    rewards = torch.cat([reward[a.row, a.began : a.end] for a in members])
    lengths = torch.tensor([a.length for a in members])
    member = torch.arange(len(members)).repeat_interleave(lengths).to(reward.device)
    score = episode_return(rewards, member, len(members))
    group_id = torch.zeros(len(members), dtype=torch.int64, device=reward.device)
    return bool(zero_variance_groups(score, group_id, 1, torch.ones_like(group_id, dtype=torch.bool)))
