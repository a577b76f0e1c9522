"""Success flags in Gymnasium's infos.

An episode has succeeded if the flag is true at its last step. Tasks that end at success and tasks that go on then agree on
this rule: the goal must hold in the end, and passing through it does not count.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
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
    final = info.get("final_info")  # of rows that were reset in the same step
    info = final if isinstance(final, Mapping) else info
    for key in SUCCESS_KEYS:
        if key in info and np.shape(info[key]) == (num_envs,):
            return torch.from_numpy(np.asarray(info[key]).astype(np.bool_) & info.get(f"_{key}", True))
    return None
