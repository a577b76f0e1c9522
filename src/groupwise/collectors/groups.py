"""Whole groups of attempts at shared starts: what GRPO learns from."""

import logging
from typing import Literal

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from groupwise.algorithms.configs import CollectionCfg
from groupwise.collectors.base import Collector, Episode
from groupwise.collectors.labels import Tally, label
from groupwise.collectors.schedule import Attempt, Group, Schedule
from groupwise.collectors.supply import Supply
from groupwise.collectors.writer import FinalValues, RolloutWriter
from groupwise.data.rollout import Nested, lengthen
from groupwise.envs.base import EnvStep, GroupEnv, Mask
from groupwise.envs.groups import verify_group_start
from groupwise.errors import EnvError
from groupwise.functional.diagnostics import zero_variance_groups
from groupwise.functional.returns import episode_return
from groupwise.policies.base import Policy
from groupwise.seeding import derive_seed

log = logging.getLogger(__name__)

MAX_TRIES = 5
"""A member that is lost more often than this is lost for a reason that trying again does not mend."""
_NOBODY: Mask = np.zeros(1, dtype=np.bool_)


class GroupCollector(Collector):
    """Collects groups of ``group_size`` attempts that begin in the same state.

    A row that finishes takes the next attempt at once, so siblings may run at different times (the policy is constant
    meanwhile). New groups are opened until ``num_envs * num_steps`` steps are taken. ``docs/collection.md`` has what
    the settings do.

    Args:
        env: gives observations on the policy's device.
        attempt_steps: attempts are cut (truncated) after so many steps.
        greedy_attempts: so many more attempts of each group act greedily; they are a baseline and never trained on.
        rank: of this process; each draws its own streams.
        verify_start: try out, before anything is learned, that siblings share their start bit for bit; False where
            that was done already.

    Raises:
        EnvError: nothing would ever end an attempt, or the environment cannot do what a setting asks for.
        GroupStartError: siblings do not share a start.
    """

    def __init__(
        self,
        env: GroupEnv,
        policy: Policy,
        *,
        group_size: int,
        attempt_steps: int | None = None,
        collection: CollectionCfg | None = None,
        greedy_attempts: Literal[0, 1] = 0,
        seed: int = 0,
        rank: int = 0,
        verify_start: bool = True,
    ) -> None:
        super().__init__()
        self.env = env
        self.policy = policy
        self.group_size = group_size
        self.attempt_steps = attempt_steps
        self.collection = collection or CollectionCfg()
        self.members = group_size + greedy_attempts
        """Attempts in a group, the greedy one included."""
        self.seed = seed
        self.rank = rank
        self._lost_members = 0
        self._metrics: dict[str, float] = {}
        self._check()
        self.start_report = verify_group_start(env, seed=derive_seed(seed, "verify", rank)) if verify_start else None
        """What the check of the shared start found."""
        log.info("siblings share their start: %s", self.start_report)
        self._extra_steps = env.extra_steps
        """Of the environment, when it was last looked at."""

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """Whole groups, about ``num_steps`` steps a row; as long as the row that was busy longest."""
        generator = torch.Generator(self.policy.device)
        generator.manual_seed(derive_seed(self.seed, "action", self.rank, self.iteration))
        self._lost_members = 0
        schedule = Schedule(self.env.num_envs, block_size=self.env.block_size)
        supply = self._make_supply(schedule, num_steps)
        writer = RolloutWriter(rollout, value=not self.policy.actor_only)
        finals = FinalValues()
        obs = self._start(schedule.assign(supply))
        while schedule.running.any():
            t = schedule.tick
            if t == writer.num_steps:
                rollout = lengthen(rollout, 2 * t + 1)
                writer = RolloutWriter(rollout, value=not self.policy.actor_only)
            writer.observe(t, obs)
            action = self.policy.act(obs, generator=generator)
            writer.act(t, action)
            step = self.env.step(self.policy.env_action(action.action))
            terminated, truncated = step.terminated.cpu().numpy(), step.truncated.cpu().numpy()
            cut = schedule.at_limit() & ~(terminated | truncated)
            truncated = truncated | cut
            writer.outcome(t, step.reward, step.terminated, torch.from_numpy(truncated))
            obs = step.obs
            schedule.advance()
            ended, failed = terminated | truncated, self._failed(step, schedule)
            if ended.any() or failed.any():
                if not self.policy.actor_only:
                    finals.remember(t, truncated & ~terminated, obs)
                stopped = self._end(schedule, supply, rollout["reward"], ended, terminated, failed)
                obs = self._restart_rows(schedule.assign(supply), cut | stopped, obs)
        writer.observe(schedule.tick, obs)
        rollout = rollout[:, : schedule.tick + 1]
        if not self.policy.actor_only:
            finals.fill(rollout, self.policy, obs)
        self._account(label(rollout, schedule, self.group_size), schedule)
        self.iteration += 1
        return rollout

    def restart(self) -> None:
        """Nothing to drop: every ``collect`` begins with fresh groups."""

    def representative(self) -> list[Episode]:
        """All episodes of the rollout: they are whole, and of the policy as it is now."""
        return self.finished

    def metrics(self) -> dict[str, float]:
        """``rollout/*`` numbers; ``docs/collection.md`` says what each counts."""
        return super().metrics() | self._metrics

    def close(self) -> None:
        """Free the environments."""
        self.env.close()

    def _check(self) -> None:
        env, members = self.env, self.members
        if env.max_episode_steps is None and self.attempt_steps is None:
            raise EnvError(
                f"{env.env_id} has no step limit, so an attempt might never end; mend: set max_episode_steps of the "
                "environment, or attempt_steps"
            )
        if env.block_size == 1:
            return
        if env.block_size != members:
            raise EnvError(
                f"{env.env_id} starts blocks of {env.block_size} rows together, but a group has {members} attempts; "
                f"mend: group_size={env.block_size - members + self.group_size}"
            )
        if self.collection.lost_member == "complete":
            raise EnvError(
                f"{env.env_id} starts blocks of {env.block_size} rows together, so that a lost member cannot be started "
                "again alone; mend: lost_member='drop'"
            )

    def _make_supply(self, schedule: Schedule, num_steps: int) -> Supply:
        return Supply(
            self.collection,
            schedule,
            budget=self.env.num_envs * num_steps,
            members=self.members,
            limit=self.attempt_steps,
            seed=self.seed,
            rank=self.rank,
            iteration=self.iteration,
        )

    def _failed(self, step: EnvStep, schedule: Schedule) -> Mask:
        """Rows whose attempt was lost to an error."""
        if step.failed is None:
            return _NOBODY
        failed = step.failed.cpu().numpy() & schedule.running
        if failed.any() and self.collection.lost_member == "raise":
            raise EnvError(
                f"environment {int(np.flatnonzero(failed)[0])} of {self.env.env_id} failed; mend: the environment, or "
                "collection.lost_member='complete' or 'drop'"
            )
        return failed

    def _end(
        self, schedule: Schedule, supply: Supply, reward: Tensor, ended: Mask, terminated: Mask, failed: Mask
    ) -> Mask:
        """Take note of attempts that ended or were lost; returns the rows whose attempts were stopped with them."""
        stopped = np.zeros_like(schedule.running)
        for attempt in schedule.finish(ended):
            attempt.terminated = bool(terminated[attempt.row])
            attempt.group.members.append(attempt)
            if len(attempt.group.members) == attempt.group.size:
                self._close(attempt.group, supply, reward)
        for attempt in schedule.finish(failed) if failed.any() else ():
            attempt.state = "stopped"
            self._lost_members += 1
            stopped |= self._lose(attempt, schedule)
        return stopped

    def _close(self, group: Group, supply: Supply, reward: Tensor) -> None:
        """All members of the group reached their end."""
        group.fate = "complete"
        if self.collection.zero_variance != "keep" and self._did_equally_well(group, reward):
            group.fate = "skipped"
            supply.skip(group)

    def _lose(self, attempt: Attempt, schedule: Schedule) -> Mask:
        """Complete or drop the group of a lost attempt; returns the rows whose attempts were stopped with it."""
        group = attempt.group
        if self.collection.lost_member == "drop":
            group.fate = "dropped"
            return schedule.drop(group)
        if attempt.tries == MAX_TRIES:
            raise EnvError(
                f"a member of a group was lost {MAX_TRIES + 1} times in a row in {self.env.env_id}; mend: the environment, "
                "or collection.lost_member='drop'"
            )
        schedule.waiting.appendleft(Attempt(group, attempt.member, attempt.tries + 1))
        return np.zeros_like(schedule.running)

    def _did_equally_well(self, group: Group, reward: Tensor) -> bool:
        """Whether the group is one of those that ``rollout/zero_variance_groups`` counts."""
        members = [attempt for attempt in group.members if attempt.member < self.group_size]
        rewards = torch.cat([reward[a.row, a.began : a.end] for a in members])
        member = torch.arange(len(members)).repeat_interleave(torch.tensor([a.length for a in members]))
        score = episode_return(rewards, member.to(rewards.device), len(members))
        group_id = torch.zeros(len(members), dtype=torch.int64, device=rewards.device)
        return bool(zero_variance_groups(score, group_id, 1, torch.ones_like(group_id, dtype=torch.bool)))

    def _restart_rows(self, begun: list[Attempt], idle: Mask, obs: Nested) -> Nested:
        """Observations after starting the attempts and holding those ``idle`` rows that got none."""
        idle = idle.copy()
        idle[[attempt.row for attempt in begun]] = False
        if idle.any():
            self.env.hold(idle)
        return self._start(begun) if begun else obs

    def _start(self, begun: list[Attempt]) -> Nested:
        """Observations after starting attempts in their rows."""
        mask = np.zeros(self.env.num_envs, dtype=np.bool_)
        start_seed, noise_seed = (np.zeros(self.env.num_envs, dtype=np.int64) for _ in range(2))
        for attempt in begun:
            mask[attempt.row] = True
            start_seed[attempt.row] = attempt.group.start_seed
            noise_seed[attempt.row] = self._noise_seed(attempt)
        return self.env.start(mask, start_seed, noise_seed)

    def _noise_seed(self, attempt: Attempt) -> int:
        group = attempt.group
        path: tuple[int | str, ...] = ("noise", self.rank, group.born, group.number)
        if self.collection.noise == "independent" or attempt.tries:
            path += (attempt.member,)
        if attempt.tries:
            path += ("again", attempt.tries)
        return derive_seed(self.seed, *path)

    def _account(self, tally: Tally, schedule: Schedule) -> None:
        """Counters and metrics of the iteration."""
        extra = self.env.extra_steps - self._extra_steps
        self._extra_steps = self.env.extra_steps
        self.finished = tally.episodes
        self.recent.extend(self.finished)
        self.last_steps = schedule.steps + extra
        self._metrics = {
            "rollout/groups": float(len(tally.groups)),
            "rollout/idle_fraction": tally.idle_fraction,
            "rollout/wasted_steps": (tally.wasted + extra) / self.last_steps,
        }
        if self.collection.lost_member != "raise":
            self._metrics["rollout/lost_members"] = float(self._lost_members)
        if self.collection.zero_variance != "keep":
            skipped = sum(group.fate == "skipped" for group in tally.groups)
            self._metrics |= {
                "rollout/skipped_groups": float(skipped),
                "rollout/skipped_steps": tally.skipped / self.last_steps,
            }
