"""Evaluation of a policy over exactly n episodes, each with its own seed."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from groupwise.collectors.vector import acting_on_finite
from groupwise.config.algorithm import OnNonFinite
from groupwise.config.run import EvaluationMetric
from groupwise.data.rollout import Nested, all_finite, allocate, leaves
from groupwise.envs.base import GroupEnv, successes_by_task
from groupwise.errors import DataError, DivergedError, EnvError
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.base import Policy
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
        found = {}
        for task, flags in successes_by_task(zip(self.tasks or (), self.successes or (), strict=False)).items():
            rate = sum(flags) / len(flags)
            # a prompt's completions count once
            number = max(1, len(flags) * self.episodes // len(self.successes or ()))
            found[task] = TaskSuccess(rate, wilson_95(rate, number), number)
        return found

    def score(self, metric: EvaluationMetric) -> float:
        """The mean return or the success rate; an ``EnvError`` if the environment does not say the latter."""
        if metric == "return":
            return self.return_mean
        if self.success_rate is None:
            raise EnvError(
                f"no success rate: none of {self.episodes} episodes ended with a success flag; fix: info['is_success'], of "
                "a text environment info['success'], at the last step of each episode, or evaluation.metric='return'"
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
        DivergedError: an action is not, for an observation that is.
    """
    was_training, num_envs = policy.training, env.num_envs
    policy.eval()
    batch = allocate(env.obs_spec, episodes, device=policy.device)
    returns, lengths, tasks = np.zeros(episodes), np.zeros(episodes, np.int64), np.full(episodes, "", dtype=object)
    running, success, tells_success = np.ones(episodes, np.bool_), *np.zeros((2, episodes), np.bool_)
    for first in range(0, episodes, num_envs):  # plays these episodes, one in each row
        act = policy.player().act
        act = act if on_nonfinite == "stop" else acting_on_finite(act)
        count = min(num_envs, episodes - first)
        played, rows = slice(first, first + count), slice(0, count)
        obs = env.start(
            np.ones(num_envs, np.bool_),
            np.array([derive_seed(seed, "eval", first + row) for row in range(num_envs)], np.int64),
            np.array([derive_seed(seed, "eval", first + row, "noise") for row in range(num_envs)], np.int64),
        )
        if count < num_envs:
            env.pause(np.arange(num_envs) >= count)
        for step in range(max_steps):
            batch[played] = obs[rows]
            generator = None
            if not deterministic:
                generator = torch.Generator(policy.device).manual_seed(derive_seed(seed, "act", step))
            if deterministic and on_nonfinite == "stop" and type(policy) is ActorCritic:
                action = policy.mode(batch)  # what act gives, in half of its time
            else:
                action = act(batch, deterministic, generator).action
            action = policy.env_action(action)[played]
            if action.is_floating_point() and not all_finite(action):
                bad = running[played] & ~action.isfinite().flatten(1).all(dim=1).cpu().numpy()
                if bad.any():
                    episode = first + int(bad.argmax())
                    raise _not_finite(batch[episode], f"of evaluation episode {episode} at step {step} is not finite")
            if count < num_envs:
                action = torch.cat([action, action.new_zeros(num_envs - count, *action.shape[1:])])  # of paused rows
            stepped = env.step(action)
            obs = stepped.obs
            reward = stepped.reward[rows].cpu().numpy()
            returns[played] += (
                np.nan_to_num(reward, nan=0.0, posinf=0.0, neginf=0.0) if on_nonfinite == "zero" else reward
            )
            lengths[played] += running[played]
            ended = running[played] & (stepped.terminated | stepped.truncated)[rows].cpu().numpy()
            if not ended.any():
                continue
            if "success" in stepped.info:
                success[played] |= ended & stepped.info["success"][rows].cpu().numpy()
                tells_success[played] |= ended
            if "task" in stepped.info:
                tasks[played][ended] = stepped.info["task"][rows][ended]
            running[played] &= ~ended
            if not running[played].any():
                break
    policy.train(was_training)
    kept = np.isfinite(returns)
    if not kept.all():
        what = f"return of evaluation episode {kept.argmin()} is not finite"
        if on_nonfinite == "stop" or not kept.any():
            raise DataError(f"{what}; fix: correct the environment's rewards")
        log.warning("%s; %d of %d episodes are left out", what, (~kept).sum(), episodes)
    names = tasks[kept].tolist()
    return EvaluationResult(
        tuple(returns[kept].tolist()),
        tuple(lengths[kept].tolist()),
        successes=tuple(success[kept].tolist()) if tells_success[kept].any() else None,
        cut_episodes=int(running[kept].sum()),
        tasks=tuple(names) if any(names) else None,
    )


def _not_finite(obs: Nested, where: str) -> DataError | DivergedError:
    """The error for an action that is not finite: the policy's, if its observation is finite."""
    if all(map(all_finite, leaves(obs))):
        return DivergedError.because(f"the action {where}, although its observation is finite")
    return DataError(f"the observation {where}; fix: correct the environment")
