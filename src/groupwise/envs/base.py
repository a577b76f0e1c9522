"""Interfaces of vectorised environments in tensors.

Nothing here imports a simulator. ``VectorEnv`` is enough for PPO; ``GroupEnv`` adds rows that start independently from
a given seed and are paused once they have finished.
"""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from groupwise.config.run import StartMode
from groupwise.data.rollout import Nested, Spec
from groupwise.data.spaces import obs_spec
from groupwise.errors import DataError, EnvError, GroupStartError, GroupwiseError

Mask = npt.NDArray[np.bool_]
Seeds = npt.NDArray[np.int64]
Autoreset = Literal["next_step", "same_step", "disabled"]


class EnvStep(NamedTuple):
    """Result of one step of N environments. Tensors are fresh or may be overwritten by the next step."""

    obs: Nested
    reward: Tensor
    """[N] float32."""
    terminated: Tensor
    """[N] bool."""
    truncated: Tensor
    """[N] bool."""
    final_obs: Nested | None = None
    """[N, ...] with ``same_step``: the last observations of episodes that ended, other rows are padding. None when none ended."""
    failed: Tensor | None = None
    """[N] bool: rows whose environment raised an error, and was replaced and paused. None when none did, or errors are raised."""
    info: Mapping[str, Any] = {}
    """Further reports of the environment. Every step: ``executed`` [N] int64 with ``env.action_chunk`` or ``action_repeat``, the
    environment steps that the action took, and ``reward_parts`` [N, R] float32 with ``credit.reward="parts"``. For the episodes
    that end with this step, if any reports it (other rows mean nothing): ``success`` [N] bool, and two that are fresh in each
    step: ``task`` [N] str, the names of their tasks, and ``log_info``, the numbers of ``env.log_info`` [N] float64 by name."""


class VectorEnv(ABC):
    """N environments stepped together."""

    env_id: str
    """Name of the environment in errors, logs and checkpoints."""
    device: torch.device = torch.device("cpu")
    """Device of the observations."""
    num_envs: int
    observation_space: Any
    """The single environment's Gymnasium space."""
    action_space: Any
    """The single environment's Gymnasium space."""
    obs_spec: Spec
    max_episode_steps: int | None
    autoreset: Autoreset
    """Gymnasium's AutoresetMode: who resets a finished row, and when. ``disabled``: the caller does."""
    carries_over: str = ""
    """Where episodes depend on earlier ones, so that new environments show a policy something else; empty: not found, or not looked for."""
    notes: tuple[str, ...] = ()
    """Lines that a run prints about it when training starts."""

    def __init__(
        self, env_id: str, num_envs: int, spaces: tuple[Any, Any], max_steps: int | None, device: torch.device | str
    ) -> None:
        self.env_id, self.num_envs, self.max_episode_steps = env_id, num_envs, max_steps
        self.observation_space, self.action_space = spaces
        self.obs_spec = obs_spec(self.observation_space)
        self.device = torch.device(device)

    @abstractmethod
    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...].

        Args:
            seed: makes the reset repeatable (each row has its own stream); None continues the streams.
            mask: rows to reset; the others keep their state and observation. Only with ``disabled``.
        """

    @abstractmethod
    def step(self, action: Tensor) -> EnvStep:
        """One step of every row with environment actions [N, ...]."""

    def as_group_env(self, *, verify: bool = True) -> "GroupEnv":
        """The same environments as rows that start independently.

        Args:
            verify: check by trying that members share their start.

        Raises:
            GroupStartError: they do not, or cannot.
        """
        raise GroupStartError(
            f"rows of {self.env_id} do not start from given seeds, so members could not share a start; fix: ppo, an id or "
            "a callable that makes one gymnasium.Env (with vectorization='sync'), or derive a GroupEnv"
        )

    def state_dict(self) -> dict[str, Any] | None:
        """The state of all rows as plain data, arrays and tensors; None where it cannot be captured."""
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved ``state_dict``.

        Raises:
            EnvError: the state is of another environment, or this one cannot restore any.
        """
        raise EnvError(f"the state of {self.env_id} cannot be restored; fix: start new episodes")

    @abstractmethod
    def close(self) -> None:
        """Free simulators and processes."""


class GroupStartReport(NamedTuple):
    """Result of the check of the shared start."""

    env_id: str
    start_mode: StartMode
    """How members share a start, see ``GroupEnv.start_mode``."""
    start_varies: bool
    """Whether another start seed gives another start."""
    noise_varies: bool
    """Whether members with their own noise seeds drifted apart under equal actions."""
    rejected: tuple[str, ...] = ()
    """Reasons why better modes were not chosen."""


class GroupEnv(VectorEnv):
    """N environments whose rows start independently, from given seeds.

    A finished row that was not started again is paused: ``step`` takes no environment step there, and returns its
    last observation with reward 0 and not done. Rows must be started (or all reset) before the first ``step``.
    """

    autoreset: Autoreset = "disabled"
    start_mode: StartMode
    """How members share a start."""
    block_size: int = 1
    """Neighbouring rows that can only start together; 1: each row starts alone."""
    start_report: GroupStartReport | None = None
    """Result of the check of the shared start; None if it was not checked."""
    horizon: int | None = None
    """Steps after which the collector cuts episodes, which then report success and task. None: it does not."""

    def as_group_env(self, *, verify: bool = True) -> "GroupEnv":
        """The environment itself; ``make_env`` and the collectors check the start."""
        return self

    @abstractmethod
    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, ...] after starting the rows of ``mask``; other rows keep theirs.

        Args:
            start_seed: [N] rows with equal numbers begin in the same state, bit for bit.
            noise_seed: [N] stream of everything random after the start; members get different ones.
        """

    @abstractmethod
    def pause(self, mask: Mask) -> None:
        """Pause the rows of ``mask`` until they are started again."""


# Success flags and names of tasks in Gymnasium's infos

SUCCESS_KEYS = ("is_success", "success")
"""Keys of gymnasium-robotics and Stable-Baselines3, and of Meta-World and ManiSkill."""


def first_of(env: Any, env_id: str, **options: Any) -> tuple[Any, Mapping[str, Any]]:
    """First observation and info of an episode, as ``env.reset`` returns them.

    Raises:
        DataError: it does not take or return what Gymnasium expects.
    """
    try:
        found = env.reset(**options)
    except (ArithmeticError, TypeError, ValueError) as error:
        if "unexpected keyword argument" in str(error):
            raise DataError(
                f"reset() of {env_id} does not take a seed ({error}); fix: def reset(self, *, seed=None, options=None)"
            ) from error
        if not arose_outside(error):
            raise
        raise DataError(f"reset() of {env_id}: {error}; expected (observation, info); fix: return obs, {{}}") from error
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)):
        raise DataError(
            f"reset() of {env_id} returned {found!r:.80}, expected (observation, info); fix: return obs, {{}}"
        )
    return found


def arose_outside(error: Exception) -> bool:
    """Whether the error arose where what an environment returned is taken apart, here or in a wrapper, not in itself."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    modules = ("groupwise.envs.", "gymnasium.core", "gymnasium.wrappers.")
    is_raw = isinstance(error, ArithmeticError | TypeError | ValueError) and not isinstance(error, GroupwiseError)
    return is_raw and str(frame.f_globals.get("__name__")).startswith(modules)


def success_of_row(info: Mapping[str, Any]) -> bool | None:
    """The flag in the info of a single environment; None without one. True and 1 are a success, other numbers are none."""
    for key in SUCCESS_KEYS:
        if key in info and (flag := np.asarray(info[key])).shape == () and flag.dtype.kind in "biuf":
            return bool(flag == 1)
    return None


def task_of_row(info: Mapping[str, Any]) -> str:
    """The name of the task in the info of a single environment; empty without one."""
    task = info.get("task")
    return task if isinstance(task, str) else ""


def outcomes_of_rows(info: Mapping[str, Any], num_envs: int) -> dict[str, Any]:
    """``success`` and ``task`` [N], as in ``EnvStep.info``, in the info of a vector environment; nothing if it has no flags."""
    final = info.get("final_info")  # the last steps of episodes, where rows are reset in the same step
    info = final if isinstance(final, Mapping) else info
    for key in SUCCESS_KEYS:
        if key in info and np.shape(info[key]) == (num_envs,):
            success = torch.from_numpy((np.asarray(info[key]) == 1).astype(np.bool_) & info.get(f"_{key}", True))
            tasks: Any = info.get("task")
            if np.shape(tasks) != (num_envs,):
                return {"success": success}
            return {"success": success, "task": np.array([task_of_row({"task": task}) for task in np.asarray(tasks)])}
    return {}


def successes_by_task(outcomes: Iterable[tuple[str | None, bool | None]]) -> dict[str, list[bool]]:
    """The successes of each task's episodes, in the order of names; empty unless there are several tasks.

    Args:
        outcomes: task and success of each episode. Episodes without a task are left out; episodes without a
            success failed.
    """
    found: dict[str, list[bool]] = {}
    for task, success in outcomes:
        if task:
            found.setdefault(task, []).append(success is True)
    return dict(sorted(found.items())) if len(found) > 1 else {}
