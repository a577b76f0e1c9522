"""Simulators of others that step all their rows at once, with tensors in and out.

One adapter for EmbodiChain, Isaac Lab's rsl_rl wrapper, ManiSkill's vector environment, mujoco_playground's rsl_rl wrapper,
and rsl_rl's ``VecEnv``. All of them reset a row in the step in which its episode ends.

A step copies nothing to the host. The adapter makes nothing up: its ``notes`` name what a simulator does not report.
"""

import copy
import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from groupwise.config.run import StartMode
from groupwise.data.rollout import Nested, TensorDict
from groupwise.data.spaces import obs_spec, subspaces
from groupwise.envs.base import SUCCESS_KEYS, EnvStep, GroupEnv, GroupStartReport, Mask, Seeds, VectorEnv
from groupwise.envs.starts import verify_group_start
from groupwise.errors import EnvError, GroupStartError
from groupwise.seeding import derive_seed

_ROW_OPTIONS = ("reset_ids", "env_ids", "env_idx")
"""Options of ``reset`` that name rows: EmbodiChain (which takes no unknown ones), its learning environments, ManiSkill."""
_PRIVILEGED = ("critic", "privileged_state")
"""Groups of observations that simulators mean for the critic alone."""


def from_torch_sim(
    env: Any, *, start_mode: Literal["auto", "none"] = "auto", obs_groups: Sequence[str] | None = None
) -> "TorchSim":
    """A simulator for ``gw.train``: for PPO with its own resets, for GRPO in groups that share their start.

    ``env`` has ``num_envs``, ``step(action)`` and, as a rule, ``reset``. ``step`` returns observation, reward,
    terminated, truncated and info, or observation, reward, done and extras with ``extras["time_outs"]``. Observations are
    tensors ``[N, ...]`` or (nested) dictionaries of them. A simulator without ``reset`` is reset by its
    ``episode_length_buf``.

    Args:
        start_mode: ``auto``: members of a group share their start, by states (``get_state_dict``, ``set_state_dict``) or by
            seeded resets of single rows, which is checked by trying. ``none``: they do not, and the run says so.
        obs_groups: entries of the observation to keep, such as ``["policy"]``; None: all.

    Raises:
        EnvError: ``env`` does not fit this interface.
    """
    if start_mode not in ("auto", "none"):
        raise EnvError(f"start_mode = {start_mode!r}: expected 'auto' or 'none'; fix: 'auto' finds the best way")
    return TorchSim(env, start_mode=start_mode, obs_groups=obs_groups)


class TorchSim(VectorEnv):
    """The rows of a simulator, which resets them itself; see ``from_torch_sim``.

    Where the simulator offers no final observation, ``EnvStep.final_obs`` is the one before the last action. So a truncated
    episode is bootstrapped by the value of its last seen state, as in rsl_rl. The memory of a recurrent policy is then the
    one after the action.
    """

    autoreset = "same_step"

    def __init__(self, env: Any, *, start_mode: Literal["auto", "none"], obs_groups: Sequence[str] | None) -> None:
        self._env = env
        self._base = getattr(env, "unwrapped", env)
        spec = getattr(env, "spec", None)
        self.env_id = type(self._base).__name__ if spec is None else str(spec.id)
        if not hasattr(env, "num_envs") or not callable(getattr(env, "step", None)):
            raise EnvError(f"{self.env_id} has no num_envs or no step; fix: a simulator of many rows")
        mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode", AutoresetMode.SAME_STEP)
        if not getattr(env, "auto_reset", True) or AutoresetMode(mode) != AutoresetMode.SAME_STEP:
            raise EnvError(f"{self.env_id} resets no row in the step that ends it; fix: auto_reset=True, SAME_STEP")
        self.num_envs = int(env.num_envs)
        found = [getattr(holder, "single_action_space", None) for holder in (env, self._base)]
        if not any(space is not None for space in found) and not hasattr(env, "num_actions"):
            raise EnvError(f"{self.env_id} has neither single_action_space nor num_actions; fix: give it one of them")
        unbounded = spaces.Box(-np.inf, np.inf, (int(getattr(env, "num_actions", 0)),), np.float32)
        self.action_space = next((space for space in found if space is not None), unbounded)
        limits = [getattr(env, name, None) for name in ("max_episode_steps", "max_episode_length")]
        limits.append(getattr(spec, "max_episode_steps", None))
        limit = next((limit for limit in limits if limit is not None), None)
        self.max_episode_steps = None if limit is None else int(torch.as_tensor(limit).max())
        self._start_mode = start_mode
        self._obs_groups = obs_groups
        self._is_gymnasium = isinstance(env, gymnasium.vector.VectorEnv)
        self._reset_takes = inspect.signature(env.reset).parameters.keys() if hasattr(env, "reset") else None
        self._obs = self._kept(env.get_observations() if self._reset_takes is None else env.reset())
        self.observation_space = space_of(self._obs)
        self.obs_spec = obs_spec(self.observation_space)
        self.device = self._obs.device
        outcome = env.step(self._any_action())
        notes = []
        if len(outcome) == 4 and outcome[-1].get("time_outs", None) is None:
            notes.append(f"{self.env_id} flags no time_outs: every end counts as a termination.")
        elif not self._is_gymnasium and _final(outcome[-1]) is None:
            notes.append(f"{self.env_id} loses final observations: truncated episodes are valued by the one before.")
        if seen := [name for name in _PRIVILEGED if name in (subspaces(self.observation_space) or {})]:
            notes.append(f"The actor of {self.env_id} sees {seen[0]!r}, too, unless policy.actor_keys leaves it out.")
        self.notes = tuple(notes)

    @torch.no_grad()
    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...] of all rows. Repeatable only where the simulator's ``reset`` takes a seed."""
        return self.restart(seed=seed)

    @torch.no_grad()
    def step(self, action: Tensor) -> EnvStep:
        """One step of every row with environment actions [N, ...]."""
        outcome = self._env.step(action.to(self.device))
        if len(outcome) not in (4, 5):
            raise EnvError(
                f"step of {self.env_id} returned {len(outcome)} values, expected obs, reward, done, info or obs, reward, "
                "terminated, truncated, info; fix: a wrapper that returns these"
            )
        obs, reward, *ends, info = outcome
        if len(ends) == 2:
            terminated, truncated = (self._of_rows(end).bool() for end in ends)
        else:
            done, time_outs = self._of_rows(ends[0]).bool(), info.get("time_outs", None)
            truncated = torch.zeros_like(done) if time_outs is None else done & self._of_rows(time_outs).bool()
            terminated = done & ~truncated
        final = _final(info)
        before, self._obs = self._obs, self._kept(obs)
        # where rows were reset, the info of the last step is in final_info
        last_info = info if info.get("final_info", None) is None else info["final_info"]
        flags = (last_info.get(key, None) for key in SUCCESS_KEYS)
        success = next((flag for flag in flags if flag is not None), None)
        return EnvStep(
            self._obs,
            self._of_rows(reward).float(),
            terminated,
            truncated,
            before if final is None else self._kept(final),
            info={} if success is None else {"success": self._of_rows(success).bool()},
        )

    def restart(self, rows: Sequence[int] | None = None, seed: int | None = None) -> Nested:
        """Observations [N, ...] after resetting rows; None: all of them.

        Args:
            seed: for simulators whose ``reset`` takes one. A single row starts in the same state whichever row it is.
        """
        if self._reset_takes is None:
            return self._time_out()
        settings: dict[str, Any] = {}
        if seed is not None and "seed" in self._reset_takes:
            # a Gymnasium vector has a seed per row
            settings["seed"] = [seed] * self.num_envs if self._is_gymnasium and rows and len(rows) == 1 else seed
        if rows is not None:
            settings["options"] = {self.row_option: self._index(rows)}
        self._obs = self._kept(self._env.reset(**settings))
        return self._obs

    def as_group_env(self, *, verify: bool = True) -> "TorchSimGroups":
        """The simulator as rows that start independently.

        Args:
            verify: check by trying, and take the best way that works; otherwise the best that the interface offers.

        Raises:
            GroupStartError: members cannot share their start, and ``start_mode`` is not ``none``.
        """
        modes: list[StartMode] = []
        takes_seed = self._reset_takes is not None and "seed" in self._reset_takes
        if self._start_mode == "auto" and self.row_option is not None and takes_seed:
            has_states = hasattr(self._base, "get_state_dict") and hasattr(self._base, "set_state_dict")
            modes = ["native", "seed"] if has_states else ["seed"]
        if self._start_mode == "none" or not verify:
            return TorchSimGroups(self, modes[0] if modes else "none")
        reasons = []
        for mode in modes:
            env = TorchSimGroups(self, mode)
            try:
                env.start_report = verify_group_start(env)
            except GroupStartError as error:
                reasons.append(f"{mode}: {str(error).partition('; fix: ')[0]}")
                continue
            # a row that starts alone must find the same start
            every, last = np.ones(self.num_envs, dtype=np.bool_), np.arange(self.num_envs) == self.num_envs - 1
            seeds = np.full(self.num_envs, derive_seed(0, "alone"), dtype=np.int64)
            together = env.start(every, seeds, seeds)[:1]
            if (together == env.start(last, seeds, seeds)[-1:]).all():
                return env
            reasons.append(f"{mode}: a row of {self.env_id} that starts alone starts apart")
        why = "; ".join(reasons) or f"its reset takes no seed, or no rows (options {', '.join(_ROW_OPTIONS)})"
        raise GroupStartError(
            f"members of {self.env_id} cannot share a start: {why}; fix: ppo, or from_torch_sim(env, start_mode='none') "
            "for groups whose members start apart"
        )

    def copy_rows(self, source: Sequence[int], target: Sequence[int]) -> Nested:
        """Observations [N, ...] after copying the states of the ``source`` rows into the ``target`` rows."""
        state = TensorDict(self._base.get_state_dict(), batch_size=[self.num_envs])
        self._base.set_state_dict(state[self._index(source)].to_dict(), self._index(target))
        index = torch.arange(self.num_envs, device=self.device)
        index[self._index(target)] = self._index(source)
        self._obs = self._obs[index]
        return self._obs

    @cached_property
    @torch.no_grad()
    def row_option(self) -> str | None:
        """The option of ``reset`` that names rows, found by trying which of them leaves the other rows alone."""
        if self._reset_takes is None or "options" not in self._reset_takes or self.num_envs == 1:
            return None
        last = self._index([self.num_envs - 1])
        for name in _ROW_OPTIONS:
            self.restart()
            for _ in range(3):
                self.step(self._any_action())
            before = self._obs[:-1]
            try:
                after = self._kept(self._env.reset(options={name: last}))[:-1]
            except (KeyError, TypeError, ValueError):  # it reads another option, or takes no unknown ones
                continue
            if (before == after).all():
                return name
        return None

    def close(self) -> None:
        """Close the simulator, if it can be closed."""
        if hasattr(self._env, "close"):
            self._env.close()

    def _time_out(self) -> Nested:
        """First observations after every episode was ended by its time limit: the only reset of rsl_rl's ``VecEnv``."""
        if not hasattr(self._env, "episode_length_buf"):
            raise EnvError(f"{self.env_id} has neither reset nor episode_length_buf; fix: give it one of them")
        elapsed = self._env.episode_length_buf
        self._env.episode_length_buf = torch.zeros_like(elapsed) + self._env.max_episode_length
        step = self.step(self._any_action())
        if not bool((step.terminated | step.truncated).all()):
            raise EnvError(f"{self.env_id} did not reset rows by its episode_length_buf; fix: give it a reset()")
        return step.obs

    def _kept(self, obs: Any) -> Nested:
        """A copy of an observation, as simulators overwrite theirs; ``reset`` may give an info with it."""
        obs = obs[0] if isinstance(obs, tuple) else obs
        if self._obs_groups is not None:
            known = [] if isinstance(obs, Tensor) else list(obs.keys())
            if absent := [name for name in self._obs_groups if name not in known]:
                raise EnvError(
                    f"obs_groups has {absent[0]!r}, but the observation of {self.env_id} has "
                    f"{', '.join(known) or 'no groups'}; fix: these"
                )
            obs = {name: obs[name] for name in self._obs_groups}
        return stored(obs, self.num_envs, self.env_id)

    def _of_rows(self, value: Any) -> Tensor:
        """A number of each row [N], which some simulators give as [N, 1]."""
        return torch.as_tensor(value, device=self.device).reshape(self.num_envs)

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.as_tensor(rows, dtype=torch.int64, device=self.device)

    def _any_action(self) -> Tensor:
        """An action of the space, the same for all rows."""
        space = copy.deepcopy(self.action_space)
        space.seed(0)
        return torch.as_tensor(np.stack([space.sample()] * self.num_envs), device=self.device)


class TorchSimGroups(GroupEnv):
    """A simulator for GRPO: a row is over at its first end, whatever the simulator does with it afterwards.

    The rows that are over are stepped on by the simulator, unseen. Where it resets no single rows, all rows start together.
    """

    def __init__(self, sim: TorchSim, start_mode: StartMode) -> None:
        spaces = sim.observation_space, sim.action_space
        super().__init__(sim.env_id, sim.num_envs, spaces, sim.max_episode_steps, sim.device)
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
        seeds = np.array([derive_seed(self._reset_seed, "reset", i, self._num_resets) for i in range(self.num_envs)])
        self._num_resets += 1
        return self.start(np.ones(self.num_envs, dtype=np.bool_) if mask is None else mask, seeds, seeds)

    @torch.no_grad()
    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, ...] after starting the rows of ``mask``. Noise after the start is the simulator's own."""
        rows, seeds = np.flatnonzero(mask), start_seed[mask]
        if self.start_mode == "native":
            # a row is reset for each seed, and its state copied to the others of that seed
            _, first, number = np.unique(seeds, return_index=True, return_inverse=True)
            self._sim.restart(rows.tolist())
            for row, seed in zip(rows[first].tolist(), seeds[first].tolist(), strict=True):
                self._sim.restart([row], seed)
            obs = self._sim.copy_rows(rows[first][number].tolist(), rows.tolist())
        elif self.start_mode == "seed":
            for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True):
                obs = self._sim.restart([row], seed)
        else:
            if self.block_size > 1 and not mask.all():
                raise EnvError(f"{self.env_id} resets no single rows; fix: start all of them")
            obs = self._sim.restart(None if mask.all() else rows.tolist(), int(seeds[0]))
        begun = torch.from_numpy(mask).to(self.device)
        self._over = self._over & ~begun
        self._obs = select(begun, obs, self._obs)
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
        self._obs = select(ended, step.final_obs, select(live, step.obs, self._obs))
        self._over = self._over | ended
        reward = torch.where(live, step.reward, 0.0)
        return EnvStep(self._obs, reward, terminated, truncated, info=step.info)

    def close(self) -> None:
        """Close the simulator, if it can be closed."""
        self._sim.close()


def _final(info: Any) -> Any:
    """The final observation of rows that ended, if the simulator reports it; the second is Gymnasium's newer name."""
    return info.get("final_observation", info.get("final_obs", None))


def stored(obs: Any, num_envs: int, name: str) -> Nested:
    """A copy in the dtypes that rollouts have: float32, uint8, bool or int64.

    Args:
        name: name of the simulator, for errors.

    Raises:
        EnvError: ``obs`` holds something else than tensors [N, ...].
    """
    if isinstance(obs, Mapping | TensorDict):
        leaves = {key: stored(leaf, num_envs, name) for key, leaf in obs.items()}
        return TensorDict(leaves, batch_size=[num_envs]).auto_device_()
    if not isinstance(obs, Tensor):
        raise EnvError(f"an observation of {name} holds a {type(obs).__name__}, expected tensors; fix: obs_groups")
    if obs.dim() == 0 or len(obs) != num_envs:
        raise EnvError(f"{name} has {num_envs} rows, but an observation of shape {list(obs.shape)}; fix: [N, ...]")
    dtype = obs.dtype if obs.dtype in (torch.uint8, torch.bool) else torch.int64
    return obs.detach().to(torch.float32 if obs.is_floating_point() else dtype, copy=True)


def space_of(obs: Nested) -> spaces.Space:
    """The space of one row of stored observations, without bounds."""
    if not isinstance(obs, Tensor):
        return spaces.Dict({key: space_of(leaf) for key, leaf in obs.items()})
    shape = tuple(obs.shape[1:])
    if obs.dtype == torch.float32:
        return spaces.Box(-np.inf, np.inf, shape, np.float32)
    if obs.dtype == torch.bool:
        return spaces.Box(0, 1, shape, np.bool_)
    limits = torch.iinfo(obs.dtype)
    return spaces.Box(limits.min, limits.max, shape, np.uint8 if obs.dtype == torch.uint8 else np.int64)


def select(mask: Tensor, yes: Nested, no: Nested) -> Nested:
    """The rows of ``yes`` where ``mask`` [N], else those of ``no``."""
    if isinstance(yes, Tensor):
        return torch.where(mask.view(-1, *[1] * (yes.dim() - 1)), yes, no)
    return yes.apply(partial(select, mask), no)
