"""Writes a rollout one step of all rows at a time."""

from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from groupwise.data.rollout import Nested
from groupwise.envs.base import EnvStep
from groupwise.errors import DataError
from groupwise.lean_tensordict import TensorDict
from groupwise.policies.base import Action, Policy

_Views: TypeAlias = tuple[Tensor, ...] | dict[str, Any]  # Any: _Views again


class RolloutWriter:
    """The per-step views of a rollout's tensors, taken once: far cheaper to write through than ``rollout[:, t] = ...``.

    Args:
        check: look at actions before environments get them; False where the rollout is looked at as a whole.
    """

    def __init__(self, rollout: TensorDict, *, value: bool, check: bool = True) -> None:
        self._check = check
        self.num_steps = rollout.shape[1] - 1
        self._obs = _views(rollout["obs"])
        self._action = rollout["action"].unbind(1)
        self._log_prob = rollout["sample_log_prob"].unbind(1)
        self._value = rollout["value"].unbind(1) if value else None
        self._reward = rollout["reward"].unbind(1)
        parts = rollout.get("reward_parts", None)
        self._reward_parts = None if parts is None else parts.unbind(1)
        self._terminated = rollout["terminated"].unbind(1)
        self._truncated = rollout["truncated"].unbind(1)

    def observe(self, step: int, obs: Nested) -> None:
        """Write the observations [N, ...] of a slot."""
        _write(self._obs, step, obs)

    def act(self, step: int, action: Action) -> None:
        """Write what the policy did there.

        Raises:
            DataError: an action is not finite; environments answer that in ways that hide the cause.
        """
        if self._check and action.action.is_floating_point() and not bool(action.action.isfinite().all()):
            bad = ~action.action.isfinite().flatten(1).all(dim=1)
            raise DataError(
                f"the action of environment {int(bad.nonzero()[0])} at step {step} of the rollout is not finite; mend: the "
                "environment's observations, or a learning rate that let the policy diverge"
            )
        self._action[step].copy_(action.action)
        self._log_prob[step].copy_(action.log_prob)
        if self._value is not None:
            assert action.value is not None
            self._value[step].copy_(action.value)

    def outcome(self, step: int, outcome: EnvStep, truncated: Tensor) -> None:
        """Write what the environments answered [N], but for ``truncated``, which the collector may have a say in."""
        self._reward[step].copy_(outcome.reward)
        if self._reward_parts is not None:
            assert outcome.reward_parts is not None
            self._reward_parts[step].copy_(outcome.reward_parts)
        self._terminated[step].copy_(outcome.terminated)
        self._truncated[step].copy_(truncated)


class FinalValues:
    """Values of the observations at which episodes were cut, computed in one forward pass when the rollout is full."""

    def __init__(self) -> None:
        self._obs: list[Nested] = []
        self._rows: list[Tensor] = []
        self._steps: list[int] = []

    def remember(self, step: int, cut: Bool[np.ndarray, " row"], obs: Nested) -> None:
        """Keep the final observations of the rows that were cut at ``step``, out of all rows' ``obs`` [N, ...]."""
        if cut.any():
            rows = torch.from_numpy(np.flatnonzero(cut)).to(obs.device)
            self._obs.append(obs[rows])
            self._rows.append(rows)
            self._steps.append(step)

    def fill(self, rollout: TensorDict, policy: Policy, last_obs: Nested) -> None:
        """Complete ``value`` and ``next_value``; ``last_obs`` are the observations of the last slot."""
        value, next_value = rollout["value"], rollout["next_value"]
        values = policy.value(torch.cat([last_obs, *self._obs])).to(value.device)
        num_rows = rollout.shape[0]
        value[:, -1] = values[:num_rows]
        next_value[:, :-1] = value[:, 1:]
        next_value[rollout["terminated"]] = 0.0
        if self._rows:
            rows = torch.cat(self._rows)
            steps = torch.tensor(self._steps).repeat_interleave(torch.tensor([len(rows) for rows in self._rows]))
            next_value[rows.to(value.device), steps.to(value.device)] = values[num_rows:]


def _views(stored: Nested) -> _Views:
    if isinstance(stored, Tensor):
        return stored.unbind(1)
    return {key: _views(leaf) for key, leaf in stored.items()}


def _write(views: _Views, step: int, value: Nested) -> None:
    if isinstance(views, tuple):
        views[step].copy_(value)
        return
    assert isinstance(value, TensorDict)
    for key, child in views.items():
        _write(child, step, value[key])
