"""Siblings that share a start in any Gymnasium environment, and the proof that they do."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from groupwise.data.rollout import Nested
from groupwise.envs.base import EnvStep, GroupEnv, Mask, Seeds
from groupwise.envs.gymnasium import GymnasiumVectorEnv
from groupwise.errors import GroupStartError
from groupwise.seeding import derive_seed

_SEED_BITS = 31
_HOLD = "groupwise.hold"


class AttemptWrapper(gymnasium.Wrapper):
    """One environment that starts where it is told and is held once it has finished.

    The seed of ``reset`` packs two: the low 31 bits make the start, the rest seed ``np_random`` afterwards. So equal
    starts need not mean equal noise. ``reset(options={"groupwise.hold": True})`` holds instead of resetting.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._obs: Any = None
        self._held = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observation of a new attempt, or the last of the old one when told to hold."""
        if options is not None and _HOLD in options:
            self._held = True
            return self._obs, {}
        self._held = False
        start_seed = None if seed is None else seed & (1 << _SEED_BITS) - 1
        self._obs, info = self.env.reset(seed=start_seed, options=options)
        if seed is not None:
            self.unwrapped.np_random = np.random.default_rng(seed >> _SEED_BITS)
        return self._obs, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step; a held environment takes none and repeats its last observation with reward 0."""
        if self._held:
            return self._obs, 0.0, False, False, {}
        self._obs, reward, terminated, truncated, info = self.env.step(action)
        self._held = bool(terminated or truncated)
        return self._obs, float(reward), bool(terminated), bool(truncated), info


class SeededGroupEnv(GymnasiumVectorEnv, GroupEnv):
    """Copies of one Gymnasium environment in which a row starts by a seeded reset of its own.

    Args:
        make: a fresh environment at each call.
        vectorizer: steps the copies in this process or in one each.
    """

    start_tier = "seed"

    def __init__(
        self,
        make: Callable[[], gymnasium.Env],
        num_envs: int,
        *,
        env_id: str,
        max_episode_steps: int | None,
        vectorizer: type[SyncVectorEnv] | type[AsyncVectorEnv] = SyncVectorEnv,
        device: torch.device | str = "cpu",
    ) -> None:
        makers: Sequence[Callable[[], gymnasium.Env]] = [lambda: AttemptWrapper(make())] * num_envs
        env: gymnasium.vector.VectorEnv = vectorizer(makers, copy=False, autoreset_mode=AutoresetMode.DISABLED)
        super().__init__(env, env_id=env_id, max_episode_steps=max_episode_steps, device=device)
        self._finished: Mask = np.zeros(num_envs, dtype=np.bool_)

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...]; see ``VectorEnv.reset``."""
        self._finished = np.zeros_like(self._finished) if mask is None else self._finished & ~mask
        return super().reset(seed=seed, mask=mask)

    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, ...] after starting the rows of ``mask``; see ``GroupEnv.start``."""
        self._finished = self._finished & ~mask
        seeds = [_pack(start, noise) for start, noise in zip(start_seed.tolist(), noise_seed.tolist(), strict=True)]
        obs, _ = self._env.reset(seed=seeds, options={"reset_mask": mask})  # type: ignore[arg-type]
        return self._tensor(obs)

    def hold(self, mask: Mask) -> None:
        """Hold the rows of ``mask`` until they are started again."""
        self._finished = self._finished & ~mask
        self._env.reset(options={"reset_mask": mask, _HOLD: True})

    def step(self, action: torch.Tensor) -> EnvStep:
        """One step of every row that is not held with environment actions [N, ...]."""
        if self._finished.any():
            self.hold(self._finished)  # Gymnasium refuses to step a finished row; the wrapper must be asked to hold it
        step = super().step(action)
        self._finished = (step.terminated | step.truncated).numpy()
        return step

    def _row_seeds(self, seed: int) -> list[int]:
        return [_pack(derive_seed(seed, "start", i), derive_seed(seed, "noise", i)) for i in range(self.num_envs)]


def _pack(start_seed: int, noise_seed: int) -> int:
    return start_seed | noise_seed << _SEED_BITS


class GroupStartReport(NamedTuple):
    """What ``verify_group_start`` found out about an environment that passed."""

    env_id: str
    tier: str
    """How siblings share a start, see ``GroupEnv.start_tier``."""
    start_varies: bool
    """Whether another start seed gives another start."""
    noise_varies: bool
    """Whether siblings with their own noise seeds drifted apart under equal actions."""


_Trace = list[dict[str, npt.NDArray[Any]]]


def verify_group_start(env: GroupEnv, *, seed: int = 0, num_steps: int = 32) -> GroupStartReport:
    """Proof that siblings share a start, found by trying.

    Rows with equal seeds must agree bit for bit at the start and for ``num_steps`` steps of equal random actions (or
    until the episode ends), among each other and with a second try. Rows that differ in their noise seed only must
    agree at the start. Leaves the environment somewhere; start or reset it afterwards.

    Raises:
        GroupStartError: names the environment, the step and the key where they differ.
    """
    actions = _random_actions(env, seed, num_steps)
    start = np.full(env.num_envs, derive_seed(seed, "start"), dtype=np.int64)
    noise = np.full(env.num_envs, derive_seed(seed, "noise"), dtype=np.int64)
    own_noise = np.array([derive_seed(seed, "noise", row) for row in range(env.num_envs)], dtype=np.int64)
    first = _trace(env, start, noise, actions)
    again = _trace(env, start, noise, actions)
    apart = _trace(env, start, own_noise, actions)
    elsewhere = _trace(env, start ^ 1, noise, actions[:0])

    _check_equal(env, first, first)
    _check_equal(env, first, again)
    _check_equal(env, first, apart[:1])
    return GroupStartReport(
        env.env_id,
        env.start_tier,
        start_varies=_first_difference(first, elsewhere[:1]) is not None,
        noise_varies=_first_difference(first, apart) is not None,
    )


def _random_actions(env: GroupEnv, seed: int, num_steps: int) -> list[torch.Tensor]:
    space = copy.deepcopy(env.action_space)
    space.seed(seed)
    return [torch.from_numpy(np.stack([np.asarray(space.sample())] * env.num_envs)) for _ in range(num_steps)]


def _trace(env: GroupEnv, start_seed: Seeds, noise_seed: Seeds, actions: Sequence[torch.Tensor]) -> _Trace:
    """Everything the environment said, the start first, up to the first end of an episode."""
    obs = env.start(np.ones(env.num_envs, dtype=np.bool_), start_seed, noise_seed)
    trace = [_arrays(obs, "obs")]
    for action in actions:
        step = env.step(action)
        flags = {"reward": step.reward, "terminated": step.terminated, "truncated": step.truncated}
        trace.append(_arrays(step.obs, "obs") | {key: tensor.cpu().numpy().copy() for key, tensor in flags.items()})
        if trace[-1]["terminated"].any() or trace[-1]["truncated"].any():
            break
    return trace


def _arrays(obs: Nested, name: str) -> dict[str, npt.NDArray[Any]]:
    if isinstance(obs, torch.Tensor):
        return {name: obs.cpu().numpy().copy()}
    return {key: array for child, leaf in obs.items() for key, array in _arrays(leaf, f"{name}.{child}").items()}


def _first_difference(expected: _Trace, trace: _Trace) -> tuple[int, str, int] | None:
    """Step, key and row where ``trace`` first differs from row 0 of ``expected``; None if nowhere."""
    for step, (right, left) in enumerate(zip(expected, trace, strict=False)):
        for key, array in left.items():
            reference = right[key][:1]
            same = (array == reference) | ((array != array) & (reference != reference))
            if not same.all():
                return step, key, int(np.argwhere(~same)[0, 0])
    return None


def _check_equal(env: GroupEnv, expected: _Trace, trace: _Trace) -> None:
    difference = _first_difference(expected, trace)
    if difference is None:
        return
    step, key, row = difference
    when = "at the start" if step == 0 else f"at step {step} of equal actions with equal noise"
    raise GroupStartError(
        f"siblings of {env.env_id} cannot share a start: rows that were started with the same seed differ {when}, in "
        f"{key!r} of row {row}; mend: let the environment draw all its randomness from self.np_random, after "
        "super().reset(seed=seed), and keep nothing from one episode to the next"
    )
