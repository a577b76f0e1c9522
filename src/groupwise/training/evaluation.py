"""Evaluation of a policy over exactly n episodes, each with its own seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from groupwise.data.rollout import Nested, allocate
from groupwise.envs.base import GroupEnv
from groupwise.errors import DataError
from groupwise.policies.base import Policy
from groupwise.report.scores import mean_ci95
from groupwise.seeding import derive_seed

MAX_STEPS = 100_000
"""Truncates the episodes of environments that have no step limit."""


@dataclass(frozen=True)
class EvaluationResult:
    """Scores of n episodes."""

    returns: tuple[float, ...]
    """Undiscounted sum of the raw rewards of each episode."""
    lengths: tuple[int, ...]
    """Steps of each episode."""

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

    def __repr__(self) -> str:
        """Mean, interval and number; the episodes themselves may be thousands."""
        return f"{type(self).__name__}({self.line()})"

    def line(self) -> str:
        """The result as a line that scripts can read."""
        return f"return_mean={self.return_mean:.6g} ci95={shown(self.ci95)} episodes={self.episodes}"

    def report(self) -> dict[str, Any]:
        """All of it as plain data."""
        numbers = {"return_mean": self.return_mean, "ci95": self.ci95, "episodes": self.episodes}
        return numbers | {"length_mean": self.length_mean, "returns": list(self.returns)}

    def metrics(self) -> dict[str, float]:
        """``eval/*`` numbers for the log."""
        return {
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
    policy: Policy, env: GroupEnv, *, episodes: int, seed: int, deterministic: bool = True, max_steps: int = MAX_STEPS
) -> EvaluationResult:
    """Result of ``episodes`` whole episodes; episode i starts from ``derive_seed(seed, "eval", i)``.

    The result does not depend on the number of environments: episode i is row i of the policy's batch, and each step
    of that batch has its own random generator.

    Args:
        env: plays ``num_envs`` episodes at once.
        max_steps: truncates episodes of environments that have no step limit.

    Raises:
        DataError: an episode's return is not finite.
    """
    was_training = policy.training
    policy.eval()
    obs = allocate(env.obs_spec, episodes, device=policy.device)
    results = [
        _play_round(policy, env, obs, first, seed, deterministic, max_steps)
        for first in range(0, episodes, env.num_envs)
    ]
    policy.train(was_training)
    returns, lengths = (torch.cat(parts) for parts in zip(*results, strict=True))
    if not bool(returns.isfinite().all()):
        raise DataError(
            f"return of evaluation episode {int((~returns.isfinite()).nonzero()[0])} is not finite; fix the environment's rewards"
        )
    return EvaluationResult(tuple(returns.tolist()), tuple(lengths.tolist()))


def _play_round(
    policy: Policy, env: GroupEnv, batch: Nested, first: int, seed: int, deterministic: bool, max_steps: int
) -> tuple[Tensor, Tensor]:
    """Returns and lengths of episodes ``first, first + 1, ...``, one in each row of ``env`` that has one left."""
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
    for step in range(max_steps):
        batch[episodes] = obs[rows]
        generator = None
        if not deterministic:
            generator = torch.Generator(policy.device).manual_seed(derive_seed(seed, "act", step))
        action = policy.env_action(policy.act(batch, deterministic, generator).action)[episodes]
        unused = action.new_zeros(env.num_envs - count, *action.shape[1:])  # of paused rows
        stepped = env.step(torch.cat([action, unused]))
        obs = stepped.obs
        returns += stepped.reward[rows].cpu()
        lengths += running
        running &= ~(stepped.terminated | stepped.truncated)[rows].cpu()
        if not running.any():
            break
    return returns, lengths
