"""One Gymnasium environment that begins where it is told. Wrappers are part of it: reset and captured with it."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import gymnasium

from groupwise.config.env import StartMode
from groupwise.envs.snapshots import Snapshot, SnapshotAdapter, adapter_for, field_copy, reseed_noise
from groupwise.errors import EnvError
from groupwise.seeding import derive_seed

EnvMaker: TypeAlias = Callable[[], gymnasium.Env]
StateSource = Literal["adapter", "fields"]
"""What captures states: an adapter for this kind of environment; a copy of all fields."""

_STARTS_KEPT = 64


class StartMethod(NamedTuple):
    """How attempts share a start."""

    mode: StartMode
    """``snapshot``, ``seed`` or ``fresh``."""
    states: StateSource | None = None
    """Of ``snapshot``: what captures states."""

    def __str__(self) -> str:
        """Tier and source of states, for messages."""
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
        starts: for ``snapshot``, where rows of one process find the starts of their siblings.
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
        """The first observation of an attempt from this seed's start, with noise of its own afterwards."""
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
