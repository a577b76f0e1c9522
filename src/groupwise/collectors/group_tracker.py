"""Groups during collection: which row runs which episode, and the status of each group."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from tensordict import TensorDict

from groupwise.collectors.base import Episode
from groupwise.collectors.writer import RolloutWriter
from groupwise.config.algorithm import CollectionCfg
from groupwise.envs.base import EnvStep, GroupEnv
from groupwise.errors import EnvError

MAX_RETRIES = 5
"""Of one episode; more errors are unlikely to be bad luck."""


@dataclass(slots=True, eq=False)
class Group:
    """Episodes that begin in the same state."""

    number: int
    """Among the groups of the iteration."""
    members: list["Member"] = field(default_factory=list)
    """Episodes that reached their end."""
    status: Literal["open", "complete", "filtered", "dropped"] = "open"


@dataclass(slots=True, eq=False)
class Member:
    """One member's episode."""

    group: Group
    index: int
    """Among the members of its group."""
    greedy: bool
    """Takes the policy's most likely actions."""
    retries: int = 0
    row: int = -1
    start: int = -1
    """Column of the rollout that holds its first step."""
    end: int = -1
    """Column behind its last step."""
    ended: bool = False
    """Reached its end instead of being stopped."""

    @property
    def length(self) -> int:
        """Steps it took."""
        return self.end - self.start

    @property
    def in_whole_group(self) -> bool:
        """Whether all members of its group, itself included, reached their ends."""
        return self.ended and self.group.status in ("complete", "filtered")


class GroupTracker:
    """Which episode each row runs, step by step. Opens groups until the iteration has enough steps.

    Args:
        num_steps: environment steps of the iteration, those of filtered groups not counted.
    """

    def __init__(self, env: GroupEnv, cfg: CollectionCfg, num_steps: int, group_size: int, greedy_members: int) -> None:
        self.step = 0
        """Column of the next step."""
        self.steps = 0
        """Environment steps taken."""
        self.filtered_steps = self.env_errors = 0
        self.running, self.greedy = np.zeros((2, env.num_envs), dtype=np.bool_)
        self.members: list[Member] = []
        """In the order in which they began."""
        self._env, self._cfg, self._num_steps = env, cfg, num_steps
        self._group_size, self._num_members = group_size, group_size + greedy_members
        self._num_groups = 0
        self._waiting: deque[Member] = deque()
        """Episodes in the order in which rows take them."""
        self._in_row: dict[int, Member] = {}
        """The episodes that run."""
        self._start = np.zeros(env.num_envs, dtype=np.int64)
        """Column of the first step of each row's episode."""

    def assign(self) -> list[Member]:
        """The episodes that free rows begin now."""
        blocks = self.running.reshape(-1, self._env.block_size).any(axis=1)
        free = np.flatnonzero(~blocks.repeat(self._env.block_size)).tolist()
        while len(self._waiting) < len(free) and self._wants_steps():
            group = Group(self._num_groups)
            self._waiting.extend(Member(group, i, greedy=i >= self._group_size) for i in range(self._num_members))
            self._num_groups += 1
        begun = [self._waiting.popleft() for _ in range(min(len(free), len(self._waiting)))]
        for member, row in zip(begun, free, strict=False):
            member.row, member.start = row, self.step
            self._in_row[row], self._start[row] = member, self.step
            self.running[row], self.greedy[row] = True, member.greedy
        self.members += begun
        return begun

    def count_step(self, step: EnvStep) -> EnvStep:
        """Count the step that every running row took; returns it with the episodes that ``horizon`` truncates."""
        self.steps += len(self._in_row)
        self.step += 1
        return step if self._cfg.horizon is None else self._truncated(step, self._cfg.horizon)

    def end(self, step: EnvStep, rollout: TensorDict) -> None:
        """Free the rows of episodes that ended or failed, and close their groups."""
        for member in self._free((step.terminated | step.truncated).nonzero()[:, 0].tolist()):
            group, member.ended = member.group, True
            group.members.append(member)
            if len(group.members) == self._num_members:
                group.status = "complete"
                if self._cfg.dynamic_sampling is not None and has_equal_returns(group, rollout):
                    group.status = "filtered"
                    self.filtered_steps += sum(member.length for member in group.members)
        if step.failed is not None:
            self._fail([row for row in step.failed.nonzero()[:, 0].tolist() if row in self._in_row])

    def _wants_steps(self) -> bool:
        useful, most = self.steps - self.filtered_steps, self._num_steps * (1 + (self._cfg.dynamic_sampling or 0))
        return useful < self._num_steps and self.steps < most

    def _truncated(self, step: EnvStep, horizon: int) -> EnvStep:
        is_long = torch.from_numpy(self.running & (self.step - self._start >= horizon)).to(step.truncated.device)
        goes_on = ~step.terminated if step.failed is None else ~(step.terminated | step.failed)
        return step._replace(truncated=step.truncated | is_long & goes_on)

    def _fail(self, rows: list[int]) -> None:
        """Retry episodes that failed, or drop their groups."""
        if rows and self._cfg.on_env_error == "raise":
            raise EnvError(
                f"environment {rows[0]} of {self._env.env_id} failed; fix: the environment, or "
                "collection.on_env_error='retry' or 'drop'"
            )
        for member in self._free(rows):
            self.env_errors += 1
            if self._cfg.on_env_error == "drop":
                self._drop(member.group)
            elif member.retries < MAX_RETRIES:
                self._waiting.appendleft(Member(member.group, member.index, member.greedy, member.retries + 1))
            else:
                raise EnvError(
                    f"an episode failed {MAX_RETRIES + 1} times in a row in {self._env.env_id}; fix: the environment, or "
                    "collection.on_env_error='drop'"
                )

    def _drop(self, group: Group) -> None:
        group.status = "dropped"
        self._waiting = deque(member for member in self._waiting if member.group is not group)
        self._free([row for row, member in self._in_row.items() if member.group is group])

    def _free(self, rows: list[int]) -> list[Member]:
        """End the episodes of these rows."""
        members = [self._in_row.pop(row) for row in rows]
        for member in members:
            member.end = self.step
        self.running[rows] = self.greedy[rows] = False
        return members


def has_equal_returns(group: Group, rollout: TensorDict) -> bool:
    """Whether ``rollout/zero_variance_groups`` counts the group."""
    members = [member for member in group.members if not member.greedy]
    rewards = [rollout["reward"][member.row, member.start : member.end] for member in members]
    returns = torch.stack([reward.sum(dtype=torch.float64).float() for reward in rewards])
    return len(members) > 1 and bool((returns == returns[0]).all())


def write_labels(rollout: TensorDict, tracker: GroupTracker) -> None:
    """Fill masks, ids and steps. Only episodes of whole groups are valid; other slots look empty."""
    shape = len(tracker.running), tracker.step
    valid, loss_mask = np.zeros((2, *shape), dtype=np.bool_)
    episode_id, group_id = np.full((2, *shape), -1)
    step = np.zeros(shape, dtype=np.int64)
    group_ids: dict[Group, int] = {}
    for number, member in enumerate(member for member in tracker.members if member.in_whole_group):
        slots = member.row, slice(member.start, member.end)
        valid[slots] = True
        loss_mask[slots] = member.group.status == "complete" and not member.greedy
        episode_id[slots] = number
        group_id[slots] = group_ids.setdefault(member.group, len(group_ids))
        step[slots] = np.arange(member.length)
    labels = {"valid": valid, "loss_mask": loss_mask, "episode_id": episode_id, "group_id": group_id, "step": step}
    for key, label in labels.items():
        rollout[key][:, :-1] = torch.from_numpy(label)


def mark_greedy(rollout: TensorDict, tracker: GroupTracker) -> None:
    """Add the mask ``greedy`` of the valid slots of greedy members."""
    rollout["greedy"] = torch.zeros_like(rollout["valid"])
    for member in tracker.members:
        if member.greedy and member.in_whole_group:
            rollout["greedy"][member.row, member.start : member.end] = True


def finished_episodes(rollout: TensorDict, tracker: GroupTracker, writer: RolloutWriter) -> list[Episode]:
    """Episodes that reached their ends, in the order of these, without greedy ones."""
    reward, terminated = (rollout[key].cpu().numpy() for key in ("reward", "terminated"))
    ended = sorted((a for a in tracker.members if a.ended and not a.greedy), key=lambda member: member.end)
    outcomes = writer.outcomes([member.row for member in ended], [member.end - 1 for member in ended])
    return [
        Episode(
            float(reward[member.row, member.start : member.end].cumsum(dtype=np.float64)[-1]),
            member.length,
            bool(terminated[member.row, member.end - 1]),
            *outcome,
        )
        for member, outcome in zip(ended, outcomes, strict=True)
    ]
