"""Writes a rollout step by step."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool
from tensordict import TensorDict
from torch import Tensor

from groupwise.data.rollout import Nested, all_finite, find_nonfinite, lengthen
from groupwise.envs.base import EnvStep
from groupwise.policies.base import Action, Policy

Outcome: TypeAlias = tuple[bool | None, str | None, dict[str, float] | None]
_Columns: TypeAlias = np.ndarray | tuple[Tensor, ...] | dict[str, Any]  # Any: _Columns again


class RolloutWriter:
    """Writes through views of a rollout's tensors, which is far cheaper than ``rollout[:, t] = ...``.

    A full rollout is lengthened.

    Args:
        policy: gives the values of final observations, where it has a critic.
    """

    def __init__(self, rollout: TensorDict, policy: Policy) -> None:
        self._policy = policy
        self._final_obs: list[Nested] = []
        self._cut_rows: list[Tensor] = []
        self._cut_steps: list[Tensor] = []
        self._success: dict[int, Tensor] = {}
        self._task: dict[int, npt.NDArray[Any]] = {}
        self._info: dict[int, dict[str, Tensor]] = {}
        self._open(rollout)

    def observe(self, step: int, obs: Nested) -> None:
        """Write the observations [N, ...] of a step, and what a recurrent policy remembers there."""
        if "state" in self._columns:
            assert isinstance(obs, TensorDict)
            _write(self._columns["state"], step, obs["state"])
            obs = obs["obs"]
        _write(self._columns["obs"], step, obs)

    def act(self, step: int, action: Action) -> None:
        """Write the actions of a step.

        Raises:
            DataError: an action on the CPU is not finite; names the observation if that is the reason.
        """
        if step == self.rollout.shape[1] - 1:
            self._open(lengthen(self.rollout, 2 * step + 1))
        _write(self._columns["action"], step, action.action)
        if action.action.device.type == "cpu":  # on a GPU the check would be a host sync
            self._check_finite(action.action, step)
        _write(self._columns["sample_log_prob"], step, action.log_prob)
        if action.value is not None and "value" in self._columns:
            _write(self._columns["value"], step, action.value)

    def outcome(self, step: int, outcome: EnvStep, truncated: Tensor) -> None:
        """Write the outcome of a step [N]; ``truncated`` is given by the collector."""
        _write(self._columns["reward"], step, outcome.reward)
        _write(self._columns["terminated"], step, outcome.terminated)
        _write(self._columns["truncated"], step, truncated)
        if "executed" in self._columns:
            assert outcome.executed is not None
            _write(self._columns["executed"], step, outcome.executed)
        if "reward_parts" in self._columns:
            assert outcome.reward_parts is not None
            _write(self._columns["reward_parts"], step, outcome.reward_parts)
        if outcome.success is not None:
            self._success[step] = outcome.success.clone()
            if outcome.task is not None:
                self._task[step] = outcome.task.copy()
        if outcome.info is not None:
            self._info[step] = outcome.info

    def outcomes(self, rows: Sequence[int], steps: Sequence[int]) -> list[Outcome]:
        """Success, task and ``env.log_info`` of the episodes that ended in these rows with these steps; None where it is not known."""
        if not self._success and not self._info:
            return [(None, None, None)] * len(rows)
        flags = torch.stack([*self._success.values()]).cpu().numpy() if self._success else ()
        success = dict(zip(self._success, flags, strict=True))
        return [self._outcome(row, step, success) for row, step in zip(rows, steps, strict=True)]

    def cut(self, step: int, rows: Bool[np.ndarray, " row"], obs: Nested) -> None:
        """Keep the final observations, from ``obs`` [N, ...], of the rows truncated at ``step``, for their values."""
        if not self._policy.actor_only and rows.any():
            index = torch.from_numpy(np.flatnonzero(rows))
            self._final_obs.append(obs[index.to(obs.device)])
            self._cut_rows.append(index)
            self._cut_steps.append(torch.full_like(index, step))

    def finish(self, num_steps: int, obs: Nested) -> TensorDict:
        """The rollout of ``num_steps`` steps, with ``obs`` [N, ...] in its last slot and all values."""
        self.observe(num_steps, obs)
        rollout = self.rollout if self.rollout.shape[1] == num_steps + 1 else self.rollout[:, : num_steps + 1]
        if not self._policy.actor_only:
            self._fill_values(rollout, obs)
        return rollout

    def _outcome(self, row: int, step: int, success: dict[int, npt.NDArray[np.bool_]]) -> Outcome:
        flag = bool(success[step][row]) if step in success else None
        task = str(self._task[step][row]) or None if step in self._task else None
        info = {name: float(values[row]) for name, values in self._info.get(step, {}).items()}
        return flag, task, None if any(map(math.isnan, info.values())) else info or None

    def _check_finite(self, action: Tensor, step: int) -> None:
        if not action.is_floating_point() or all_finite(action):
            return
        slots = torch.zeros_like(self.rollout["valid"])
        slots[:, step] = True
        if found := find_nonfinite(self.rollout, slots):
            raise found[0].error()

    def _open(self, rollout: TensorDict) -> None:
        self.rollout = rollout
        self._columns = {key: _columns(stored) for key, stored in rollout.items()}

    def _fill_values(self, rollout: TensorDict, last_obs: Nested) -> None:
        """Complete ``value`` and ``next_value`` with one forward pass."""
        value, next_value = rollout["value"], rollout["next_value"]
        values = self._policy.value(torch.cat([last_obs, *self._final_obs])).to(value)
        value[:, -1] = values[: len(value)]
        next_value[:, :-1] = value[:, 1:]
        next_value[rollout["terminated"]] = 0.0
        if self._cut_rows:
            rows, steps = (torch.cat(parts).to(value.device) for parts in (self._cut_rows, self._cut_steps))
            next_value[rows, steps] = values[len(value) :]


def _columns(stored: Nested) -> _Columns:
    """Views of all rows by step. NumPy indexes them faster than torch."""
    if not isinstance(stored, Tensor):
        return {key: _columns(leaf) for key, leaf in stored.items()}
    return stored.numpy().swapaxes(0, 1) if stored.device.type == "cpu" else stored.unbind(1)


def _write(columns: _Columns, step: int, value: Any) -> None:
    if isinstance(columns, dict):
        for key, child in columns.items():
            _write(child, step, value[key])
    elif isinstance(columns, tuple):
        columns[step].copy_(value)
    else:
        columns[step] = (value.float() if value.dtype == torch.bfloat16 else value).numpy(force=True)
