"""Refuses rollouts that cannot fit in memory, before anything is allocated."""

import os
from pathlib import Path

import torch

from groupwise.config.algorithm import GRPOCfg
from groupwise.config.run import RunCfg, TextRunCfg
from groupwise.errors import ConfigError

SLOT_BYTES = 40
"""The least that a step takes in a rollout: reward, masks, ids, log-probability, and small observations and actions."""
_EPISODE_BYTES = 250
"""Of the bookkeeping of an episode in a group."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_rollout_fits(
    cfg: RunCfg | TextRunCfg, slot_bytes: int = SLOT_BYTES, device: torch.device | None = None
) -> None:
    """Raise a ``ConfigError`` if a rollout needs more memory than there is, even with episodes of a single step.

    Args:
        slot_bytes: of one step of one environment, or one token.
        device: that holds the rollout.
    """
    sums = {}
    if isinstance(cfg, RunCfg):
        rows, steps = cfg.env.num_envs, cfg.algorithm.num_steps
        window = f"env.num_envs={rows:,} x (algorithm.num_steps={steps:,} + 1) x {slot_bytes} bytes"
        sums[window] = rows * (steps + 1) * slot_bytes
    of_episode, episodes, names = slot_bytes + _EPISODE_BYTES, 1, []
    if isinstance(cfg, TextRunCfg):
        episodes, names = cfg.num_prompts, [f"num_prompts={cfg.num_prompts:,}"]
    if isinstance(cfg.algorithm, GRPOCfg):
        episodes *= cfg.algorithm.group_size
        names.append(f"algorithm.group_size={cfg.algorithm.group_size:,}")
    sums[f"{' x '.join(names)} x at least {of_episode} bytes an episode"] = episodes * of_episode
    what, need = max(sums.items(), key=lambda item: item[1])
    there = total_memory(device)
    if there is not None and need > there:
        raise ConfigError(
            f"a rollout needs at least {need / 2**30:,.1f} GiB: {what}; there are {there / 2**30:,.1f} GiB; fix: smaller "
            "numbers"
        )


def total_memory(device: torch.device | None = None) -> int | None:
    """Bytes of memory of a GPU, or of this machine or container; None if it cannot be found out."""
    if device is not None and device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= getattr(os, "sysconf_names", {}).keys():
        return None
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(physical, int(limit)) if limit.isdecimal() else physical
