"""Whole groups of episodes at shared starts: for GRPO."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from groupwise.collectors.vector import EnvCollector, Episode, MakeActor, RolloutWriter, env_steps
from groupwise.config.algorithm import CollectionCfg
from groupwise.data.rollout import Nested, TensorDict
from groupwise.envs.base import EnvStep, GroupEnv
from groupwise.envs.starts import verify_group_start
from groupwise.errors import EnvError
from groupwise.policies.base import Action, Policy
from groupwise.seeding import derive_seed

MAX_RETRIES = 5
"""Most new starts of an episode; more errors are unlikely to be bad luck."""
MAX_EMPTY = 3
"""Iterations in a row whose groups were all dropped, after which training stops."""


@dataclass(slots=True, eq=False)
class Group:
    """Episodes that begin in the same state."""

    number: int
    """Index of the group in the iteration."""
    members: list["Member"] = field(default_factory=list)
    """Episodes that reached their end."""
    status: Literal["open", "complete", "filtered", "dropped"] = "open"


@dataclass(slots=True, eq=False)
class Member:
    """One member's episode."""

    group: Group
    index: int
    """Index of the member in its group."""
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
    """The episode of each row, step by step. Opens groups until the iteration has enough steps.

    Args:
        num_steps: environment steps of the iteration, those of filtered groups not counted.
    """

    def __init__(self, env: GroupEnv, cfg: CollectionCfg, num_steps: int, group_size: int, greedy_members: int) -> None:
        self.step = 0
        """Column of the next step."""
        self.steps = 0
        """Environment steps taken."""
        self.filtered_steps = self.env_errors = self._num_groups = 0
        self.running, self.greedy = np.zeros((2, env.num_envs), dtype=np.bool_)
        self.members: list[Member] = []
        """Members in the order in which they began."""
        self._env, self._cfg, self._num_steps = env, cfg, num_steps
        self._group_size, self.greedy_members = group_size, greedy_members
        self._waiting: deque[Member] = deque()
        """Episodes in the order in which rows take them."""
        self._in_row: dict[int, Member] = {}
        """The episodes that run."""

    def assign(self) -> list[Member]:
        """The episodes that free rows begin now."""
        blocks = self.running.reshape(-1, self._env.block_size).any(axis=1)
        free = np.flatnonzero(~blocks.repeat(self._env.block_size)).tolist()
        most = self._num_steps * (1 + (self._cfg.dynamic_sampling or 0))
        wants_steps = self.steps - self.filtered_steps < self._num_steps and self.steps < most
        while wants_steps and len(self._waiting) < len(free):
            group, size = Group(self._num_groups), self._group_size
            self._waiting.extend(Member(group, i, greedy=i >= size) for i in range(size + self.greedy_members))
            self._num_groups += 1
        begun = [self._waiting.popleft() for _ in range(min(len(free), len(self._waiting)))]
        for member, row in zip(begun, free, strict=False):
            member.row, member.start = row, self.step
            self._in_row[row] = member
            self.running[row], self.greedy[row] = True, member.greedy
        self.members += begun
        return begun

    def count_step(self, step: EnvStep) -> EnvStep:
        """Count the step that every running row took; returns it with the episodes that ``horizon`` truncates."""
        self.steps += len(self._in_row)
        self.step += 1
        return step if self._cfg.horizon is None else self._cut_long(step, self._cfg.horizon)

    def _cut_long(self, step: EnvStep, horizon: int) -> EnvStep:
        is_long = torch.zeros(len(self.running), dtype=torch.bool)
        for row, member in self._in_row.items():
            is_long[row] = self.step - member.start >= horizon
        goes_on = ~step.terminated if step.failed is None else ~(step.terminated | step.failed)
        return step._replace(truncated=step.truncated | is_long.to(step.truncated.device) & goes_on)

    def end(self, step: EnvStep, rollout: TensorDict) -> None:
        """Free the rows of episodes that ended or failed; close groups, retry episodes that failed, or drop their groups."""
        for member in self._free((step.terminated | step.truncated).nonzero()[:, 0].tolist()):
            group, member.ended = member.group, True
            group.members.append(member)
            if len(group.members) == self._group_size + self.greedy_members:
                group.status = "complete"
                if self._cfg.dynamic_sampling is not None and has_equal_returns(group, rollout):
                    group.status = "filtered"
                    self.filtered_steps += sum(one.length for one in group.members)
        if step.failed is not None:
            self._fail([row for row in step.failed.nonzero()[:, 0].tolist() if row in self._in_row])

    def _fail(self, rows: list[int]) -> None:
        """Raise an error for rows whose environments failed, retry their episodes, or drop their groups."""
        if rows and self._cfg.on_env_error == "raise":
            raise EnvError(
                f"environment {rows[0]} of {self._env.env_id} failed; fix: the environment, or "
                "collection.on_env_error='retry' or 'drop'"
            )
        for member in self._free(rows):
            self.env_errors += 1
            if self._cfg.on_env_error == "drop":
                member.group.status = "dropped"
                self._waiting = deque(other for other in self._waiting if other.group is not member.group)
                self._free([row for row, other in self._in_row.items() if other.group is member.group])
            elif member.retries < MAX_RETRIES:
                self._waiting.appendleft(Member(member.group, member.index, member.greedy, member.retries + 1))
            else:
                raise EnvError(
                    f"an episode failed {MAX_RETRIES + 1} times in a row in {self._env.env_id}; fix: the environment, or "
                    "collection.on_env_error='drop'"
                )

    def _free(self, rows: list[int]) -> list[Member]:
        """End the episodes of these rows."""
        members = [self._in_row.pop(row) for row in rows]
        for member in members:
            member.end = self.step
        self.running[rows] = self.greedy[rows] = False
        return members


def has_equal_returns(group: Group, rollout: TensorDict) -> bool:
    """Whether all sampled members have the same return, as ``rollout/zero_variance_groups`` counts groups."""
    sampled = [member for member in group.members if not member.greedy]
    rewards = [rollout["reward"][member.row, member.start : member.end] for member in sampled]
    returns = torch.stack([reward.sum(dtype=torch.float64).float() for reward in rewards])
    return len(sampled) > 1 and bool((returns == returns[0]).all())


def write_labels(rollout: TensorDict, tracker: GroupTracker) -> None:
    """Fill masks, ids and steps. Only episodes of whole groups are valid; other slots look empty.

    With greedy members, adds the mask ``greedy`` of their valid slots.
    """
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
    if tracker.greedy_members:
        rollout["greedy"] = torch.zeros_like(rollout["valid"])
        labels["greedy"] = greedy
    for key, label in labels.items():
        rollout[key][:, :-1] = torch.from_numpy(label)


class GroupCollector(EnvCollector):
    """Collects groups of ``group_size`` episodes that begin in the same state.

    A row that finishes takes the next episode at once, so members may run at different times, all with the same policy.
    New groups are opened until ``num_envs * num_steps`` steps are taken. Before the first, members are checked to share their
    start bit for bit.

    Args:
        greedy_members: further episodes of each group that act greedily: a baseline, never trained on.

    Raises:
        EnvError: there is no step limit, or the environment does not support a setting.
        GroupStartError: members do not share a start.
    """

    repeatable: ClassVar = True
    env: GroupEnv

    def __init__(
        self,
        env: GroupEnv,
        policy: Policy,
        *,
        group_size: int,
        collection: CollectionCfg | None = None,
        greedy_members: Literal[0, 1] = 0,
        seed: int = 0,
        rank: int = 0,
        actor: MakeActor | None = None,
    ) -> None:
        super().__init__(env, policy, seed=seed, rank=rank, actor=actor)
        self.group_size = group_size
        self.greedy_members = greedy_members
        self.collection = collection or CollectionCfg()
        env.horizon = self.collection.horizon
        self._empty = 0
        members = group_size + greedy_members
        if env.max_episode_steps is None and self.collection.horizon is None:
            raise EnvError(
                f"{env.env_id} has no known step limit, so an episode might never end; fix: "
                "env.max_episode_steps (also where it truncates by itself), or collection.horizon"
            )
        if self.collection.partial_groups == "truncate":
            raise EnvError(
                f"collection.partial_groups='truncate' needs a TorchGroupCollector and an environment in torch, got {env.env_id}; "
                "fix: env.vectorization='torch' (for CartPole-v1), or collection.partial_groups='complete'"
            )
        blocks = f"{env.env_id} starts blocks of {env.block_size} rows together"
        if env.block_size > 1 and env.block_size % members:
            fix = f"group_size={env.block_size - self.greedy_members}"
            raise EnvError(f"{blocks}, but a group has {members} episodes; fix: {fix}, or one that divides the block")
        if env.block_size > 1 and self.collection.on_env_error == "retry":
            raise EnvError(f"{blocks}, so an episode cannot be retried alone; fix: on_env_error='drop'")
        if env.start_report is None:
            env.start_report = verify_group_start(env, seed=derive_seed(seed, "verify", rank))

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """Whole groups, about ``num_steps`` steps a row; as long as the row that was busy longest."""
        budget = self.env.num_envs * num_steps
        tracker = GroupTracker(self.env, self.collection, budget, self.group_size, self.greedy_members)
        writer = RolloutWriter(rollout, self.policy, lambda *_: torch.from_numpy(tracker.running))
        act, generator = self.actor(), self.action_generator()
        obs = self._start(tracker.assign())
        while tracker.running.any():
            t = tracker.step
            writer.observe(t, obs)
            action = act(obs, generator=generator)
            if tracker.greedy.any():
                action = _with_modes(action, act(obs, deterministic=True), torch.from_numpy(tracker.greedy))
            writer.act(t, action)
            step = tracker.count_step(self.step_env(action))
            writer.outcome(t, step)
            obs = step.obs
            if (step.terminated | step.truncated).any() or step.failed is not None:
                writer.cut(t, step.truncated & ~step.terminated, obs)
                tracker.end(step, writer.rollout)
                self.env.pause(~tracker.running)
                if begun := tracker.assign():
                    obs = self._start(begun)
        rollout = writer.finish(tracker.step, obs)
        write_labels(rollout, tracker)
        self._tracker = tracker
        self.iteration += 1

        # steps, groups, and episodes in the order of their ends, without greedy ones
        members = tracker.members
        reward, terminated = (rollout[key].cpu().numpy() for key in ("reward", "terminated"))
        ended = sorted((m for m in members if m.ended and not m.greedy), key=lambda member: member.end)
        outcomes: Sequence[tuple[Any, ...]] = [()] * len(ended)
        if writer.reports:
            outcomes = writer.outcomes([member.row for member in ended], [member.end - 1 for member in ended])
        returns = [float(reward[m.row, m.start : m.end].cumsum(dtype=np.float64)[-1]) for m in ended]
        self.record(
            Episode(total, member.length, bool(terminated[member.row, member.end - 1]), *outcome)
            for total, member, outcome in zip(returns, ended, outcomes, strict=True)
        )
        self.last_steps = env_steps(rollout, tracker.steps)
        groups = {member.group for member in members if member.in_whole_group}
        wasted = sum(member.length for member in members if not member.in_whole_group)
        self._metrics = {
            "rollout/groups": float(len(groups)),
            "rollout/idle_fraction": 1.0 - tracker.steps / (self.env.num_envs * tracker.step),
            "rollout/wasted_steps": wasted / tracker.steps,
        }
        if self.collection.dynamic_sampling is not None:
            self._metrics["rollout/filtered_groups"] = float(sum(group.status == "filtered" for group in groups))
            self._metrics["rollout/filtered_steps"] = tracker.filtered_steps / tracker.steps
        if self.collection.on_env_error != "raise":
            self._metrics["rollout/env_errors"] = float(tracker.env_errors)
            self._empty = 0 if groups else self._empty + 1
            if self._empty == MAX_EMPTY:
                raise EnvError(
                    f"every group of {MAX_EMPTY} iterations in a row was dropped, because {self.env.env_id} failed; fix: the "
                    "environment, whose errors are above, or algorithm.collection.on_env_error='raise'"
                )
        return rollout

    def recent_episodes(self) -> Sequence[Episode]:
        """All episodes of the rollout: they are whole, and of the current policy."""
        return self.finished

    def group_start(self, group: int) -> str:
        """The seed that a group of the last rollout started from."""
        whole = dict.fromkeys(member.group.number for member in self._tracker.members if member.in_whole_group)
        return str(self._start_seed(self.iteration - 1, list(whole)[group]))

    def _start_seed(self, iteration: int, group: int) -> int:
        return derive_seed(self.seed, "start", self.rank, iteration, group)

    def _start(self, begun: list[Member]) -> Nested:
        """Observations after starting episodes in their rows."""
        mask = np.zeros(self.env.num_envs, dtype=np.bool_)
        start_seed, noise_seed = np.zeros((2, self.env.num_envs), dtype=np.int64)
        for member in begun:
            mask[member.row] = True
            start_seed[member.row] = self._start_seed(self.iteration, member.group.number)
            own = () if self.collection.noise == "shared" and not member.retries else (member.index,)
            again = ("again", member.retries) if member.retries else ()
            stream = "noise", self.rank, self.iteration, member.group.number
            noise_seed[member.row] = derive_seed(self.seed, *stream, *own, *again)
        obs = self.env.start(mask, start_seed, noise_seed)
        return self._begun(obs, mask) if self.policy.state_size else obs


def _with_modes(action: Action, modes: Action, rows: Bool[Tensor, " row"]) -> Action:
    """The actions, but the most likely ones in some rows."""

    def chosen(mode: Tensor, drawn: Tensor) -> Tensor:
        return torch.where(rows.to(drawn.device).view(-1, *[1] * (drawn.dim() - 1)), mode, drawn)

    mine, log_prob = chosen(modes.action, action.action), chosen(modes.log_prob, action.log_prob)
    return action._replace(action=mine, log_prob=log_prob)
