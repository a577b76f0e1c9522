"""Copies of one Gymnasium environment as rows that start independently."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from groupwise.data.rollout import Nested
from groupwise.data.spaces import obs_spec, subspaces
from groupwise.envs.base import EnvStep, GroupEnv, Mask, Seeds
from groupwise.envs.local_rows import OUTCOMES, Arrays, LocalRows, RowCfg, layout_of, obs_name
from groupwise.envs.log_info import by_name
from groupwise.envs.workers import WorkerRows
from groupwise.seeding import derive_seed


class RowsGroupEnv(GroupEnv):
    """Copies of one Gymnasium environment, stepped one after another in this process or in several.

    What a step returns is overwritten by the next one.

    Args:
        num_workers: processes that share the rows among them; 0: this process steps them all.
        device: where observations go.

    Raises:
        EnvError: the environment cannot be made, here or in a worker.
    """

    def __init__(self, cfg: RowCfg, num_envs: int, *, num_workers: int = 0, device: torch.device | str = "cpu") -> None:
        self.env_id = cfg.env_id
        self.num_envs = num_envs
        self.observation_space = cfg.observation_space
        self.action_space = cfg.action_space
        self.obs_spec = obs_spec(cfg.observation_space)
        self.max_episode_steps = cfg.max_episode_steps
        self.start_mode = cfg.start_mode
        self.device = torch.device(device)
        self.notes = cfg.notes
        self._live: Mask = np.zeros(num_envs, dtype=np.bool_)
        self._live_rows = np.flatnonzero(self._live)
        self._not_started: Mask = np.zeros(num_envs, dtype=np.bool_)
        self._reset_seed = 0
        self._num_resets = [0] * num_envs
        layout = layout_of(cfg)
        self._rows: LocalRows | WorkerRows
        if num_workers:
            self._rows = WorkerRows(cfg, layout, num_envs, num_workers)
            arrays = self._rows.arrays
        else:
            arrays = {name: np.zeros((num_envs, *shape), dtype) for name, (shape, dtype) in layout.items()}
            self._rows = LocalRows(cfg, arrays)
        self._obs = _obs_tensor(cfg.observation_space, arrays)
        outcomes = [torch.from_numpy(arrays[name]) for name in OUTCOMES]
        self._reward, self._terminated, self._truncated, self._failed, self._success, self._tells_success = outcomes
        self._reward_parts = torch.from_numpy(arrays["reward_parts"]) if cfg.reward_parts else None
        self._executed = torch.from_numpy(arrays["executed"]) if cfg.chunked else None
        self._task = arrays["task"]
        self._log_info, self._info = cfg.log_info, arrays.get("info")
        self._of_step = [array for name, array in arrays.items() if name in (*OUTCOMES, "reward_parts", "executed")]

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...]; see ``VectorEnv.reset``. Each row has its own stream of resets."""
        if seed is not None:
            self._reset_seed, self._num_resets = seed, [0] * self.num_envs
        mask = np.ones_like(self._live) if mask is None else mask
        start_seed, noise_seed = np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, np.int64)
        for row in np.flatnonzero(mask).tolist():
            start_seed[row] = derive_seed(self._reset_seed, "start", row, self._num_resets[row])
            noise_seed[row] = derive_seed(self._reset_seed, "noise", row, self._num_resets[row])
            self._num_resets[row] += 1
        return self.start(mask, start_seed, noise_seed)

    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, ...] after starting the rows of ``mask``; see ``GroupEnv.start``.

        With ``cfg.on_error="report"``, the next step tells which rows failed here.
        """
        failed = self._failed.numpy()
        failed.fill(False)
        self._rows.start(np.flatnonzero(mask), start_seed[mask], noise_seed[mask])
        self._set_live(self._live | mask)
        self._not_started = self._not_started & ~mask | failed & self._live
        self.pause(self._not_started)
        return self._obs.to(self.device)

    def pause(self, mask: Mask) -> None:
        """Pause the rows of ``mask`` until they are started again."""
        self._set_live(self._live & ~mask)

    def step(self, action: Tensor) -> EnvStep:
        """One step of every row that is not paused with environment actions [N, ...]."""
        actions = action.cpu().numpy()
        if len(self._live_rows) < self.num_envs:
            actions = actions[self._live_rows]
        for array in self._of_step:  # 0 for rows that take no step
            array.fill(0)
        if self._info is not None:
            self._info.fill(np.nan)
        failed = success = info = None
        any_ended = self._rows.step(self._live_rows, actions)
        if self._not_started.any():
            self._failed |= torch.from_numpy(self._not_started)
            self._not_started = np.zeros_like(self._live)
            any_ended = True
        if any_ended:
            self.pause((self._terminated | self._truncated | self._failed).numpy())
            failed = self._failed.clone() if self._failed.any() else None
            success = self._success if self._tells_success.any() else None
            info = None if self._info is None else by_name(self._info, self._log_info)
        return EnvStep(
            self._obs.to(self.device),
            self._reward,
            self._terminated,
            self._truncated,
            failed=failed,
            reward_parts=self._reward_parts,
            success=success,
            executed=self._executed,
            info=info,
            task=None if success is None else self._task,
        )

    def close(self) -> None:
        """Free the environments and the processes."""
        self._rows.close()

    def _set_live(self, live: Mask) -> None:
        self._live, self._live_rows = live, np.flatnonzero(live)


def _obs_tensor(space: Any, arrays: Arrays, path: tuple[str, ...] = ()) -> Nested:
    """Observations [N, ...] of all rows; shares memory with the arrays."""
    children = subspaces(space)
    if children is None:
        leaf: Tensor = torch.from_numpy(arrays[obs_name(path)])
        return leaf
    leaves = {name: _obs_tensor(child, arrays, (*path, name)) for name, child in children.items()}
    return TensorDict(leaves, batch_size=[len(arrays["reward"])])
