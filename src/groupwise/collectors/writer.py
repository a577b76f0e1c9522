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
from groupwise.errors import DataError
from groupwise.policies.base import Action, Policy

Outcome: TypeAlias = tuple[bool | None, str | None, dict[str, float] | None]
"""Success, task and ``env.log_info`` of an episode; None where the environment does not report it."""
_Report: TypeAlias = tuple[Tensor | None, npt.NDArray[Any] | None, dict[str, Tensor]]
"""The same of all rows [N] that end with a step."""
_Columns: TypeAlias = np.ndarray | tuple[Tensor, ...] | dict[str, Any]  # Any: _Columns again

_OF_STEP = ("reward", "terminated", "truncated", "executed", "reward_parts")
"""What a rollout may keep of an ``EnvStep``."""


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
        self._reports: dict[int, _Report] = {}
        self._open(rollout)

    def observe(self, step: int, obs: Nested) -> None:
        """Write the observations [N, ...] of a step."""
        _write(self._obs, step, obs)

    def act(self, step: int, action: Action) -> None:
        """Write the actions of a step.

        Raises:
            DataError: an action on the CPU is not finite; names the observation if that is the reason.
        """
        if step == self.rollout.shape[1] - 1:
            self._open(lengthen(self.rollout, 2 * step + 1))
        _write(self._columns["action"], step, action.action)
        _write(self._columns["sample_log_prob"], step, action.log_prob)
        if action.value is not None:
            _write(self._columns["value"], step, action.value)
        numbers = action.action
        if numbers.is_floating_point() and numbers.device.type == "cpu" and not all_finite(numbers):
            raise self._not_finite(step)  # on a GPU the check would be a host sync

    def outcome(self, step: int, outcome: EnvStep) -> None:
        """Write what a step returned."""
        values = outcome._asdict()
        for key, columns in self._of_step.items():
            _write(columns, step, values[key])
        if outcome.success is not None or outcome.info is not None:
            self._report(step, outcome)

    def cut(self, step: int, truncated: Bool[Tensor, " row"], obs: Nested) -> None:
        """Keep the final observations, from ``obs`` [N, ...], of the rows truncated at ``step``, for their values."""
        if not self._policy.actor_only and truncated.any():
            rows = truncated.nonzero()[:, 0]
            self._final_obs.append(obs[rows.to(obs.device)])
            self._cut_rows.append(rows)
            self._cut_steps.append(torch.full_like(rows, step))

    def finish(self, num_steps: int, obs: Nested) -> TensorDict:
        """The rollout of ``num_steps`` steps, with ``obs`` [N, ...] in its last slot and all values."""
        self.observe(num_steps, obs)
        rollout = self.rollout if self.rollout.shape[1] == num_steps + 1 else self.rollout[:, : num_steps + 1]
        if not self._policy.actor_only:
            self._fill_values(rollout, obs)
        return rollout

    def outcomes(self, rows: Sequence[int], steps: Sequence[int]) -> list[Outcome]:
        """What the environment reported of the episodes that ended in these rows with these steps."""
        return _outcomes(self._reports, rows, steps) if self._reports else [(None, None, None)] * len(rows)

    def _open(self, rollout: TensorDict) -> None:
        self.rollout = rollout
        columns = self._columns = {key: _columns(stored) for key, stored in rollout.items()}
        self._obs = {key: columns[key] for key in ("obs", "state")} if "state" in columns else columns["obs"]
        self._of_step = {key: columns[key] for key in _OF_STEP if key in columns}

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

    def _report(self, step: int, outcome: EnvStep) -> None:
        """Keep what the environment reports of episodes that end; the environment may write into it later."""
        success = None if outcome.success is None else outcome.success.clone()
        task = None if outcome.task is None else outcome.task.copy()
        self._reports[step] = success, task, outcome.info or {}

    def _not_finite(self, step: int) -> DataError:
        slots = torch.zeros_like(self.rollout["valid"])
        slots[:, step] = True
        return find_nonfinite(self.rollout, slots)[0].error()


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


def _outcomes(reports: dict[int, _Report], rows: Sequence[int], steps: Sequence[int]) -> list[Outcome]:
    """As ``RolloutWriter.outcomes``. Flags on a GPU take one host sync."""
    flags = {step: success for step, (success, _, _) in reports.items() if success is not None}
    stacked = torch.stack([*flags.values()]).cpu().numpy() if flags else ()
    success = dict(zip(flags, stacked, strict=True))
    return [
        _outcome(reports.get(step, (None, None, {})), success.get(step), row)
        for row, step in zip(rows, steps, strict=True)
    ]


def _outcome(report: _Report, success: Bool[np.ndarray, " row"] | None, row: int) -> Outcome:
    _, task, info = report
    numbers = {name: float(values[row]) for name, values in info.items()}
    known = numbers and not any(map(math.isnan, numbers.values()))
    return (
        None if success is None else bool(success[row]),
        None if task is None else str(task[row]) or None,
        numbers if known else None,
    )
