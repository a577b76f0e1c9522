"""Groups during collection: which row runs which episode, and the status of each group."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from groupwise.collectors.base import Episode
from groupwise.collectors.writer import RolloutWriter
from groupwise.config.algorithm import CollectionCfg
from groupwise.envs.base import EnvStep, GroupEnv, Mask
from groupwise.errors import EnvError

MAX_RETRIES = 5
"""Of one episode; more errors are unlikely to be bad luck."""


@dataclass(slots=True, eq=False)
class Group:
    """Episodes that begin in the same state."""

    number: int
    """Among the groups of the iteration."""
    start_seed: int
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
    terminated: bool = False

    @property
    def length(self) -> int:
        """Steps it took."""
        return self.end - self.start

    @property
    def in_whole_group(self) -> bool:
        """Whether all members of its group, itself included, reached their ends."""
        return self.ended and self.group.status in ("complete", "filtered")


class Ends(NamedTuple):
    """Rows whose episodes end with a step."""

    terminated: Mask
    truncated: Mask
    """By the environment, or by ``horizon``."""
    failed: Mask
    """The environment raised an error."""


class GroupTracker:
    """Which episode each row runs, step by step. Opens groups until the iteration has enough steps.

    Args:
        num_steps: environment steps of the iteration, those of filtered groups not counted.
        start_seed: of each group, by its number.
    """

    def __init__(
        self,
        env: GroupEnv,
        cfg: CollectionCfg,
        num_steps: int,
        group_size: int,
        greedy_members: int,
        start_seed: Callable[[int], int],
    ) -> None:
        self.step = 0
        """Column of the next step."""
        self.steps = 0
        """Environment steps taken."""
        self.filtered_steps = 0
        self.running, self.greedy, self._no_row = np.zeros((3, env.num_envs), dtype=np.bool_)
        self.members: list[Member] = []
        """In the order in which they began."""
        self.env_errors = 0
        self._env, self._cfg = env, cfg
        self._num_steps, self._most_steps = num_steps, num_steps * (1 + (cfg.dynamic_sampling or 0))
        self._group_size, self._num_members = group_size, group_size + greedy_members
        self._start_seed = start_seed
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
        while len(self._waiting) < len(free) and (
            self.steps < self._most_steps and self.steps - self.filtered_steps < self._num_steps
        ):
            group = Group(self._num_groups, self._start_seed(self._num_groups))
            self._waiting.extend(Member(group, i, greedy=i >= self._group_size) for i in range(self._num_members))
            self._num_groups += 1
        begun = [self._waiting.popleft() for _ in range(min(len(free), len(self._waiting)))]
        for member, row in zip(begun, free, strict=False):
            member.row, member.start = row, self.step
            self._in_row[row], self._start[row] = member, self.step
            self.running[row], self.greedy[row] = True, member.greedy
        self.members += begun
        return begun

    def count_step(self, step: EnvStep) -> Ends:
        """Count the step that every running row took; returns the rows whose episodes end with it."""
        terminated, truncated = step.terminated.cpu().numpy(), step.truncated.cpu().numpy()
        failed = self._no_row if step.failed is None else step.failed.cpu().numpy() & self.running
        self.steps += int(np.count_nonzero(self.running))
        self.step += 1
        if self._cfg.horizon is not None:
            is_long = self.running & (self.step - self._start >= self._cfg.horizon)
            truncated = truncated | is_long & ~terminated & ~failed
        return Ends(terminated, truncated, failed)

    def end(self, ends: Ends, rollout: TensorDict) -> None:
        """Free the rows of episodes that ended, and close their groups."""
        for member in self._free(np.flatnonzero(ends.terminated | ends.truncated).tolist()):
            group = member.group
            member.ended, member.terminated = True, bool(ends.terminated[member.row])
            group.members.append(member)
            if len(group.members) == self._num_members:
                self._complete(group, rollout)
        if ends.failed.any():
            self._fail(np.flatnonzero(ends.failed).tolist())

    def _complete(self, group: Group, rollout: TensorDict) -> None:
        group.status = "complete"
        if self._cfg.dynamic_sampling is not None and has_equal_returns(group, rollout):
            group.status = "filtered"
            self.filtered_steps += sum(member.length for member in group.members)

    def _fail(self, rows: list[int]) -> None:
        """Retry episodes that failed, or drop their groups."""
        if self._cfg.on_env_error == "raise":
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
    valid, loss_mask, greedy = np.zeros((3, *shape), dtype=np.bool_)
    episode_id, group_id = np.full((2, *shape), -1)
    step = np.zeros(shape, dtype=np.int64)
    group_ids: dict[Group, int] = {}
    for number, member in enumerate(member for member in tracker.members if member.in_whole_group):
        slots = member.row, slice(member.start, member.end)
        valid[slots] = True
        loss_mask[slots] = member.group.status == "complete" and not member.greedy
        greedy[slots] = member.greedy
        episode_id[slots] = number
        group_id[slots] = group_ids.setdefault(member.group, len(group_ids))
        step[slots] = np.arange(member.length)
    labels = {"valid": valid, "loss_mask": loss_mask, "episode_id": episode_id, "group_id": group_id, "step": step}
    if any(member.greedy for member in tracker.members):
        rollout["greedy"] = torch.zeros_like(rollout["valid"])
        labels["greedy"] = greedy
    for key, array in labels.items():
        rollout[key][:, :-1] = torch.from_numpy(array)


def finished_episodes(rollout: TensorDict, tracker: GroupTracker, writer: RolloutWriter) -> list[Episode]:
    """Episodes that reached their ends, in the order of these, without greedy ones."""
    reward = rollout["reward"].cpu().numpy()
    ended = [member for member in tracker.members if member.ended and not member.greedy]
    ended.sort(key=lambda member: member.end)
    returns = [float(reward[a.row, a.start : a.end].cumsum(dtype=np.float64)[-1]) for a in ended]
    where = [a.row for a in ended], [a.end - 1 for a in ended]
    ends = zip(returns, ended, writer.outcomes(*where), strict=True)
    return [Episode(total, a.length, a.terminated, *outcome) for total, a, outcome in ends]
