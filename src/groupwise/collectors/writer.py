"""Writes a rollout one step of all rows at a time."""

from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool
from tensordict import TensorDict
from torch import Tensor

from groupwise.data.rollout import Nested, all_finite
from groupwise.envs.base import EnvStep
from groupwise.errors import DataError
from groupwise.policies.base import Action, Policy

_Columns: TypeAlias = np.ndarray | tuple[Tensor, ...] | dict[str, Any]  # Any: _Columns again


class RolloutWriter:
    """Writes through views of a rollout's tensors, taken once: far cheaper than ``rollout[:, t] = ...``.

    On a CPU they are NumPy's: one view does for all steps, where torch, which takes longer to find a step, needs one each.
    """

    def __init__(self, rollout: TensorDict, *, value: bool) -> None:
        self.num_steps = rollout.shape[1] - 1
        self._obs = self._columns(rollout["obs"])
        self._action = self._columns(rollout["action"])
        self._log_prob = self._columns(rollout["sample_log_prob"])
        self._value = self._columns(rollout["value"]) if value else None
        self._reward = self._columns(rollout["reward"])
        parts = rollout.get("reward_parts", None)
        self._reward_parts = None if parts is None else self._columns(parts)
        self._terminated = self._columns(rollout["terminated"])
        self._truncated = self._columns(rollout["truncated"])

    def observe(self, step: int, obs: Nested) -> None:
        """Write the observations [N, ...] of a slot."""
        _write(self._obs, step, obs)

    def act(self, step: int, action: Action) -> None:
        """Write what the policy did there.

        Raises:
            DataError: an action on the CPU is not finite; environments answer that in ways that hide the cause.
        """
        on_cpu = action.action.device.type == "cpu"  # elsewhere this would wait for the device
        if on_cpu and action.action.is_floating_point() and not all_finite(action.action):
            bad = ~action.action.isfinite().flatten(1).all(dim=1)
            raise DataError(
                f"the action of environment {int(bad.nonzero()[0])} at step {step} of the rollout is not finite; fix: the "
                "environment's observations, or a learning rate that let the policy diverge"
            )
        _write(self._action, step, action.action)
        _write(self._log_prob, step, action.log_prob)
        if self._value is not None:
            assert action.value is not None
            _write(self._value, step, action.value)

    def outcome(self, step: int, outcome: EnvStep, truncated: Tensor) -> None:
        """Write what the environments answered [N], but for ``truncated``, which the collector may have a say in."""
        _write(self._reward, step, outcome.reward)
        if self._reward_parts is not None:
            assert outcome.reward_parts is not None
            _write(self._reward_parts, step, outcome.reward_parts)
        _write(self._terminated, step, outcome.terminated)
        _write(self._truncated, step, truncated)

    def _columns(self, stored: Nested) -> _Columns:
        """What holds a step of all rows, by its number."""
        if not isinstance(stored, Tensor):
            return {key: self._columns(leaf) for key, leaf in stored.items()}
        by_numpy = stored.device.type == "cpu" and stored.dtype != torch.bfloat16
        return stored.numpy().swapaxes(0, 1) if by_numpy else stored.unbind(1)


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


def _write(columns: _Columns, step: int, value: Nested) -> None:
    if isinstance(columns, dict):
        assert isinstance(value, TensorDict)
        for key, child in columns.items():
            _write(child, step, value[key])
        return
    assert isinstance(value, Tensor)
    if isinstance(columns, tuple):
        columns[step].copy_(value)
    else:
        columns[step] = (value.float() if value.dtype == torch.bfloat16 else value).numpy(force=True)
