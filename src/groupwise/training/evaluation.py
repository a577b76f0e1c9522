"""Evaluation of a policy over exactly n episodes, each with its own seed."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from groupwise.collectors.vector import acting_on_finite
from groupwise.config.algorithm import OnNonFinite
from groupwise.config.run import EvaluationMetric
from groupwise.data.rollout import all_finite, allocate
from groupwise.envs.base import EnvStep, GroupEnv, successes_by_task
from groupwise.errors import DataError, EnvError
from groupwise.policies.base import Action, Policy
from groupwise.report.folder import mean_ci95, wilson_95
from groupwise.seeding import derive_seed

log = logging.getLogger(__name__)

MAX_STEPS = 100_000
"""Cuts episodes that do not end."""


class TaskSuccess(NamedTuple):
    """Success of one task's episodes."""

    success_rate: float
    success_ci95: tuple[float, float]
    """95 % confidence interval by Wilson's formula."""
    episodes: int

    @classmethod
    def of(cls, flags: Sequence[bool]) -> "TaskSuccess":
        """From the success of each episode."""
        rate = sum(flags) / len(flags)
        return cls(rate, wilson_95(rate, len(flags)), len(flags))


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of n episodes."""

    returns: tuple[float, ...]
    """Undiscounted sum of the raw rewards of each episode."""
    lengths: tuple[int, ...]
    """Steps of each episode."""
    successes: tuple[bool, ...] | None = field(default=None, kw_only=True)
    """Whether each episode succeeded; None if the environment does not say."""
    cut_episodes: int = field(default=0, kw_only=True)
    """How many episodes did not end within ``max_steps``; their returns are of their first steps only."""
    tasks: tuple[str, ...] | None = field(default=None, kw_only=True)
    """Name of each episode's task, empty where it has none; None if the environment does not say."""

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return len(self.returns)

    @property
    def return_mean(self) -> float:
        """Mean return."""
        return float(np.mean(self.returns))

    @property
    def return_std(self) -> float:
        """Unbiased standard deviation of the returns; 0 for one episode."""
        return float(np.std(self.returns, ddof=1)) if self.episodes > 1 else 0.0

    @property
    def length_mean(self) -> float:
        """Mean steps of an episode."""
        return float(np.mean(self.lengths))

    @property
    def ci95(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean by Student's t; None for one episode."""
        return mean_ci95(self.return_mean, self.return_std, self.episodes)

    @property
    def success_rate(self) -> float | None:
        """Share of the episodes that succeeded; None if the environment does not say."""
        return None if self.successes is None else float(np.mean(self.successes))

    @property
    def success_ci95(self) -> tuple[float, float] | None:
        """95 % confidence interval of the success rate by Wilson's formula; None without one."""
        return None if self.success_rate is None else wilson_95(self.success_rate, self.episodes)

    @property
    def success_by_task(self) -> dict[str, TaskSuccess]:
        """Success of each task, by name; empty unless the environment names several."""
        outcomes = zip(self.tasks or (), self.successes or (), strict=False)
        return {task: TaskSuccess.of(flags) for task, flags in successes_by_task(outcomes).items()}

    def score(self, metric: EvaluationMetric) -> float:
        """The mean return or the success rate.

        Raises:
            EnvError: it is the success rate, and the environment does not say.
        """
        if metric == "return":
            return self.return_mean
        if self.success_rate is None:
            raise EnvError(
                f"no success rate: none of {self.episodes} episodes ended with a success flag; fix: info['is_success'] at "
                "the last step of each episode, or evaluation.metric='return'"
            )
        return self.success_rate

    def __repr__(self) -> str:
        """Mean, interval and number; the episodes themselves may be thousands."""
        return f"{type(self).__name__}({self.line()})"

    def line(self) -> str:
        """The result as a line that scripts can read."""
        success = ""
        if self.success_rate is not None:
            success = f"success_rate={self.success_rate:.6g} ci95={shown(self.success_ci95)} "
        cut = f" cut_episodes={self.cut_episodes}" if self.cut_episodes else ""
        return f"return_mean={self.return_mean:.6g} ci95={shown(self.ci95)} {success}episodes={self.episodes}{cut}"

    def report(self) -> dict[str, Any]:
        """All of it as plain data."""
        numbers = {"return_mean": self.return_mean, "ci95": self.ci95, "episodes": self.episodes}
        if self.cut_episodes:
            numbers["cut_episodes"] = self.cut_episodes
        success: dict[str, Any] = {}
        if self.successes is not None:
            success = {"success_rate": self.success_rate, "success_ci95": self.success_ci95}
            success["successes"] = list(self.successes)
        if by_task := self.success_by_task:
            success["success_by_task"] = {task: found._asdict() for task, found in by_task.items()}
            success["tasks"] = list(self.tasks or ())
        return numbers | success | {"length_mean": self.length_mean, "returns": list(self.returns)}

    def metrics(self) -> dict[str, float]:
        """``eval/*`` numbers for the log."""
        success = {} if self.success_rate is None else {"eval/success_rate": self.success_rate}
        success |= {f"eval/success_rate/{task}": found.success_rate for task, found in self.success_by_task.items()}
        if self.cut_episodes:
            success["eval/cut_episodes"] = float(self.cut_episodes)
        return success | {
            "eval/return_mean": self.return_mean,
            "eval/return_std": self.return_std,
            "eval/length_mean": self.length_mean,
            "eval/episodes": float(self.episodes),
        }


def shown(interval: Sequence[float] | None) -> str:
    """An interval as text."""
    return "none" if interval is None else "[{:.6g}, {:.6g}]".format(*interval)


@torch.no_grad()
def evaluate_policy(
    policy: Policy,
    env: GroupEnv,
    *,
    episodes: int,
    seed: int,
    deterministic: bool = True,
    max_steps: int = MAX_STEPS,
    on_nonfinite: OnNonFinite = "stop",
) -> EvaluationResult:
    """Result of ``episodes`` whole episodes; episode i starts from ``derive_seed(seed, "eval", i)``.

    The result does not depend on the number of environments: episode i is row i of the policy's batch, and each step
    of that batch has its own random generator.

    Args:
        env: plays ``num_envs`` episodes at once.
        max_steps: cuts episodes that have not ended by then.
        on_nonfinite: "drop": episodes whose return is not finite are left out; "zero": such rewards are 0.

    Raises:
        DataError: an observation or a return is not finite.
    """
    was_training = policy.training
    policy.eval()
    played = _Episodes(policy, env, episodes, seed, deterministic, on_nonfinite)
    for first in range(0, episodes, env.num_envs):
        played.play_round(first, max_steps)
    policy.train(was_training)
    return played.result()


class _Episodes:
    """Plays the episodes of an evaluation; arguments as of ``evaluate_policy``."""

    def __init__(
        self, policy: Policy, env: GroupEnv, count: int, seed: int, deterministic: bool, on_nonfinite: OnNonFinite
    ) -> None:
        self.policy = policy
        self.env = env
        self.seed = seed
        self.deterministic = deterministic
        self.on_nonfinite = on_nonfinite
        self.obs = allocate(env.obs_spec, count, device=policy.device)
        self.returns, self.lengths = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
        self.running = torch.ones(count, dtype=torch.bool)
        """Of which the end was not seen."""
        self.success, self.tells_success = torch.zeros(2, count, dtype=torch.bool)
        self.tasks = np.full(count, "", dtype=object)

    def play_round(self, first: int, max_steps: int) -> None:
        """Play episodes ``first, first + 1, ...``, one in each row of the environment that has one left."""
        env, act = self.env, self.policy.player().act
        act = act if self.on_nonfinite == "stop" else acting_on_finite(act)
        numbers = range(first, first + env.num_envs)
        count = min(env.num_envs, len(self.returns) - first)
        episodes = slice(first, first + count)
        obs = env.start(
            np.ones(env.num_envs, dtype=np.bool_),
            np.array([derive_seed(self.seed, "eval", i) for i in numbers], dtype=np.int64),
            np.array([derive_seed(self.seed, "eval", i, "noise") for i in numbers], dtype=np.int64),
        )
        if count < env.num_envs:
            env.pause(np.arange(env.num_envs) >= count)
        for step in range(max_steps):
            self.obs[episodes] = obs[:count]
            action = self._act(act, step)[episodes]
            self._check_finite(action, first, step)
            unused = action.new_zeros(env.num_envs - count, *action.shape[1:])  # of paused rows
            stepped = env.step(torch.cat([action, unused]))
            obs = stepped.obs
            self._add(stepped, episodes)
            if not self.running[episodes].any():
                break

    def result(self) -> EvaluationResult:
        """What was played, without episodes whose return is not finite.

        Raises:
            DataError: there is such a return, and ``on_nonfinite`` is "stop", or there is no other.
        """
        kept = self.returns.isfinite()
        if not kept.all():
            what = f"return of evaluation episode {int((~kept).nonzero()[0])} is not finite"
            if self.on_nonfinite == "stop" or not kept.any():
                raise DataError(f"{what}; fix: correct the environment's rewards")
            log.warning("%s; %d of %d episodes are left out", what, int((~kept).sum()), len(kept))
        tasks = self.tasks[kept.numpy()].tolist()
        return EvaluationResult(
            tuple(self.returns[kept].tolist()),
            tuple(self.lengths[kept].tolist()),
            successes=tuple(self.success[kept].tolist()) if self.tells_success[kept].any() else None,
            cut_episodes=int(self.running[kept].sum()),
            tasks=tuple(tasks) if any(tasks) else None,
        )

    def _act(self, act: Callable[..., Action], step: int) -> Tensor:
        generator = None
        if not self.deterministic:
            generator = torch.Generator(self.policy.device).manual_seed(derive_seed(self.seed, "act", step))
        return self.policy.env_action(act(self.obs, self.deterministic, generator).action)

    def _add(self, stepped: EnvStep, episodes: slice) -> None:
        """Add a step to the episodes that run."""
        rows, running = slice(0, episodes.stop - episodes.start), self.running[episodes]
        reward = stepped.reward[rows].cpu()
        self.returns[episodes] += reward.nan_to_num(0.0, 0.0, 0.0) if self.on_nonfinite == "zero" else reward
        self.lengths[episodes] += running
        ended = running & (stepped.terminated | stepped.truncated)[rows].cpu()
        if "success" in stepped.info:
            self.success[episodes] |= ended & stepped.info["success"][rows].cpu()
            self.tells_success[episodes] |= ended
        if "task" in stepped.info:
            self.tasks[episodes][ended.numpy()] = stepped.info["task"][rows][ended.numpy()]
        self.running[episodes] = running & ~ended

    def _check_finite(self, action: Tensor, first: int, step: int) -> None:
        """Raise a ``DataError`` where an episode that runs has an action that is not finite."""
        if not action.is_floating_point() or all_finite(action):
            return
        bad = ~action.isfinite().flatten(1).all(dim=1).cpu() & self.running[first : first + len(action)]
        if bad.any():
            raise DataError(
                f"the observation or the action of evaluation episode {first + int(bad.nonzero()[0])} at step {step} is not "
                "finite; fix: correct the environment, or lower learning_rate if the policy diverged"
            )
