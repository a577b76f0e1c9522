"""Evaluation of a policy over exactly n episodes, each with its own seed."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from groupwise.collectors.base import acting_on_finite
from groupwise.config.algorithm import OnNonFinite
from groupwise.config.run import EvaluationMetric
from groupwise.data.rollout import Nested, all_finite, allocate
from groupwise.envs.base import GroupEnv
from groupwise.envs.success import successes_by_task
from groupwise.errors import DataError, EnvError
from groupwise.policies.base import Policy
from groupwise.report.scores import mean_ci95, wilson_95
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
    obs = allocate(env.obs_spec, episodes, device=policy.device)
    results = [
        _play_round(policy, env, obs, first, seed, deterministic, max_steps, on_nonfinite)
        for first in range(0, episodes, env.num_envs)
    ]
    policy.train(was_training)
    *scores, tasks = zip(*results, strict=True)
    returns, lengths, success, tells_success, cut = (torch.cat(parts) for parts in scores)
    named = np.concatenate(tasks)
    kept = returns.isfinite()
    if not kept.all():
        what = f"return of evaluation episode {int((~kept).nonzero()[0])} is not finite"
        if on_nonfinite == "stop" or not kept.any():
            raise DataError(f"{what}; fix: correct the environment's rewards")
        log.warning("%s; %d of %d episodes are left out", what, int((~kept).sum()), episodes)
        numbers = (returns, lengths, success, tells_success, cut)
        returns, lengths, success, tells_success, cut = (part[kept] for part in numbers)
        named = named[kept.numpy()]
    return EvaluationResult(
        tuple(returns.tolist()),
        tuple(lengths.tolist()),
        successes=tuple(success.tolist()) if tells_success.any() else None,
        cut_episodes=int(cut.sum()),
        tasks=tuple(named.tolist()) if any(named) else None,
    )


def _play_round(
    policy: Policy,
    env: GroupEnv,
    batch: Nested,
    first: int,
    seed: int,
    deterministic: bool,
    max_steps: int,
    on_nonfinite: OnNonFinite,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, npt.NDArray[Any]]:
    """Of episodes ``first, first + 1, ...``, one in each row of ``env`` that has one left.

    Their returns, lengths, whether they succeeded, whether the environment says so, whether they were cut, and their tasks.
    """
    act = policy.player().act
    act = act if on_nonfinite == "stop" else acting_on_finite(act)
    count = min(env.num_envs, len(batch) - first)
    rows, episodes = slice(0, count), slice(first, first + count)
    numbers = range(first, first + env.num_envs)
    obs = env.start(
        np.ones(env.num_envs, dtype=np.bool_),
        np.array([derive_seed(seed, "eval", i) for i in numbers], dtype=np.int64),
        np.array([derive_seed(seed, "eval", i, "noise") for i in numbers], dtype=np.int64),
    )
    idle = np.arange(env.num_envs) >= count
    if idle.any():
        env.pause(idle)
    returns, lengths = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.int64)
    running = torch.ones(count, dtype=torch.bool)
    success, tells_success = torch.zeros(2, count, dtype=torch.bool)
    tasks = np.full(count, "", dtype=object)
    for step in range(max_steps):
        batch[episodes] = obs[rows]
        generator = None
        if not deterministic:
            generator = torch.Generator(policy.device).manual_seed(derive_seed(seed, "act", step))
        action = policy.env_action(act(batch, deterministic, generator).action)[episodes]
        if not _finite(action) and not _finite(action[running.to(action.device)]):
            row = int((running.to(action.device) & ~action.isfinite().flatten(1).all(dim=1)).nonzero()[0])
            raise DataError(
                f"the observation or the action of evaluation episode {first + row} at step {step} is not finite; fix: correct "
                "the environment, or lower learning_rate if the policy diverged"
            )
        unused = action.new_zeros(env.num_envs - count, *action.shape[1:])  # of paused rows
        stepped = env.step(torch.cat([action, unused]))
        obs = stepped.obs
        reward = stepped.reward[rows].cpu()
        returns += reward.nan_to_num(0.0, 0.0, 0.0) if on_nonfinite == "zero" else reward
        lengths += running
        ended = running & (stepped.terminated | stepped.truncated)[rows].cpu()
        if stepped.success is not None:
            success |= ended & stepped.success[rows].cpu()
            tells_success |= ended
        if stepped.task is not None:
            tasks[ended.numpy()] = stepped.task[rows][ended.numpy()]
        running &= ~ended
        if not running.any():
            break
    return returns, lengths, success, tells_success, running, tasks


def _finite(action: Tensor) -> bool:
    return not action.is_floating_point() or all_finite(action)
