"""Whole groups of attempts at shared starts: what GRPO learns from."""

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from groupwise.collectors.base import Collector, Episode
from groupwise.collectors.branching import Brancher
from groupwise.collectors.carry import Carry, Versions
from groupwise.collectors.labels import Tally, label, mark_greedy, policy_version
from groupwise.collectors.outcomes import Outcomes
from groupwise.collectors.schedule import Attempt, Group, Schedule
from groupwise.collectors.supply import Supply
from groupwise.collectors.writer import FinalValues, RolloutWriter
from groupwise.config.algorithm import CollectionCfg
from groupwise.data.rollout import Nested, lengthen
from groupwise.envs.base import GroupEnv, Mask, Snapshot
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
        self._carry: Carry | None = None
        self._unfinished = self.collection.unfinished
        """What the next ``collect`` does with unfinished groups."""
        self._metrics: dict[str, float] = {}
        self.branching = self.collection.branching
        self._brancher = Brancher(
            self.branching,
            env,
            policy,
            harder=self.collection.zero_variance == "harder",
            window=attempt_steps,
            seed=seed,
            rank=rank,
        )
        self._check()
        if verify_start and env.start_report is None:
            env.start_report = verify_group_start(env, seed=derive_seed(seed, "verify", rank))
        self.start_report = env.start_report
        """What the check of the shared start found."""
        log.info("siblings share their start: %s", self.start_report)
        self._extra_steps = env.extra_steps
        """Of the environment, when it was last looked at."""

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """Whole groups, about ``num_steps`` steps a row; as long as the row that was busy longest.

        After an error what was carried over is lost, and counts as dropped.
        """
        carry, self._carry = self._carry, None
        at_stake = carry.steps if carry else 0
        try:
            return self._collect(num_steps, rollout, carry)
        except BaseException:
            self.dropped_steps += at_stake
            raise

    def _collect(self, num_steps: int, rollout: TensorDict, carry: Carry | None) -> TensorDict:
        generator = torch.Generator(self.policy.device)
        generator.manual_seed(derive_seed(self.seed, "action", self.rank, self.iteration))
        schedule = Schedule(self.env.num_envs, block_size=self.env.block_size, head=carry.head if carry else 0)
        supply = self._make_supply(schedule, num_steps)
        rollout, carried = carry.unpack(rollout, schedule, num_steps) if carry else (rollout, None)
        overdue = self._overdue(carry)
        writer = RolloutWriter(rollout, value=not self.policy.actor_only)
        finals = FinalValues()
        outcomes = Outcomes(self.collection, schedule, supply, self._brancher, env_id=self.env.env_id)
        self._brancher.begin(schedule.unfinished())
        begun = schedule.assign(supply)
        obs = self._start(begun) if begun or carry is None else carry.obs
        act = self.policy.acting()
        while self._goes_on(schedule, supply, overdue):
            t = schedule.tick
            if t == writer.num_steps:
                rollout = lengthen(rollout, 2 * t + 1)
                writer = RolloutWriter(rollout, value=not self.policy.actor_only)
            writer.observe(t, obs)
            if t == self._brancher.due:
                self._brancher.capture(schedule)
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
        self._account(label(rollout, schedule), schedule, outcomes.lost_members)
        if self.collection.unfinished == "carry":
            self._carry_over(rollout, schedule, carried)
        if self.members > self.group_size:
            rollout["greedy"] = mark_greedy(rollout, schedule)
        self._unfinished = self.collection.unfinished
        self.iteration += 1
        return rollout

    def settle(self) -> Literal["settled", "after next"]:
        """When nothing is carried over: now, or after the next ``collect``, which finishes all groups."""
        if self.collection.unfinished == "finish":
            return "settled"
        self._unfinished = "finish"
        return "after next"

    def restart(self) -> None:
        """Drop what was kept of earlier iterations: the next ``collect`` begins with fresh groups.

        It counts the steps of groups that were carried over as wasted.
        """
        self._brancher.forget()
        if self._carry is not None:
            self.dropped_steps += self._carry.steps
            self.env.hold(self._carry.running)
            self._carry = None

    def representative(self) -> Sequence[Episode]:
        """All episodes of the rollout: they are whole, and of the policy as it is now.

        The latest 100 where groups are carried over: a window favours short episodes.
        """
        return super().representative() if self.collection.unfinished == "carry" else self.finished

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
        if self.collection.unfinished == "branch":
            raise EnvError(
                "collection.unfinished='branch' is what TorchGroupCollector does, with simulators in torch; fix: that, or 'finish'"
            )
        if self.collection.unfinished == "carry" and not self.policy.actor_only:
            raise EnvError(
                "collection.unfinished='carry' keeps no values, and the policy has a critic; fix: an actor_only policy, or "
                "'finish'"
            )
        self._check_branching()
        if env.block_size > 1:
            self._check_blocks()

    def _check_branching(self) -> None:
        env, harder = self.env, self.collection.zero_variance == "harder"
        if (self.branching.points or harder) and not env.can_branch:
            setting = "collection.branching.points=0" if self.branching.points else "collection.zero_variance='skip'"
            raise EnvError(f"states of {env.env_id} cannot be captured (tier {env.start_tier!r}); fix: {setting}")
        if self.branching.points and self.branching.stem == "single" and harder:
            raise EnvError(
                "collection.zero_variance='harder' looks for states in which siblings' returns differ, and single stems "
                "have no siblings; fix: collection.branching.stem='group'"
            )

    def _check_blocks(self) -> None:
        env, members = self.env, self.members
        blocks = f"{env.env_id} starts blocks of {env.block_size} rows together"
        if env.block_size != members:
            size = env.block_size - members + self.group_size
            raise EnvError(f"{blocks}, but a group has {members} attempts; fix: group_size={size}")
        if self.collection.lost_member == "complete":
            raise EnvError(f"{blocks}, so that a lost member cannot be started again alone; fix: lost_member='drop'")
        if self.branching.points and self.branching.stem == "single":
            raise EnvError(f"{blocks}, so that a stem cannot run alone; fix: collection.branching.stem='group'")

    def _goes_on(self, schedule: Schedule, supply: Supply, overdue: list[Group]) -> bool:
        """Whether another step is due."""
        if self._unfinished == "finish":
            return bool(schedule.running.any())
        return supply.is_open() or any(group.fate == "open" for group in overdue)

    def _overdue(self, carry: Carry | None) -> list[Group]:
        """Groups that this iteration has to finish."""
        oldest = self.iteration - self.collection.max_staleness
        return [group for group in carry.groups if group.born <= oldest] if carry else []

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

    def _carry_over(self, rollout: TensorDict, schedule: Schedule, carried: Versions | None) -> None:
        """Keep unfinished groups for the next iteration; write down which policy sampled each step."""
        versions = np.full((self.env.num_envs, schedule.tick), self.iteration)
        if carried is not None:
            versions[:, : schedule.head] = carried
        self._carry = Carry(rollout, schedule, versions)
        age = self.iteration - versions[rollout["loss_mask"][:, :-1].cpu().numpy()]
        self._metrics["rollout/staleness_mean"] = float(age.mean()) if age.size else 0.0
        rollout["policy_version"] = policy_version(rollout, versions)

    def _make_supply(self, schedule: Schedule, num_steps: int) -> Supply:
        return Supply(
            self.collection,
            self._brancher,
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
        self._brancher.follow(begun)
        num_rows = self.env.num_envs
        seeded, restored = (np.zeros(num_rows, dtype=np.bool_) for _ in range(2))
        start_seed, noise_seed = (np.zeros(num_rows, dtype=np.int64) for _ in range(2))
        snapshots: list[Snapshot | None] = [None] * num_rows
        for attempt in begun:
            row, group = attempt.row, attempt.group
            noise_seed[row] = self._noise_seed(attempt)
            if group.role == "branch":
                restored[row], snapshots[row] = True, group.snapshot
            else:
                seeded[row], start_seed[row] = True, group.start_seed
        if seeded.any():
            obs = self.env.start(seeded, start_seed, noise_seed)
        if restored.any():
            obs = self.env.restore(restored, snapshots, noise_seed)
        return obs

    def _noise_seed(self, attempt: Attempt) -> int:
        group = attempt.group
        path: tuple[int | str, ...] = ("noise", self.rank, group.born, group.number)
        if self.collection.noise == "independent" or attempt.tries:
            path += (attempt.member,)
        if attempt.tries:
            path += ("again", attempt.tries)
        return derive_seed(self.seed, *path)

    def _account(self, tally: Tally, schedule: Schedule, lost_members: int) -> None:
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
        if self.collection.lost_member != "raise":
            self._metrics["rollout/lost_members"] = float(lost_members)
        if self.collection.zero_variance != "keep":
            skipped = sum(group.fate == "skipped" for group in tally.groups)
            self._metrics |= {
                "rollout/skipped_groups": float(skipped),
                "rollout/skipped_steps": tally.skipped / self.last_steps,
            }
        if self._brancher.active:
            branches = sum(group.role == "branch" for group in tally.groups)
            self._metrics |= {
                "rollout/branch_groups": float(branches),
                "rollout/branch_steps": tally.branched / self.last_steps,
            }
