"""Environments of one process, one a row, stepped one after another; each begins where it is told."""

import copy
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import gymnasium
import numpy.typing as npt

from groupwise.config.env import StartMode
from groupwise.envs.arrays import OUTCOMES, Arrays, ObsWriter, step_arrays
from groupwise.envs.snapshots import Snapshot, SnapshotAdapter, adapter_for, field_copy, reseed_noise
from groupwise.errors import DataError, EnvError
from groupwise.seeding import derive_seed

EnvMaker: TypeAlias = Callable[[], gymnasium.Env]
StateSource = Literal["adapter", "fields"]
"""What captures states: an adapter for this kind of environment; a copy of all fields."""

_STARTS_KEPT = 64


class StartMethod(NamedTuple):
    """How episodes share a start."""

    mode: StartMode
    """``snapshot``, ``seed`` or ``fresh``."""
    states: StateSource | None = None
    """Of ``snapshot``: what captures states."""

    def __str__(self) -> str:
        """Mode and source of states, for messages."""
        return f"{self.mode} (states by {self.states})" if self.states else self.mode


class Captured(NamedTuple):
    """A state that an adapter captured."""

    state: Snapshot
    obs: Any
    """What was last observed there."""


class StartCache:
    """The last captured starts by their seed, shared by the rows of a process. The oldest goes first."""

    def __init__(self) -> None:
        self._starts: dict[int, Captured] = {}

    def get(self, seed: int) -> Captured | None:
        """The start of this seed, if it is still there."""
        return self._starts.get(seed)

    def put(self, seed: int, start: Captured) -> None:
        """Keep a start."""
        self._starts[seed] = start
        if len(self._starts) > _STARTS_KEPT:
            del self._starts[next(iter(self._starts))]

    def clear(self) -> None:
        """Forget all starts."""
        self._starts.clear()


class EnvRow:
    """One environment with all its wrappers, and how it got where it is.

    Args:
        make: a fresh environment at each call.
        num_random_noops: up to so many random actions follow the reset; how many and which follows from the start seed.
        starts: for ``snapshot``, where rows of one process find the starts of their groups.
    """

    def __init__(self, make: EnvMaker, method: StartMethod, *, num_random_noops: int, starts: StartCache) -> None:
        self.env = make()
        self.extra_steps = 0
        """Environment steps taken outside ``step``."""
        self._make = make
        self._method = method
        self._num_random_noops = num_random_noops
        self._starts = starts
        self._adapter = _adapter(self.env, method)
        self._was_reset = False

    def start(self, start_seed: int, noise_seed: int) -> Any:
        """The first observation of an episode from this seed's start, with noise of its own afterwards."""
        obs = self._shared_start(start_seed) if self._method.mode == "snapshot" else self._begin(start_seed)
        reseed_noise(self.env, noise_seed)
        return obs

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """As the environment's."""
        return self.env.step(action)

    def renew(self) -> None:
        """Go on with a fresh environment; the old one is not asked to close, since it may be broken."""
        self.env = self._make()
        self._was_reset = False

    def close(self) -> None:
        """Free the environment."""
        self.env.close()

    def _shared_start(self, seed: int) -> Any:
        start = self._starts.get(seed)
        if start is not None:
            return self._put(start)
        obs = self._begin(seed)
        self._starts.put(seed, Captured(self._state_adapter().capture(self.env), copy.deepcopy(obs)))
        return obs

    def _put(self, captured: Captured) -> Any:
        if not self._was_reset:  # some of what an environment is made of is made by its first reset
            self._reset(0)
        self._state_adapter().restore(self.env, captured.state)
        return captured.obs

    def _begin(self, seed: int) -> Any:
        """The observation after the seeded reset and the random prefix, which is shorter where the episode is short."""
        actions = self._prefix(seed)
        while True:
            obs, ended = self._play(self._reset(seed), actions)
            if ended is None:
                return obs
            actions = actions[:ended]

    def _play(self, obs: Any, actions: Sequence[Any]) -> tuple[Any, int | None]:
        """The observation after these actions, and which of them ended the episode."""
        for number, action in enumerate(actions):
            obs, _, terminated, truncated, _ = self.env.step(action)
            self.extra_steps += 1
            if terminated or truncated:
                return obs, number
        return obs, None

    def _reset(self, seed: int) -> Any:
        if self._method.mode == "fresh" and self._was_reset:
            self.env.close()
            self.env = self._make()
        self._was_reset = True
        return self.env.reset(seed=seed)[0]

    def _prefix(self, seed: int) -> list[Any]:
        if self._num_random_noops == 0:
            return []
        space = copy.deepcopy(self.env.action_space)
        space.seed(derive_seed(seed, "prefix"))
        length = derive_seed(seed, "prefix length") % (self._num_random_noops + 1)
        return [space.sample() for _ in range(length)]

    def _state_adapter(self) -> SnapshotAdapter:
        assert self._adapter is not None, "only methods with an adapter capture"
        return self._adapter


def _adapter(env: gymnasium.Env, method: StartMethod) -> SnapshotAdapter | None:
    if method.states is None:
        return None
    adapter = field_copy() if method.states == "fields" else adapter_for(env)
    if adapter is None:
        raise EnvError(
            f"no adapter captures the states of {type(env.unwrapped).__name__}; fix: give it clone_state() and "
            "restore_state(state), or start_mode='seed'"
        )
    return adapter


OnError: TypeAlias = Literal["raise", "report"]
"""What becomes of an error in an environment's ``step``: it is passed on, or the row is reported as failed and paused."""


class RowCfg(NamedTuple):
    """What a row is."""

    make: EnvMaker
    env_id: str
    observation_space: Any
    action_space: Any
    max_episode_steps: int | None
    """At which the environment truncates; None if it does not."""
    method: StartMethod
    num_random_noops: int = 0
    reward_parts: tuple[str, ...] = ()
    on_error: OnError = "raise"


class LocalRows:
    """Episodes that are stepped one after another in this process, and write into arrays what they say.

    Args:
        arrays: as ``layout_of`` describes them.
        first: number of the first row, for messages.
    """

    def __init__(self, cfg: RowCfg, arrays: Arrays, first: int = 0) -> None:
        self._cfg = cfg
        self._arrays = arrays
        self._first = first
        self._starts = StartCache()
        num_rows = len(arrays["reward"])
        self.episodes = [
            EnvRow(cfg.make, cfg.method, num_random_noops=cfg.num_random_noops, starts=self._starts)
            for _ in range(num_rows)
        ]
        self._writer = ObsWriter(cfg.observation_space, arrays)
        self._outcomes = [arrays[name] for name in OUTCOMES]
        self._of_step = step_arrays(arrays)
        self._failures: list[str] = []
        self._has_shown_traceback = False

    def step(self, rows: Sequence[int], actions: npt.NDArray[Any]) -> bool:
        """One step of these rows; whether any ended or failed. The others get reward 0 and are not done."""
        episodes, write, parts = self.episodes, self._writer.write, self._cfg.reward_parts
        reward, terminated, truncated, _ = self._outcomes
        for array in self._of_step:
            array.fill(0)
        any_ended = False
        for row, action in zip(rows, actions, strict=True):
            try:
                obs, reward[row], ended, cut, info = episodes[row].step(action)
            except Exception as error:
                self._fail(row, error)
                any_ended = True
                continue
            try:
                write(row, obs)
            except DataError as error:
                raise self._misshapen("step", error) from error
            if ended or cut:
                terminated[row], truncated[row], any_ended = ended, cut, True
            if parts:
                self._store_parts(row, info)
        return any_ended

    def start(self, rows: Sequence[int], start_seeds: Sequence[int], noise_seeds: Sequence[int]) -> None:
        """Start these rows."""
        for row, start, noise in zip(rows, start_seeds, noise_seeds, strict=True):
            self._show(row, self.episodes[row].start(start, noise))

    @property
    def extra_steps(self) -> int:
        """Environment steps taken outside ``step``."""
        return sum(episode.extra_steps for episode in self.episodes)

    def take_failures(self) -> list[str]:
        """What is to be logged about rows that failed; the first with its traceback."""
        failures, self._failures = self._failures, []
        return failures

    def forget_starts(self) -> None:
        """Drop the captured starts, so that the next episode at each resets anew."""
        self._starts.clear()

    def close(self) -> None:
        """Free the environments."""
        for episode in self.episodes:
            episode.close()

    def _show(self, row: int, obs: Any) -> None:
        try:
            self._writer.write(row, obs)
        except DataError as error:
            raise self._misshapen("reset", error) from error

    def _misshapen(self, method: Literal["reset", "step"], error: DataError) -> DataError:
        return DataError(
            f"{method}() of {self._cfg.env_id} returned what its observation_space does not allow: {error}"
        )

    def _store_parts(self, row: int, info: dict[str, Any]) -> None:
        try:
            self._arrays["reward_parts"][row] = [info[key] for key in self._cfg.reward_parts]
        except KeyError as error:
            raise EnvError(
                f"{self._cfg.env_id} has no reward part {error}: its info holds {sorted(info)}; fix: env.reward_parts"
            ) from error

    def _fail(self, row: int, error: Exception) -> None:
        where = f"row {self._first + row} of {self._cfg.env_id}"
        if self._cfg.on_error == "raise":
            error.add_note(f"in {where}")
            raise error
        trace = "" if self._has_shown_traceback else "\n" + "".join(traceback.format_exception(error))
        self._has_shown_traceback = True
        self._failures.append(f"{where} failed, and was replaced: {error!r}{trace}")
        self.episodes[row].renew()
        self._arrays["reward"][row] = 0.0
        self._arrays["failed"][row] = True
