"""Success flags and names of tasks in Gymnasium's infos.

An episode has succeeded if the flag is true at its last step. Tasks that end at success and tasks that go on then agree on
this rule: the goal must hold in the end, and passing through it does not count. Its task is ``info["task"]`` at that step.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SUCCESS_KEYS = ("is_success", "success")
"""As in gymnasium-robotics and Stable-Baselines3, and as in Meta-World and ManiSkill."""


def success_of_row(info: Mapping[str, Any]) -> bool | None:
    """The flag in the info of a single environment; None without one. A flag is a truth value or a number."""
    for key in SUCCESS_KEYS:
        if key in info and (flag := np.asarray(info[key])).shape == () and flag.dtype.kind in "biuf":
            return bool(flag)
    return None


def success_of_rows(info: Mapping[str, Any], num_envs: int) -> Tensor | None:
    """The flags [N] in the info of a vector environment, False for rows without one; None if it has no flags."""
    info = _last_info(info)
    for key in SUCCESS_KEYS:
        if key in info and np.shape(info[key]) == (num_envs,):
            return torch.from_numpy(np.asarray(info[key]).astype(np.bool_) & info.get(f"_{key}", True))
    return None


def task_of_row(info: Mapping[str, Any]) -> str:
    """The name of the task in the info of a single environment; empty without one."""
    task = info.get("task")
    return task if isinstance(task, str) else ""


def tasks_of_rows(info: Mapping[str, Any], num_envs: int) -> npt.NDArray[Any] | None:
    """The names [N] of tasks, str, in the info of a vector environment, empty for rows without one; None if it has no names."""
    tasks: Any = _last_info(info).get("task")
    if np.shape(tasks) != (num_envs,):
        return None
    return np.array([task if isinstance(task, str) else "" for task in np.asarray(tasks)])


def successes_by_task(outcomes: Iterable[tuple[str | None, bool | None]]) -> dict[str, list[bool]]:
    """The successes of each task's episodes, in the order of names; empty unless there are several tasks.

    Args:
        outcomes: task and success of each episode. Those that do not say their task are left out; those that do not say
            their success failed.
    """
    found: dict[str, list[bool]] = {}
    for task, success in outcomes:
        if task:
            found.setdefault(task, []).append(success is True)
    return dict(sorted(found.items())) if len(found) > 1 else {}


def _last_info(info: Mapping[str, Any]) -> Mapping[str, Any]:
    """The info of the last steps of episodes, also where rows are reset in the same step."""
    final = info.get("final_info")
    return final if isinstance(final, Mapping) else info
