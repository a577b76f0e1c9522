"""Numbers of an environment's info for the metrics: ``env.log_info``."""

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from groupwise.errors import EnvError, nearest

LOGGED = "groupwise/log_info"
"""Key of the numbers in the info of an episode's last step."""


class LogInfo(gymnasium.Wrapper):
    """Adds the numbers of some entries to the info of each episode's last step.

    Raises:
        EnvError: an entry is missing there, or is no number.
    """

    def __init__(self, env: gymnasium.Env, keys: Sequence[str]) -> None:
        super().__init__(env)
        self._keys = tuple(keys)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step; see ``gymnasium.Env.step``."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if terminated or truncated:
            info = {**info, LOGGED: np.array([_number(info, key) for key in self._keys])}
        return obs, reward, terminated, truncated, info


def by_name(numbers: npt.NDArray[Any], keys: Sequence[str]) -> dict[str, Tensor]:
    """The entries [N] of all rows, by name, from their numbers [N, K]."""
    return dict(zip(keys, torch.from_numpy(numbers.copy()).unbind(1), strict=True))


def _number(info: Mapping[str, Any], key: str) -> float:
    if key not in info:
        raise EnvError(
            f"env.log_info has no entry {key!r} at the end of an episode{nearest(key, info)}; known: {', '.join(sorted(info))}"
        )
    value = np.asarray(info[key])
    if value.size != 1 or value.dtype.kind not in "biuf":
        raise EnvError(f"env.log_info: info[{key!r}] is {info[key]!r:.80}, expected a number; fix: leave it out")
    return float(value.item())
