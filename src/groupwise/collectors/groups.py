"""Whole groups of attempts at shared starts: what GRPO learns from."""

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from groupwise.collectors.base import Collector, Episode
from groupwise.collectors.labels import Tally, label, mark_greedy
from groupwise.collectors.outcomes import Outcomes
from groupwise.collectors.schedule import Attempt, Schedule
from groupwise.collectors.supply import Supply
from groupwise.collectors.writer import FinalValues, RolloutWriter
from groupwise.config.algorithm import CollectionCfg
from groupwise.data.rollout import Nested, lengthen
from groupwise.envs.base import GroupEnv, Mask
from groupwise.envs.groups import verify_group_start
from groupwise.errors import EnvError
from groupwise.lean_tensordict import TensorDict
from groupwise.policies.base import Action, Policy
from groupwise.seeding import derive_seed

log = logging.getLogger(__name__)


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
        self._metrics: dict[str, float] = {}
        self._check()
        if verify_start and env.start_report is None:
            env.start_report = verify_group_start(env, seed=derive_seed(seed, "verify", rank))
        self.start_report = env.start_report
        """What the check of the shared start found."""
        log.info("siblings share their start: %s", self.start_report)
        self._extra_steps = env.extra_steps
        """Of the environment, when it was last looked at."""

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """Whole groups, about ``num_steps`` steps a row; as long as the row that was busy longest."""
        generator = torch.Generator(self.policy.device)
        generator.manual_seed(derive_seed(self.seed, "action", self.rank, self.iteration))
        schedule = Schedule(self.env.num_envs, block_size=self.env.block_size)
        supply = self._make_supply(schedule, num_steps)
        writer = RolloutWriter(rollout, value=not self.policy.actor_only)
        finals = FinalValues()
        outcomes = Outcomes(self.collection, schedule, supply, env_id=self.env.env_id)
        obs = self._start(schedule.assign(supply))
        act = self.actor()
        while schedule.running.any():
            t = schedule.tick
            if t == writer.num_steps:
                rollout = lengthen(rollout, 2 * t + 1)
                writer = RolloutWriter(rollout, value=not self.policy.actor_only)
            writer.observe(t, obs)
            action = self._act(act, obs, schedule, generator)
            writer.act(t, action)
            step = self.env.step(self.policy.env_action(action.action))
            terminated, truncated = step.terminated.cpu().numpy(), step.truncated.cpu().numpy()
            failed = None if step.failed is None else step.failed.cpu().numpy()
            cut = schedule.cut(terminated | truncated if failed is None else terminated | truncated | failed)
            truncated = truncated | cut
            writer.outcome(t, step, torch.from_numpy(truncated))
            obs = step.obs
            schedule.advance()
            ended = terminated | truncated
            if ended.any() or failed is not None:
                if not self.policy.actor_only:
                    finals.remember(t, truncated & ~terminated, obs)
                outcomes.end(ended, terminated, rollout)
                idle = cut if failed is None else cut | outcomes.lose(failed & schedule.running)
                obs = self._go_on(schedule.assign(supply), idle, obs)
        writer.observe(schedule.tick, obs)
        rollout = rollout[:, : schedule.tick + 1]
        if not self.policy.actor_only:
            finals.fill(rollout, self.policy, obs)
        self._account(label(rollout, schedule), schedule, outcomes.env_errors)
        if self.members > self.group_size:
            rollout["greedy"] = mark_greedy(rollout, schedule)
        self.iteration += 1
        return rollout

    def restart(self) -> None:
        """Nothing is under way between two iterations."""

    def representative(self) -> Sequence[Episode]:
        """All episodes of the rollout: they are whole, and of the policy as it is now."""
        return self.finished

    def metrics(self) -> dict[str, float]:
        """``rollout/*`` numbers; ``docs/collection.md`` says what each counts."""
        return super().metrics() | self._metrics

    def close(self) -> None:
        """Free the environments."""
        self.env.close()

    def _check(self) -> None:
        env = self.env
        if env.max_episode_steps is None and self.attempt_steps is None:
            raise EnvError(
                f"{env.env_id} has no step limit that is known, so an attempt might never end; fix: "
                "env.max_episode_steps (also where it truncates by itself), or attempt_steps"
            )
        if self.collection.partial_groups == "truncate":
            raise EnvError(
                "collection.partial_groups='truncate' is what TorchGroupCollector does, with simulators in torch; fix: that, or 'complete'"
            )
        if env.block_size > 1:
            self._check_blocks()

    def _check_blocks(self) -> None:
        env, members = self.env, self.members
        blocks = f"{env.env_id} starts blocks of {env.block_size} rows together"
        if env.block_size != members:
            size = env.block_size - members + self.group_size
            raise EnvError(f"{blocks}, but a group has {members} attempts; fix: group_size={size}")
        if self.collection.on_env_error == "retry":
            raise EnvError(f"{blocks}, so that an attempt cannot be started again alone; fix: on_env_error='drop'")

    def _act(self, act: Callable[..., Action], obs: Nested, schedule: Schedule, generator: torch.Generator) -> Action:
        """What every row does: its own draw, or the policy's most likely action in greedy attempts."""
        action = act(obs, generator=generator)
        if self.members == self.group_size or not schedule.greedy.any():
            return action
        mode = act(obs, deterministic=True)
        greedy = torch.from_numpy(schedule.greedy).to(action.log_prob.device)
        wide = greedy.view(-1, *[1] * (action.action.dim() - 1))
        return Action(
            torch.where(wide, mode.action, action.action),
            torch.where(greedy, mode.log_prob, action.log_prob),
            action.value,
        )

    def _make_supply(self, schedule: Schedule, num_steps: int) -> Supply:
        return Supply(
            self.collection,
            schedule,
            budget=self.env.num_envs * num_steps,
            group_size=self.group_size,
            greedy=self.members - self.group_size,
            limit=self.attempt_steps,
            seed=self.seed,
            rank=self.rank,
            iteration=self.iteration,
        )

    def _go_on(self, begun: list[Attempt], idle: Mask, obs: Nested) -> Nested:
        """Observations after starting the attempts and holding those ``idle`` rows that got none."""
        if idle.any():
            idle = idle.copy()
            idle[[attempt.row for attempt in begun]] = False
            self.env.hold(idle)
        return self._start(begun) if begun else obs

    def _start(self, begun: list[Attempt]) -> Nested:
        """Observations after starting attempts in their rows."""
        num_rows = self.env.num_envs
        mask = np.zeros(num_rows, dtype=np.bool_)
        start_seed, noise_seed = (np.zeros(num_rows, dtype=np.int64) for _ in range(2))
        for attempt in begun:
            row = attempt.row
            mask[row], start_seed[row], noise_seed[row] = True, attempt.group.start_seed, self._noise_seed(attempt)
        return self.env.start(mask, start_seed, noise_seed)

    def _noise_seed(self, attempt: Attempt) -> int:
        group = attempt.group
        path: tuple[int | str, ...] = ("noise", self.rank, group.born, group.number)
        if self.collection.noise == "independent" or attempt.tries:
            path += (attempt.member,)
        if attempt.tries:
            path += ("again", attempt.tries)
        return derive_seed(self.seed, *path)

    def _account(self, tally: Tally, schedule: Schedule, env_errors: int) -> None:
        """Counters and metrics of the iteration."""
        extra = self.env.extra_steps - self._extra_steps
        self._extra_steps = self.env.extra_steps
        self.finished = tally.episodes
        self.recent.extend(self.finished)
        self.last_steps = schedule.steps + extra
        self._metrics = {
            "rollout/groups": float(len(tally.groups)),
            "rollout/idle_fraction": tally.idle_fraction,
            "rollout/wasted_steps": (tally.wasted + extra + self.dropped_steps) / self.last_steps,
        }
        self.dropped_steps = 0
        if self.collection.on_env_error != "raise":
            self._metrics["rollout/env_errors"] = float(env_errors)
        if self.collection.filter_groups:
            skipped = sum(group.fate == "skipped" for group in tally.groups)
            self._metrics |= {
                "rollout/filtered_groups": float(skipped),
                "rollout/filtered_steps": tally.skipped / self.last_steps,
            }
