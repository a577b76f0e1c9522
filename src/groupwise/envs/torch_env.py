"""Simulators written in torch, of three pure functions on a batch of states, and Gymnasium's vectorised CartPole."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from jaxtyping import Bool, Float, Int
from torch import Tensor

from groupwise.data.rollout import Nested, Spec, TensorDict, TensorSpec
from groupwise.envs import snapshots as states
from groupwise.envs.base import EnvStep, GroupEnv, Mask, Seeds
from groupwise.errors import EnvError
from groupwise.functional.random import RowRandom, hash_pair, mix, step_key
from groupwise.seeding import derive_seed

State: TypeAlias = Tensor | Mapping[str, Tensor]
"""A batch of states: one tensor [N, ...], or named ones."""


class TorchRows(NamedTuple):
    """The state of the rows of a ``TorchGroupEnv``; tensors [N, ...]."""

    state: dict[str, Tensor]
    """Empty before anything was started."""
    elapsed: Int[Tensor, " row"]
    """Steps since the start of the episode."""
    noise_seed: Int[Tensor, " row"]
    paused: Bool[Tensor, " row"]
    reset_seed: Int[Tensor, " row"]
    num_resets: Int[Tensor, " row"]


class Resets(NamedTuple):
    """Seeds of the next K resets of each row, in whichever steps these are: hashed together, they take K times fewer kernels."""

    seed: Int[Tensor, "reset row"]
    key: Int[Tensor, "reset row"]
    """``step_key`` of the starts."""
    first: Int[Tensor, " row"]
    """Number of resets before them."""


class TorchGroupEnv(GroupEnv):
    """A simulator in torch, on any device. Write three functions; starts, noise and limits are done here.

    ``initial`` gives the first states of episodes, ``transition`` the next ones, ``observe`` the observations.
    They must be pure: draw all randomness from ``random``, return new tensors instead of writing into old ones, and
    keep nothing. They are called with all N rows, and cause no host sync. They may read tensors of the environment that
    change.

    ``stepped``, ``started``, ``renewed`` and ``copied`` are functions of ``TorchRows`` for the collectors of torch
    environments; they do not change the environment.

    Args:
        observation_space, action_space: Gymnasium's spaces of a single row.
        max_episode_steps: episodes are truncated after that many steps; None: never.
        env_id: its name in errors and logs; None: the name of the class.
        device: of the states.
    """

    start_mode = "native"

    def __init__(
        self,
        num_envs: int,
        *,
        observation_space: Any,
        action_space: Any,
        max_episode_steps: int | None,
        env_id: str | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        name, spaces = env_id or type(self).__name__, (observation_space, action_space)
        super().__init__(name, num_envs, spaces, max_episode_steps, device)
        self._is_single = False  # whether the user's state is one tensor, stored as {"": tensor}
        zeros = torch.zeros(num_envs, dtype=torch.int64, device=device)
        paused = torch.ones(num_envs, dtype=torch.bool, device=device)
        self.rows = TorchRows({}, zeros, zeros, paused, mix(torch.arange(num_envs, device=device)), zeros)

    @abstractmethod
    def initial(self, random: RowRandom) -> State:
        """States [N, ...] in which episodes begin."""

    @abstractmethod
    def transition(self, state: Any, action: Tensor, random: RowRandom) -> tuple[State, Tensor, Tensor]:
        """Next states, rewards [N] and terminations [N] (bool) of the actions [N, ...] in the states [N, ...]."""

    def observe(self, state: Any) -> Nested:
        """Observations [N, ...] of the states; unless you write it, the state itself, which must then be one tensor."""
        if not isinstance(state, Tensor):
            raise EnvError(f"the state of {self.env_id} is a dictionary and not an observation; fix: define observe")
        return state

    def success(self, state: Any) -> Tensor | None:
        """Whether the task is done in the states after a transition [N] (bool); optional. Counts where the episode ends."""
        return None

    @torch.no_grad()
    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...]; see ``VectorEnv.reset``."""
        if seed is not None:
            self.rows = self.seeded(self.rows, seed)
        chosen = torch.ones_like(self.rows.paused) if mask is None else self._to_device(mask)
        self.rows = self.renewed(self.rows, chosen)
        return self.observed(self.rows)

    @torch.no_grad()
    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, ...] after starting the rows of ``mask``; see ``GroupEnv.start``."""
        seeds = self._to_device(start_seed), self._to_device(noise_seed)
        self.rows = self.started(self.rows, self._to_device(mask), *seeds)
        return self.observed(self.rows)

    def pause(self, mask: Mask) -> None:
        """Pause the rows of ``mask`` until they are started again."""
        self.rows = self.rows._replace(paused=self.rows.paused | self._to_device(mask))

    @torch.no_grad()
    def step(self, action: Tensor) -> EnvStep:
        """One step of every row that is not paused with actions [N, ...]."""
        self.rows, step = self.stepped(self.rows, action)
        return step

    @torch.no_grad()
    def stepped(self, rows: TorchRows, action: Tensor) -> tuple[TorchRows, EnvStep]:
        """The rows after one step of every row that is not paused with actions [N, ...], and what it returned."""
        before = self._begun(rows)
        versions = _versions(before)
        random = RowRandom(rows.noise_seed, rows.elapsed + 1)  # step 0 of the stream is for starts
        found = cast(Any, self.transition(self._user(before), action.to(self.device), random))
        if not isinstance(found, tuple) or len(found) != 3:
            values = f"{len(found)} values" if isinstance(found, tuple) else f"a {type(found).__name__}"
            raise EnvError(
                f"transition of {self.env_id} returned {values}, expected (state, reward, terminated); fix: return all three"
            )
        state, reward, terminated = found
        after = self._named(state)
        if _versions(before) != versions:
            raise EnvError(f"transition of {self.env_id} wrote into the state it was given; fix: return new tensors")
        success = self.success(self._user(after))
        wanted, got = ({name: (leaf.shape, leaf.dtype) for name, leaf in state.items()} for state in (before, after))
        if got != wanted:
            raise EnvError(
                f"transition of {self.env_id} returned states {got}, expected {wanted} as from initial; fix: keep shapes and dtypes"
            )
        n = self.num_envs
        if not _is_row(reward, n) or not _is_row(terminated, n, torch.bool):
            raise EnvError(
                f"transition of {self.env_id} returned rewards {_shown(reward)} and terminations {_shown(terminated)}, "
                f"expected [{n}] and [{n}] of torch.bool; fix: one number and one truth value a row"
            )
        if success is not None and not _is_row(success, n, torch.bool):
            raise EnvError(
                f"success of {self.env_id} returned {_shown(success)}, expected [{n}] of torch.bool; fix: one truth value a row"
            )
        live = ~rows.paused
        elapsed = rows.elapsed + live
        terminated = terminated & live
        limit = self.max_episode_steps
        truncated = torch.zeros_like(live) if limit is None else live & (elapsed >= limit)
        rows = rows._replace(
            state=_select(live, after, before), elapsed=elapsed, paused=rows.paused | terminated | truncated
        )
        reward = torch.where(live, reward.to(torch.float32), 0.0)
        return rows, EnvStep(
            self.observed(rows), reward, terminated, truncated, info={} if success is None else {"success": success}
        )

    @torch.no_grad()
    def started(
        self,
        rows: TorchRows,
        chosen: Bool[Tensor, " row"],
        start_seed: Int[Tensor, " row"],
        noise_seed: Int[Tensor, " row"],
        key: Int[Tensor, " row"] | None = None,
    ) -> TorchRows:
        """The rows after starting the chosen ones; see ``start``. ``key`` is the ``step_key`` of starts, where it is known."""
        fresh = self._named(self.initial(RowRandom(start_seed, torch.zeros_like(start_seed), key)))
        if wrong := [list(leaf.shape) for leaf in fresh.values() if leaf.shape[:1] != (self.num_envs,)]:
            raise EnvError(
                f"initial of {self.env_id} returned states {wrong[0]}, expected [{self.num_envs}, ...]: a row for each environment; "
                "fix: random.uniform or random.normal, which give one"
            )
        state = _select(chosen, fresh, rows.state) if rows.state else fresh
        return self._begin(rows._replace(state=state), chosen, torch.zeros_like(rows.elapsed), noise_seed)

    @torch.no_grad()
    def renewed(self, rows: TorchRows, chosen: Bool[Tensor, " row"], resets: Resets | None = None) -> TorchRows:
        """The rows after resetting the chosen ones, each by its own stream; ``resets`` has the seeds, where they are known."""
        resets = self.resets(rows, 1) if resets is None else resets
        place = (rows.num_resets - resets.first)[None]
        seed, key = (numbers.gather(0, place)[0] for numbers in resets[:2])
        return self.started(rows._replace(num_resets=rows.num_resets + chosen), chosen, seed, seed, key)

    def resets(self, rows: TorchRows, count: int) -> Resets:
        """The seeds of the next ``count`` resets."""
        number = torch.arange(count, device=self.device)[:, None]
        seed = hash_pair(rows.reset_seed, rows.num_resets + number)
        return Resets(seed, step_key(seed, torch.zeros_like(seed)), rows.num_resets)

    def seeded(self, rows: TorchRows, seed: int) -> TorchRows:
        """The rows with new streams of resets; nothing else changes."""
        number = torch.arange(self.num_envs, device=self.device)
        streams = mix(derive_seed(seed, "reset") + (number << 32))
        return rows._replace(reset_seed=streams, num_resets=torch.zeros_like(rows.num_resets))

    @torch.no_grad()
    def copied(
        self,
        rows: TorchRows,
        chosen: Bool[Tensor, " row"],
        source: Int[Tensor, " row"],
        noise_seed: Int[Tensor, " row"],
    ) -> TorchRows:
        """The rows after copying the states and elapsed steps of the ``source`` rows into the chosen ones."""
        theirs = {name: leaf[source] for name, leaf in self._begun(rows).items()}
        moved = rows._replace(state=_select(chosen, theirs, rows.state))
        return self._begin(moved, chosen, rows.elapsed[source], noise_seed)

    def observed(self, rows: TorchRows) -> Nested:
        """Observations [N, ...] of rows."""
        obs = self.observe(self._user(rows.state))
        if wrong := _misfit(self.obs_spec, obs, self.num_envs):
            raise EnvError(
                f"observe of {self.env_id} returned {wrong}; fix: return what observation_space says, with a row for each environment"
            )
        return _stored(self.obs_spec, obs, self.num_envs)

    def state_dict(self) -> dict[str, Any]:
        """The state of the rows, as tensors."""
        return self.rows._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved ``state_dict``."""
        leaves = {name: leaf.to(self.device) for name, leaf in state["state"].items()}
        self._is_single = set(leaves) == {""}
        self.rows = TorchRows(leaves, *(state[name].to(self.device) for name in TorchRows._fields[1:]))

    def close(self) -> None:
        """Nothing to free."""

    @staticmethod
    def _begin(rows: TorchRows, chosen: Bool[Tensor, " row"], elapsed: Tensor, noise_seed: Tensor) -> TorchRows:
        return rows._replace(
            elapsed=torch.where(chosen, elapsed, rows.elapsed),
            noise_seed=torch.where(chosen, noise_seed, rows.noise_seed),
            paused=rows.paused & ~chosen,
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _begun(self, rows: TorchRows) -> dict[str, Tensor]:
        if not rows.state:
            raise EnvError(f"{self.env_id} was stepped before anything started; fix: call start or reset first")
        return rows.state

    def _named(self, state: State) -> dict[str, Tensor]:
        self._is_single = isinstance(state, Tensor)
        named: Any = {"": state} if isinstance(state, Tensor) else state
        if not isinstance(named, Mapping) or not all(isinstance(leaf, Tensor) for leaf in named.values()):
            raise EnvError(
                f"a state of {self.env_id} is {state!r:.80}, expected a tensor or tensors by name; fix: return these from "
                "initial and transition"
            )
        return dict(named)

    def _user(self, state: dict[str, Tensor]) -> State:
        return state[""] if self._is_single else state


def _versions(state: Mapping[str, Tensor]) -> list[int]:
    """The number of times that each tensor was written into; not counted in ``torch.inference_mode`` or compiled code."""
    if torch.compiler.is_compiling():
        return []
    return [leaf._version for leaf in state.values() if not leaf.is_inference()]


def _is_row(value: Any, num_rows: int, dtype: torch.dtype | None = None) -> bool:
    """Whether it is a tensor of one value a row, of the dtype if one is given."""
    return isinstance(value, Tensor) and value.shape == (num_rows,) and dtype in (None, value.dtype)


def _shown(value: Any) -> str:
    return f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"{value!r:.80}"


def _misfit(spec: Spec, obs: Any, num_rows: int, name: str = "observations") -> str | None:
    """How the observations differ from the spec, in words; None if they do not."""
    if isinstance(spec, TensorSpec):
        shape = list(obs.shape) if isinstance(obs, Tensor) else type(obs).__name__
        expected = [num_rows, *spec.shape]
        return None if shape == expected else f"{name} {shape}, expected {expected}"
    if not isinstance(obs, Mapping | TensorDict):
        return f"{name} as a {type(obs).__name__}, expected {', '.join(spec)} by name"
    for key, child in spec.items():
        if key not in obs.keys():  # noqa: SIM118  of a TensorDict
            return f"{name} without {key!r}"
        if wrong := _misfit(
            child, obs[key], num_rows, f"{name} {key!r}" if name == "observations" else f"{name}.{key}"
        ):
            return wrong
    return None


def _stored(spec: Spec, obs: Any, num_rows: int) -> Nested:
    """The observations as a rollout stores them, so that the policy acts on the numbers that it is trained on."""
    if isinstance(spec, TensorSpec):
        return obs.to(spec.dtype) if obs.is_floating_point() and spec.dtype.is_floating_point else cast(Tensor, obs)
    return TensorDict({key: _stored(child, obs[key], num_rows) for key, child in spec.items()}, batch_size=[num_rows])


def _select(mask: Bool[Tensor, " row"], yes: Mapping[str, Tensor], no: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rows of ``yes`` where ``mask`` is True, otherwise rows of ``no``."""
    return {name: torch.where(mask.reshape(-1, *[1] * (leaf.ndim - 1)), leaf, no[name]) for name, leaf in yes.items()}


# Gymnasium's vectorised CartPole, with rows that start independently


class CartPoleGroupEnv(GroupEnv):
    """Gymnasium's ``CartPoleVectorEnv``, whose rows start one by one and are paused once they have finished.

    Gymnasium's class cannot disable autoreset, take a seed for each row or reset some rows, but its state is public
    and is set from outside. Every row behaves bit for bit like the single environment. Steps are not random, so the
    noise seed has no effect.
    """

    start_mode = "native"

    def __init__(self, env: CartPoleVectorEnv, *, env_id: str, device: torch.device | str = "cpu") -> None:
        spaces = env.single_observation_space, env.single_action_space
        super().__init__(env_id, env.num_envs, spaces, env.max_episode_steps, device)
        self._env: Any = env  # Gymnasium declares its public state as None
        self._paused: Mask = np.zeros(env.num_envs, dtype=np.bool_)
        self.reset(seed=0)

    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, 4]. All rows draw from one stream, as Gymnasium's class does."""
        if mask is None:
            self._env.reset(seed=seed)
            mask, drawn = np.ones_like(self._paused), self._env.state
        else:
            drawn = self._env.np_random.uniform(self._env.low, self._env.high, size=(4, int(mask.sum())))
        return self._begin(mask, drawn)

    def start(self, mask: Mask, start_seed: Seeds, noise_seed: Seeds) -> Nested:
        """Observations [N, 4] after starting the rows of ``mask``; see ``GroupEnv.start``."""
        single = [np.random.default_rng(seed).uniform(-0.05, 0.05, size=4) for seed in start_seed[mask].tolist()]
        return self._begin(mask, np.reshape(single, (-1, 4)).T)

    def pause(self, mask: Mask) -> None:
        """Pause the rows of ``mask`` until they are started again."""
        self._paused |= mask

    def step(self, action: Tensor) -> EnvStep:
        """One step of every row that is not paused with actions [N]."""
        env, before, paused = self._env, self._env.state, self._paused
        obs, reward, terminated, truncated, _ = env.step(action.cpu().numpy())
        env.prev_done[:] = False  # or the next step would reset the finished rows
        if paused.any():
            env.state[:, paused] = before[:, paused]
            obs[paused] = before.T[paused]
            reward[paused] = 0.0
            terminated[paused] = False
            truncated[paused] = False
        self._paused = paused | terminated | truncated
        shown = torch.from_numpy(obs).to(self.device)
        return EnvStep(shown, torch.from_numpy(reward), torch.from_numpy(terminated), torch.from_numpy(truncated))

    def state_dict(self) -> dict[str, Any] | None:
        """The state of all rows as plain data."""
        env = states.capture(self._env)
        return None if env is None else {"env": env, "paused": self._paused.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved ``state_dict``."""
        states.restore(self._env, state["env"])
        self._paused = state["paused"].copy()

    def close(self) -> None:
        """Free the environment."""
        self._env.close()

    def _begin(self, mask: Mask, state: npt.NDArray[np.float64]) -> Tensor:
        self._env.state[:, mask] = state
        self._env.steps[mask] = 0
        self._paused[mask] = False
        return torch.from_numpy(self._env.state.T.astype(np.float32)).to(self.device)


# CartPole in torch: thousands of rows per step, on the CPU or a GPU


class TorchCartPole(TorchGroupEnv):
    """Gymnasium's CartPole-v1, in float32. Starts have the same distribution, from other random streams.

    Source: Barto, Sutton, Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems",
    1983; constants and Euler's method as in Gymnasium's ``CartPoleEnv``.
    """

    GRAVITY = 9.8
    MASS_POLE = 0.1
    MASS_TOTAL = 1.1
    HALF_LENGTH = 0.5
    FORCE = 10.0
    SECONDS = 0.02
    MAX_POSITION = 2.4
    MAX_ANGLE = 12 * 2 * math.pi / 360

    def __init__(self, num_envs: int, *, max_episode_steps: int = 500, device: torch.device | str = "cpu") -> None:
        high = np.array([2 * self.MAX_POSITION, np.inf, 2 * self.MAX_ANGLE, np.inf], dtype=np.float32)
        super().__init__(
            num_envs,
            observation_space=spaces.Box(-high, high, dtype=np.float32),
            action_space=spaces.Discrete(2),
            max_episode_steps=max_episode_steps,
            device=device,
        )

    def initial(self, random: RowRandom) -> Float[Tensor, "row 4"]:
        """Position, velocity, angle and angular velocity [N, 4], each within 0.05 of rest."""
        return random.uniform(4, low=-0.05, high=0.05)

    def transition(
        self, state: Float[Tensor, "row 4"], action: Int[Tensor, " row"], random: RowRandom
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step of 0.02 s with a push to the left (0) or right (1); 1 is earned, and the pole may fall."""
        x, x_dot, theta, theta_dot = state.unbind(1)
        force = (2 * action - 1).to(x) * self.FORCE
        cos, sin = theta.cos(), theta.sin()
        pole = self.MASS_POLE * self.HALF_LENGTH
        push = (force + pole * theta_dot.square() * sin) / self.MASS_TOTAL
        inertia = self.HALF_LENGTH * (4.0 / 3.0 - self.MASS_POLE * cos.square() / self.MASS_TOTAL)
        theta_acc = (self.GRAVITY * sin - cos * push) / inertia
        x_acc = push - pole * theta_acc * cos / self.MASS_TOTAL
        rates = torch.stack([x_dot, x_acc, theta_dot, theta_acc], dim=1)
        state = state + self.SECONDS * rates
        fell = (state[:, 0].abs() > self.MAX_POSITION) | (state[:, 2].abs() > self.MAX_ANGLE)
        return state, torch.ones_like(x), fell
