"""Whole groups of episodes at shared starts: for GRPO."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from tensordict import TensorDict

from groupwise.collectors.base import EnvCollector, Episode, MakeActor, env_steps
from groupwise.collectors.group_tracker import Group, GroupTracker, Member, finished_episodes, mark_greedy, write_labels
from groupwise.collectors.writer import RolloutWriter
from groupwise.config.algorithm import CollectionCfg
from groupwise.data.rollout import Nested
from groupwise.envs.base import GroupEnv, Mask
from groupwise.envs.starts import verify_group_start
from groupwise.errors import EnvError
from groupwise.policies.base import Action, Policy
from groupwise.seeding import derive_seed

MAX_EMPTY = 3
"""Iterations in a row whose groups were all dropped, after which training stops."""


class GroupCollector(EnvCollector):
    """Collects groups of ``group_size`` episodes that begin in the same state.

    A row that finishes takes the next episode at once, so members may run at different times, all with the same policy.
    New groups are opened until ``num_envs * num_steps`` steps are taken.

    Args:
        env: gives observations on the policy's device.
        greedy_members: further episodes of each group that act greedily: a baseline, never trained on.
        rank: of this process; each draws its own streams.
        verify_start: check before training that members share their start bit for bit.

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
        verify_start: bool = True,
        actor: MakeActor | None = None,
    ) -> None:
        super().__init__(env, policy, seed=seed, rank=rank, actor=actor)
        self.group_size = group_size
        self.greedy_members = greedy_members
        self.collection = collection or CollectionCfg()
        self._empty = 0
        self._check()
        if verify_start and env.start_report is None:
            env.start_report = verify_group_start(env, seed=derive_seed(seed, "verify", rank))

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """Whole groups, about ``num_steps`` steps a row; as long as the row that was busy longest."""
        budget = self.env.num_envs * num_steps
        tracker = GroupTracker(self.env, self.collection, budget, self.group_size, self.greedy_members)
        writer = RolloutWriter(rollout, self.policy)
        act, generator = self.actor(), self.action_generator()
        obs = self._start(tracker.assign())
        while tracker.running.any():
            t = tracker.step
            writer.observe(t, obs)
            action = act(obs, generator=generator)
            if tracker.greedy.any():
                action = with_greedy(action, act(obs, deterministic=True), tracker.greedy)
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
        if self.greedy_members:
            mark_greedy(rollout, tracker)
        self._count(rollout, tracker, writer)
        self.iteration += 1
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
            noise_seed[member.row] = self._noise_seed(member)
        return self.env.start(mask, start_seed, noise_seed)

    def _noise_seed(self, member: Member) -> int:
        is_shared = self.collection.noise == "shared" and not member.retries
        own = () if is_shared else (member.index,)
        again = ("again", member.retries) if member.retries else ()
        return derive_seed(self.seed, "noise", self.rank, self.iteration, member.group.number, *own, *again)

    def _count(self, rollout: TensorDict, tracker: GroupTracker, writer: RolloutWriter) -> None:
        """Count steps, groups and episodes of the rollout."""
        self.record(finished_episodes(rollout, tracker, writer))
        steps, members = tracker.steps, tracker.members
        self.last_steps = env_steps(rollout, steps)
        groups = {member.group for member in members if member.in_whole_group}
        wasted = sum(member.length for member in members if not member.in_whole_group)
        self._metrics = {
            "rollout/groups": float(len(groups)),
            "rollout/idle_fraction": 1.0 - steps / (self.env.num_envs * tracker.step),
            "rollout/wasted_steps": wasted / steps,
        }
        if self.collection.on_env_error != "raise":
            self._count_errors(tracker, groups)
        if self.collection.dynamic_sampling is not None:
            self._metrics["rollout/filtered_groups"] = float(sum(group.status == "filtered" for group in groups))
            self._metrics["rollout/filtered_steps"] = tracker.filtered_steps / steps

    def _count_errors(self, tracker: GroupTracker, groups: set[Group]) -> None:
        self._metrics["rollout/env_errors"] = float(tracker.env_errors)
        self._empty = 0 if groups else self._empty + 1
        if self._empty == MAX_EMPTY:
            raise EnvError(
                f"every group of {MAX_EMPTY} iterations in a row was dropped, because {self.env.env_id} failed; fix: the "
                "environment, whose errors are above, or algorithm.collection.on_env_error='raise'"
            )

    def _check(self) -> None:
        env, members = self.env, self.group_size + self.greedy_members
        if env.max_episode_steps is None and self.collection.horizon is None:
            raise EnvError(
                f"{env.env_id} has no known step limit, so an episode might never end; fix: "
                "env.max_episode_steps (also where it truncates by itself), or collection.horizon"
            )
        if self.collection.partial_groups == "truncate":
            raise EnvError(
                "collection.partial_groups='truncate' needs TorchGroupCollector and a torch environment; fix: these, or "
                "'complete'"
            )
        if env.block_size == 1:
            return
        blocks = f"{env.env_id} starts blocks of {env.block_size} rows together"
        if env.block_size % members:
            fix = f"group_size={env.block_size - self.greedy_members}"
            raise EnvError(f"{blocks}, but a group has {members} episodes; fix: {fix}, or one that divides the block")
        if self.collection.on_env_error == "retry":
            raise EnvError(f"{blocks}, so an episode cannot be retried alone; fix: on_env_error='drop'")


def with_greedy(sampled: Action, mode: Action, greedy: Mask) -> Action:
    """The sampled actions, with the policy's most likely ones in greedy rows."""
    rows = torch.from_numpy(greedy).to(sampled.log_prob.device)
    wide = rows.view(-1, *[1] * (sampled.action.dim() - 1))
    return sampled._replace(
        action=torch.where(wide, mode.action, sampled.action),
        log_prob=torch.where(rows.view(-1, *[1] * (sampled.log_prob.dim() - 1)), mode.log_prob, sampled.log_prob),
    )
