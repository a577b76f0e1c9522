"""The rows of a simulator of others for GRPO: members of a group share their start, by its states or by its seeds."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from groupwise.config.env import StartMode
from groupwise.data.rollout import Nested
from groupwise.embodied import nested
from groupwise.envs.base import EnvStep, GroupEnv, GroupStartReport, Mask, Seeds
from groupwise.envs.starts import verify_group_start
from groupwise.errors import EnvError, GroupStartError
from groupwise.seeding import derive_seed

if TYPE_CHECKING:
    from groupwise.embodied.torch_sim import TorchSim


class TorchSimGroups(GroupEnv):
    """A simulator for GRPO: a row is over at its first end, whatever the simulator does with it afterwards.

    The rows that are over are stepped on by the simulator, unseen. Where it resets no single rows, all rows start together.
    """

    def __init__(self, sim: "TorchSim", start_mode: StartMode) -> None:
        self.env_id, self.num_envs, self.device = sim.env_id, sim.num_envs, sim.device
        self.observation_space, self.action_space, self.obs_spec = sim.observation_space, sim.action_space, sim.obs_spec
        self.max_episode_steps = sim.max_episode_steps
        self.notes = sim.notes
        self.start_mode = start_mode
        self.block_size = sim.num_envs if sim.row_option is None else 1
        if start_mode == "none":
            self.start_report = GroupStartReport(sim.env_id, "none", start_varies=True, noise_varies=True)
        self._sim = sim
        self._over = torch.ones(sim.num_envs, dtype=torch.bool, device=sim.device)
        self._obs = sim.restart()
        self._reset_seed, self._num_resets = 0, 0

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...]; see ``VectorEnv.reset``."""
        if seed is not None:
            self._reset_seed, self._num_resets = seed, 0
        seeds = [derive_seed(self._reset_seed, "reset", row, self._num_resets) for row in range(self.num_envs)]
        self._num_resets += 1
        start_seed = np.array(seeds, dtype=np.int64)
        return self.start(np.ones(self.num_envs, dtype=np.bool_) if mask is None else mask, start_seed, start_seed)

    @torch.no_grad()
    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, ...] after starting the rows of ``mask``. Noise after the start is the simulator's own."""
        rows, seeds = np.flatnonzero(mask), start_seed[mask]
        if self.start_mode == "native":
            obs = self._start_by_state(rows, seeds)
        elif self.start_mode == "seed":
            for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
                obs = self._sim.restart([row], seed)
        else:
            if self.block_size > 1 and not mask.all():
                raise EnvError(f"{self.env_id} resets no single rows; fix: start all of them")
            obs = self._sim.restart(None if mask.all() else rows.tolist(), int(seeds[0]))
        begun = torch.from_numpy(mask).to(self.device)
        self._over = self._over & ~begun
        self._obs = nested.select(begun, obs, self._obs)
        return self._obs

    def pause(self, mask: Mask) -> None:
        """Pause the rows of ``mask`` until they are started again."""
        self._over = self._over | torch.from_numpy(mask).to(self.device)

    @torch.no_grad()
    def step(self, action: Tensor) -> EnvStep:
        """One step of every row that is not over with environment actions [N, ...]."""
        step, live = self._sim.step(action), ~self._over
        assert step.final_obs is not None
        terminated, truncated = step.terminated & live, step.truncated & live
        ended = terminated | truncated
        self._obs = nested.select(ended, step.final_obs, nested.select(live, step.obs, self._obs))
        self._over = self._over | ended
        reward = torch.where(live, step.reward, 0.0)
        return EnvStep(self._obs, reward, terminated, truncated, success=step.success)

    def close(self) -> None:
        """Close the simulator, if it can be closed."""
        self._sim.close()

    def _start_by_state(self, rows: np.ndarray, seeds: Seeds) -> Nested:
        """Observations [N, ...] after resetting a row for each seed, and copying its state to the others of that seed."""
        _, first, number = np.unique(seeds, return_index=True, return_inverse=True)
        self._sim.restart(rows.tolist())
        for row, seed in zip(rows[first].tolist(), seeds[first].tolist(), strict=True):
            self._sim.restart([row], seed)
        return self._sim.copy_rows(rows[first][number].tolist(), rows.tolist())


def verified(sim: "TorchSim", modes: Sequence[StartMode]) -> TorchSimGroups:
    """The rows with the first of these ways to share a start that works.

    Raises:
        GroupStartError: none of them does; says where rows differ.
    """
    reasons = []
    for mode in modes:
        env = TorchSimGroups(sim, mode)
        try:
            env.start_report = _report(env)
        except GroupStartError as error:
            reasons.append(f"{mode}: {str(error).partition('; fix: ')[0]}")
        else:
            return env
    why = "; ".join(reasons) or "its reset takes no seed, or no rows (options reset_ids, env_ids or env_idx)"
    raise GroupStartError(
        f"members of {sim.env_id} cannot share a start: {why}; fix: ppo, or from_torch_sim(env, start_mode='none') "
        "for groups whose members start apart"
    )


def _report(env: TorchSimGroups) -> GroupStartReport:
    """The report on the shared start, which a row must also find when it starts alone.

    Raises:
        GroupStartError: says where rows differ.
    """
    report = verify_group_start(env)
    every, last = np.ones(env.num_envs, dtype=np.bool_), np.arange(env.num_envs) == env.num_envs - 1
    seeds = np.full(env.num_envs, derive_seed(0, "alone"), dtype=np.int64)
    together = env.start(every, seeds, seeds)[:1]
    if not (together == env.start(last, seeds, seeds)[-1:]).all():
        raise GroupStartError(
            f"a row of {env.env_id} that starts alone starts apart; fix: reset rows from the seed only"
        )
    return report
