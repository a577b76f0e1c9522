"""Episodes of Stable-Baselines3's vector environments with given starts.

A ``VecEnv`` resets a sub-environment inside the step that ended its episode, and without a seed. So the start of the
next episode is queued beforehand in a wrapper inside each sub-environment.
"""

from groupwise.errors import require_extra

require_extra("stable_baselines3", "sb3")

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from groupwise.envs.snapshots import reseed_noise
from groupwise.errors import EnvError, GroupStartError
from groupwise.seeding import derive_seed

_TRIAL_STEPS = 16
Running = tuple[int, int]
"""The state of an environment: number of its episode, -1 when that was not started from the queue; and steps since its start."""


class Start(NamedTuple):
    """How an episode begins."""

    episode: int
    """Number of the episode."""
    start_seed: int
    """Equal seeds, equal starts."""
    noise_seed: int
    """Seeds everything that is drawn after the start."""


class SharedStart(gymnasium.Wrapper):
    """A sub-environment whose next reset takes the queued start; without one it resets as usual.

    The start seed also seeds the environment's spaces, since some environments draw from these; after the reset the
    noise seed takes over there, in ``np_random`` and in generators that the environment or a wrapper keeps. A queued
    start goes before the seed given to ``reset``.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._queued: Start | None = None
        self._episode = -1
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """First observation of the queued episode, or of an ordinary episode."""
        queued, self._queued = self._queued, None
        self._episode = -1 if queued is None else queued.episode
        self._steps = 0
        if queued is None:
            return self.env.reset(seed=seed, options=options)
        return _start(self.env, queued, options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """One step of the environment."""
        self._steps += 1
        return self.env.step(action)

    def queue_start(self, start: Start | None) -> Running:
        """Set the start of the next reset (None: the usual reset); returns the running episode."""
        self._queued = start
        return self._episode, self._steps

    def try_start(self, start: Start, actions: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Each step's observation as bits, reward, terminated and truncated, from a start to the end of the episode.

        Reset it afterwards.
        """
        env = self.env
        while isinstance(env, Monitor):  # the monitor must not log this episode
            env = env.env
        moments: list[tuple[Any, ...]] = [(_bits(_start(env, start, None)[0]),)]
        for action in actions:
            obs, reward, terminated, truncated, _ = env.step(copy.deepcopy(action))
            moments.append((_bits(obs), repr(float(reward)), bool(terminated), bool(truncated)))
            if terminated or truncated:
                break
        return moments


def _bits(obs: Any) -> Any:
    """An observation (array, or dictionary of them) in a form in which NaN equals NaN."""
    if isinstance(obs, dict):
        return {key: _bits(value) for key, value in obs.items()}
    array = np.asarray(obs)
    return array.dtype.str, array.shape, array.tobytes()


def _start(env: gymnasium.Env, start: Start, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    _seed_spaces(env.unwrapped, start.start_seed)
    first = env.reset(seed=start.start_seed, options=options)
    _seed_spaces(env.unwrapped, start.noise_seed)
    reseed_noise(env, start.noise_seed)
    return first


def _seed_spaces(env: gymnasium.Env, seed: int) -> None:
    env.observation_space.seed(seed)
    env.action_space.seed(seed)


def insert_shared_start(env: VecEnv) -> None:
    """Make every sub-environment a ``SharedStart``, however it is wrapped; an ``EnvError`` where that is too late."""
    wrapped = env.env_is_wrapped(SharedStart)
    if all(wrapped):
        return
    inner = env.unwrapped
    if not isinstance(inner, DummyVecEnv):
        raise EnvError(
            f"{wrapped.count(False)} of the {env.num_envs} environments of this {type(inner).__name__} have no "
            "SharedStart; fix: make_vec_env(..., wrapper_class=SharedStart), with "
            "`from groupwise.contrib.sb3 import SharedStart`, or wrap each environment in SharedStart yourself"
        )
    inner.envs = [sub if known else SharedStart(sub) for sub, known in zip(inner.envs, wrapped, strict=True)]


def verify_shared_start(env: VecEnv, seed: int) -> None:
    """Find out by trying that members share their start bit for bit; resets the sub-environments.

    With equal start and equal noise, all of them and a second try must agree for some steps of equal actions; with
    noise of their own, at the start. The ``GroupStartError`` names the sub-environment and the step where they differ.
    """
    space = copy.deepcopy(env.action_space)
    space.seed(seed)
    actions = [space.sample() for _ in range(_TRIAL_STEPS)]
    start = Start(-1, derive_seed(seed, "start"), derive_seed(seed, "noise"))
    other = start._replace(noise_seed=derive_seed(seed, "other"))
    tries = [(start, actions), (start, actions), (other, [])]
    traces = [env.env_method("try_start", *arguments) for arguments in tries]
    expected = traces[0][0]
    for index, trace in ((index, trace[index]) for index in range(env.num_envs) for trace in traces):
        for step, (right, left) in enumerate(zip(expected, trace, strict=False)):
            if right != left:
                when = "at the start" if step == 0 else f"at step {step} of equal actions with equal noise"
                raise GroupStartError(
                    f"members cannot share a start: what was started with the same seed differs {when}, in environment "
                    f"{index}; fix: let the environment draw all its randomness from self.np_random, after "
                    "super().reset(seed=seed), and keep nothing from one episode to the next; or compare episodes from "
                    "different starts, with shared_starts='off'"
                )
