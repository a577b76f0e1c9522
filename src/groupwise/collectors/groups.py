"""Whole groups of attempts at shared starts: what GRPO learns from."""

import logging

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict

from groupwise.collectors.base import Collector, Episode
from groupwise.collectors.writer import FinalValues, RolloutWriter
from groupwise.data.rollout import Nested, lengthen
from groupwise.envs.base import GroupEnv, Mask, Seeds
from groupwise.envs.groups import verify_group_start
from groupwise.errors import EnvError
from groupwise.policies.base import Policy
from groupwise.seeding import derive_seed

log = logging.getLogger(__name__)


class GroupCollector(Collector):
    """Collects groups of ``group_size`` attempts that begin in the same state and then draw their own noise.

    A row that finishes takes the next attempt at once, so siblings may run at different times (the policy is constant
    meanwhile). New groups are opened until ``num_envs * num_steps`` steps are taken; all opened groups are finished.
    Every ``collect`` begins with fresh groups.

    Args:
        env: gives observations on the policy's device.
        attempt_steps: attempts are cut (truncated) after so many steps.
        rank: of this process; each draws its own streams.
        verify_start: try out, before anything is learned, that siblings share their start bit for bit; False where
            that was done already.

    Raises:
        EnvError: nothing would ever end an attempt.
        GroupStartError: siblings do not share a start.
    """

    def __init__(
        self,
        env: GroupEnv,
        policy: Policy,
        *,
        group_size: int,
        attempt_steps: int | None = None,
        seed: int = 0,
        rank: int = 0,
        verify_start: bool = True,
    ) -> None:
        super().__init__()
        if env.max_episode_steps is None and attempt_steps is None:
            raise EnvError(
                f"{env.env_id} has no step limit, so an attempt might never end; mend: set max_episode_steps of the "
                "environment, or attempt_steps"
            )
        self.env = env
        self.policy = policy
        self.group_size = group_size
        self.attempt_steps = attempt_steps
        self.seed = seed
        self.rank = rank
        self._num_groups = 0
        self._idle_fraction = 0.0
        self.start_report = verify_group_start(env, seed=derive_seed(seed, "verify", rank)) if verify_start else None
        """What the check of the shared start found."""
        log.info("siblings share their start: %s", self.start_report)

    def collect(self, num_steps: int, rollout: TensorDict) -> TensorDict:
        """Whole groups, about ``num_steps`` steps a row; as long as the row that was busy longest."""
        generator = torch.Generator(self.policy.device)
        generator.manual_seed(derive_seed(self.seed, "action", self.rank, self.iteration))
        schedule = _Schedule(self.env.num_envs, self.group_size, self.env.num_envs * num_steps)
        writer = RolloutWriter(rollout, value=not self.policy.actor_only)
        finals = FinalValues()
        obs = self._start(schedule.assign())
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
            cut = self._cut(schedule, terminated | truncated)
            truncated = truncated | cut
            writer.outcome(t, step.reward, step.terminated, torch.from_numpy(truncated))
            obs = step.obs
            ended = terminated | truncated
            schedule.advance(ended)
            if ended.any():
                if not self.policy.actor_only:
                    finals.remember(t, truncated & ~terminated, obs)
                obs = self._restart_rows(schedule, cut, obs)
        writer.observe(schedule.tick, obs)
        rollout = rollout[:, : schedule.tick + 1]
        if not self.policy.actor_only:
            finals.fill(rollout, self.policy, obs)
        self._label(rollout, schedule)
        self.iteration += 1
        return rollout

    def restart(self) -> None:
        """Nothing to drop: every ``collect`` begins with fresh groups."""

    def representative(self) -> list[Episode]:
        """All episodes of the rollout: they are whole, and of the policy as it is now."""
        return self.finished

    def metrics(self) -> dict[str, float]:
        """``rollout/*`` numbers; ``rollout/idle_fraction`` is the share of row steps in which a row had nothing to do."""
        extra = {"rollout/groups": float(self._num_groups), "rollout/idle_fraction": self._idle_fraction}
        return super().metrics() | extra

    def close(self) -> None:
        """Free the environments."""
        self.env.close()

    def _cut(self, schedule: "_Schedule", done: Mask) -> Mask:
        if self.attempt_steps is None:
            return np.zeros_like(done)
        return schedule.running & (schedule.tick + 1 - schedule.began >= self.attempt_steps) & ~done

    def _restart_rows(self, schedule: "_Schedule", cut: Mask, obs: Nested) -> Nested:
        attempt = schedule.assign()
        started = attempt >= 0
        if (cut & ~started).any():
            self.env.hold(cut & ~started)
        return self._start(attempt) if started.any() else obs

    def _start(self, attempt: Seeds) -> Nested:
        """Observations after starting the rows that were given an attempt, by the seeds of that attempt."""
        start_seed, noise_seed = np.zeros_like(attempt), np.zeros_like(attempt)
        for row in np.flatnonzero(attempt >= 0):
            group, member = divmod(int(attempt[row]), self.group_size)
            start_seed[row] = derive_seed(self.seed, "start", self.rank, self.iteration, group)
            noise_seed[row] = derive_seed(self.seed, "noise", self.rank, self.iteration, group, member)
        return self.env.start(attempt >= 0, start_seed, noise_seed)

    def _label(self, rollout: TensorDict, schedule: "_Schedule") -> None:
        """Fill masks, ids and steps, which all follow from the schedule; count the attempts."""
        attempt, began = schedule.history()
        valid = attempt >= 0
        labels = {
            "valid": valid,
            "loss_mask": valid,
            "episode_id": attempt,
            "group_id": np.where(valid, attempt // self.group_size, -1),
            "step": np.where(valid, np.arange(attempt.shape[1]) - began[attempt], 0),
        }
        for key, array in labels.items():
            rollout[key][:, :-1] = torch.from_numpy(array)

        index = attempt[valid]
        lengths = np.bincount(index)
        returns = np.bincount(index, weights=rollout["reward"][:, :-1].cpu().numpy()[valid])
        terminated = np.bincount(index, weights=rollout["terminated"][:, :-1].cpu().numpy()[valid]) > 0
        order = np.argsort(began + lengths, kind="stable")
        ends = zip(returns[order].tolist(), lengths[order].tolist(), terminated[order].tolist(), strict=True)
        self.finished = [Episode(*end) for end in ends]
        self.recent.extend(self.finished)
        self.last_steps = schedule.steps
        self._num_groups = len(lengths) // self.group_size
        self._idle_fraction = 1.0 - schedule.steps / attempt.size


class _Schedule:
    """Which attempt each row works on, step by step.

    Attempts are numbered in the order in which they are handed out: ``a`` is member ``a % group_size`` of group
    ``a // group_size``. Since the budget only shrinks, a row that got nothing once stays idle.
    """

    def __init__(self, num_rows: int, group_size: int, budget: int) -> None:
        self.tick = 0
        self.steps = 0
        """Environment steps taken."""
        self.running: Mask = np.zeros(num_rows, dtype=np.bool_)
        self.began: Seeds = np.zeros(num_rows, dtype=np.int64)
        """Tick at which each row's attempt began."""
        self._group_size = group_size
        self._budget = budget
        self._opened = 0
        self._attempt: Seeds = np.full(num_rows, -1, dtype=np.int64)
        self._began_at: list[int] = []
        self._log: list[Seeds] = []

    def assign(self) -> Seeds:
        """Hand out attempts to free rows: [N] the new attempt of each row, -1 where there is none."""
        begun = len(self._began_at)
        rows = np.flatnonzero(~self.running)
        while self._opened < begun + len(rows) and self.steps < self._budget:
            self._opened += self._group_size
        rows = rows[: self._opened - begun]
        new = np.full_like(self._attempt, -1)
        new[rows] = np.arange(begun, begun + len(rows))
        self._attempt[rows] = new[rows]
        self._began_at += [self.tick] * len(rows)
        self.began[rows] = self.tick
        self.running[rows] = True
        return new

    def advance(self, ended: Mask) -> None:
        """Count the step that every running row just took, and free the rows whose attempt ended."""
        self._log.append(self._attempt.copy())
        self.steps += int(np.count_nonzero(self.running))
        self.tick += 1
        self.running = self.running & ~ended
        self._attempt[ended] = -1

    def history(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Attempt of each row and step [N, T], and the tick at which each attempt began."""
        return np.stack(self._log, axis=1), np.array(self._began_at)
