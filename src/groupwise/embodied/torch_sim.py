"""Simulators of others that step all their rows at once, with tensors in and out.

One adapter for EmbodiChain, Isaac Lab's rsl_rl wrapper, ManiSkill's vector environment, mujoco_playground's rsl_rl wrapper,
and rsl_rl's ``VecEnv``. All of them reset a row in the step in which its episode ends.

A step copies nothing to the host. The adapter makes nothing up: its ``notes`` name what a simulator does not report.
"""

import atexit
import copy
import inspect
import os
import sys
import weakref
from collections.abc import Sequence
from ctypes.util import find_library
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

import gymnasium
import mujoco
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from jaxtyping import Float, Int
from torch import Tensor

from groupwise.config.run import StartMode
from groupwise.data.rollout import Nested, TensorDict
from groupwise.data.spaces import obs_spec, subspaces
from groupwise.embodied import vla as nested
from groupwise.envs.base import SUCCESS_KEYS, EnvStep, GroupEnv, GroupStartReport, Mask, Seeds, VectorEnv
from groupwise.envs.starts import verify_group_start
from groupwise.errors import EnvError, GroupStartError
from groupwise.seeding import derive_seed

# Rows of a third-party simulator for GRPO: members of a group share their start by state or seed


class TorchSimGroups(GroupEnv):
    """A simulator for GRPO: a row is over at the first end of its episode, even if the simulator plays on.

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
        return EnvStep(self._obs, reward, terminated, truncated, info=step.info)

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
    episode is bootstrapped by the value of its last seen state, as in rsl_rl.
    """

    autoreset = "same_step"

    def __init__(self, env: Any, *, start_mode: Literal["auto", "none"], obs_groups: Sequence[str] | None) -> None:
        self._env = env
        self._base = getattr(env, "unwrapped", env)
        self.env_id = _name(env, self._base)
        if not hasattr(env, "num_envs") or not callable(getattr(env, "step", None)):
            raise EnvError(f"{self.env_id} has no num_envs or no step; fix: a simulator of many rows")
        _refuse_other_resets(env, self.env_id)
        self.num_envs = int(env.num_envs)
        self.action_space = _action_space(env, self._base, self.env_id)
        self.max_episode_steps = _step_limit(env)
        self._start_mode = start_mode
        self._obs_groups = obs_groups
        self._is_gymnasium = isinstance(env, gymnasium.vector.VectorEnv)
        self._reset_takes = inspect.signature(env.reset).parameters.keys() if hasattr(env, "reset") else None
        self._obs = self._kept(env.get_observations() if self._reset_takes is None else _first(env.reset()))
        self.observation_space = nested.space_of(self._obs)
        self.obs_spec = obs_spec(self.observation_space)
        self.device = self._obs.device
        self.notes = self._missing(env.step(self._any_action()))

    @torch.no_grad()
    def reset(self, *, seed: int | None = None, mask: Mask | None = None) -> Nested:
        """First observations [N, ...] of all rows. Repeatable only where the simulator's ``reset`` takes a seed."""
        return self.restart(seed=seed)

    @torch.no_grad()
    def step(self, action: Tensor) -> EnvStep:
        """One step of every row with environment actions [N, ...]."""
        obs, reward, terminated, truncated, info = self._outcome(self._env.step(action.to(self.device)))
        final = _final(info)
        before, self._obs = self._obs, self._kept(obs)
        return EnvStep(
            self._obs,
            self._tensor(reward).reshape(self.num_envs).float(),
            terminated,
            truncated,
            before if final is None else self._kept(final),
            info=self._reported(info),
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
        self._obs = self._kept(_first(self._env.reset(**settings)))
        return self._obs

    def copy_rows(self, source: Sequence[int], target: Sequence[int]) -> Nested:
        """Observations [N, ...] after copying the states of the ``source`` rows into the ``target`` rows."""
        state = TensorDict(self._base.get_state_dict(), batch_size=[self.num_envs])
        self._base.set_state_dict(state[self._index(source)].to_dict(), self._index(target))
        index = torch.arange(self.num_envs, device=self.device)
        index[self._index(target)] = self._index(source)
        self._obs = self._obs[index]
        return self._obs

    def as_group_env(self, *, verify: bool = True) -> TorchSimGroups:
        """The simulator as rows that start independently.

        Args:
            verify: check by trying, and take the best way that works; otherwise the best that the interface offers.

        Raises:
            GroupStartError: members cannot share their start, and ``start_mode`` is not ``none``.
        """
        modes = self._start_modes() if self._start_mode == "auto" else []
        if self._start_mode == "none" or not verify:
            return TorchSimGroups(self, modes[0] if modes else "none")
        return verified(self, modes)

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
                after = self._kept(_first(self._env.reset(options={name: last})))[:-1]
            except (KeyError, TypeError, ValueError):  # it reads another option, or takes no unknown ones
                continue
            if (before == after).all():
                return name
        return None

    def close(self) -> None:
        """Close the simulator, if it can be closed."""
        if hasattr(self._env, "close"):
            self._env.close()

    def _start_modes(self) -> list[StartMode]:
        """The ways that the interface offers to share a start, best first."""
        if self.row_option is None or self._reset_takes is None or "seed" not in self._reset_takes:
            return []
        has_states = hasattr(self._base, "get_state_dict") and hasattr(self._base, "set_state_dict")
        return ["native", "seed"] if has_states else ["seed"]

    def _outcome(self, outcome: tuple[Any, ...]) -> tuple[Any, Any, Tensor, Tensor, Any]:
        """Observation, reward, terminated, truncated and info, of either kind of step."""
        if len(outcome) == 5:
            obs, reward, terminated, truncated, info = outcome
            return obs, reward, self._tensor(terminated).bool(), self._tensor(truncated).bool(), info
        obs, reward, done, info = outcome
        done, time_outs = self._tensor(done).bool(), info.get("time_outs", None)
        truncated = torch.zeros_like(done) if time_outs is None else done & self._tensor(time_outs).bool()
        return obs, reward, done & ~truncated, truncated, info

    def _reported(self, info: Any) -> dict[str, Tensor]:
        """The success flag in the info of the last step; where rows were reset, that is in ``final_info``."""
        final = info.get("final_info", None)
        info = info if final is None else final
        for key in SUCCESS_KEYS:
            if (flag := info.get(key, None)) is not None:
                return {"success": self._tensor(flag).reshape(self.num_envs).bool()}
        return {}

    def _time_out(self) -> Nested:
        """First observations after every episode was ended by its time limit: the only reset of rsl_rl's ``VecEnv``."""
        if not hasattr(self._env, "episode_length_buf"):
            raise EnvError(f"{self.env_id} has neither reset nor episode_length_buf; fix: give it one of them")
        elapsed = self._env.episode_length_buf
        self._env.episode_length_buf = torch.zeros_like(elapsed) + self._env.max_episode_length
        step = self.step(self._any_action())
        if not bool((step.terminated | step.truncated).all()):
            raise EnvError(
                f"{self.env_id} did not reset the rows whose episode_length_buf is max_episode_length; fix: give it a "
                "reset()"
            )
        return step.obs

    def _missing(self, outcome: tuple[Any, ...]) -> tuple[str, ...]:
        """Notes on what is missing in the outcome of a step, and what follows from it."""
        if len(outcome) not in (4, 5):
            raise EnvError(
                f"step of {self.env_id} returned {len(outcome)} values, expected 4 or 5; fix: as Gymnasium's"
            )
        notes = []
        if len(outcome) == 4 and outcome[-1].get("time_outs", None) is None:
            notes.append(f"{self.env_id} flags no time_outs: every end counts as a termination.")
        elif not self._is_gymnasium and _final(outcome[-1]) is None:
            notes.append(
                f"{self.env_id} loses final observations: truncated episodes are valued by the observation before."
            )
        if seen := [name for name in _PRIVILEGED if name in (subspaces(self.observation_space) or {})]:
            notes.append(f"The actor of {self.env_id} sees {seen[0]!r}, too, unless policy.actor_keys leaves it out.")
        return tuple(notes)

    def _kept(self, obs: Any) -> Nested:
        """A copy of an observation, as simulators overwrite theirs."""
        if self._obs_groups is not None:
            known = [] if isinstance(obs, Tensor) else list(obs.keys())
            if absent := [name for name in self._obs_groups if name not in known]:
                raise EnvError(
                    f"obs_groups has {absent[0]!r}, but the observation of {self.env_id} has "
                    f"{', '.join(known) or 'no groups'}; fix: these"
                )
            obs = {name: obs[name] for name in self._obs_groups}
        return nested.stored(obs, self.num_envs, self.env_id)

    def _tensor(self, value: Any) -> Tensor:
        return torch.as_tensor(value, device=self.device)

    def _index(self, rows: Sequence[int]) -> Tensor:
        return torch.as_tensor(rows, dtype=torch.int64, device=self.device)

    def _any_action(self) -> Tensor:
        """An action of the space, the same for all rows."""
        space = copy.deepcopy(self.action_space)
        space.seed(0)
        return torch.as_tensor(np.stack([space.sample()] * self.num_envs), device=self.device)


def _name(env: Any, base: Any) -> str:
    spec = getattr(env, "spec", None)
    return type(base).__name__ if spec is None else str(spec.id)


def _first(result: Any) -> Any:
    """The observation of ``reset``, which comes with an info or alone."""
    return result[0] if isinstance(result, tuple) else result


def _final(info: Any) -> Any:
    """The final observation of rows that ended, if the simulator reports it; the second is Gymnasium's newer name."""
    return info.get("final_observation", info.get("final_obs", None))


def _refuse_other_resets(env: Any, name: str) -> None:
    """Refuse a vector environment that does not reset a row in the step in which it ends."""
    mode = (getattr(env, "metadata", None) or {}).get("autoreset_mode", AutoresetMode.SAME_STEP)
    if not getattr(env, "auto_reset", True) or AutoresetMode(mode) != AutoresetMode.SAME_STEP:
        raise EnvError(f"{name} does not reset rows in the step in which they end; fix: auto_reset=True, SAME_STEP")


def _action_space(env: Any, base: Any, name: str) -> Any:
    """The space of a row; without one, ``num_actions`` unbounded numbers."""
    for holder in (env, base):
        if (space := getattr(holder, "single_action_space", None)) is not None:
            return space
    if not hasattr(env, "num_actions"):
        raise EnvError(f"{name} has neither single_action_space nor num_actions; fix: give it one of them")
    return spaces.Box(-np.inf, np.inf, (int(env.num_actions),), np.float32)


def _step_limit(env: Any) -> int | None:
    """Steps of the longest episode, under the name that the simulator has for it."""
    for holder, name in (
        (env, "max_episode_steps"),
        (env, "max_episode_length"),
        (getattr(env, "spec", None), "max_episode_steps"),
    ):
        if (limit := getattr(holder, name, None)) is not None:
            return int(torch.as_tensor(limit).max())
    return None


# Small images of MuJoCo scenes, rendered fast without a GPU

Image = npt.NDArray[np.uint8]
"""[height, width, 3]."""


def use_egl_without_display() -> None:
    """Let MuJoCo environments of others draw without a display, unless the user chose how (``MUJOCO_GL``)."""
    has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform == "linux" and not has_display and find_library("EGL"):
        os.environ.setdefault("MUJOCO_GL", "egl")


class Renderer:
    """Draws pictures of one model without shadows, reflections and anti-aliasing, most of a frame's cost on a CPU.

    Parts of meshes that a picture would not show are left out, too. One renderer serves any number of ``MjData`` of the
    model. ``close`` it, or drop it.

    Args:
        size: width and height of the pictures, in pixels.

    Raises:
        EnvError: OpenGL cannot be used.
    """

    def __init__(self, model: Any, size: int) -> None:
        self._model = model
        model.vis.quality.offsamples = 0
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        self._size = size
        self._scene = mujoco.MjvScene(model, maxgeom=1000)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[flag] = False
        self._option = mujoco.MjvOption()
        self._groups = self._option.geomgroup.copy()
        self._perturbation = mujoco.MjvPerturb()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._gl = _gl_context(size)
        self._context = mujoco.MjrContext(_simplified(model, size), mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._free = weakref.finalize(self, _free, self._gl, self._context)
        self._free.atexit = False
        atexit.register(self._free)  # after MuJoCo registered the end of OpenGL, so it runs before that

    def render(self, data: Any, camera: str, *, without: int | None = None) -> Image:
        """The picture [size, size, 3] of a camera of the model.

        Args:
            without: a group of geoms to leave out.
        """
        self._option.geomgroup[:] = self._groups
        if without is not None:
            self._option.geomgroup[without] = 0
        self._camera.fixedcamid = self._model.camera(camera).id
        mujoco.mjv_updateScene(
            self._model,
            data,
            self._option,
            self._perturbation,
            self._camera,
            mujoco.mjtCatBit.mjCAT_ALL,
            self._scene,
        )
        self._gl.make_current()
        viewport = mujoco.MjrRect(0, 0, self._size, self._size)
        mujoco.mjr_render(viewport, self._scene, self._context)
        image = np.empty((self._size, self._size, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, viewport, self._context)
        return image[::-1]  # OpenGL counts rows from below

    def close(self) -> None:
        """Free the memory of OpenGL."""
        self._free()


def _simplified(model: Any, size: int) -> Any:
    """A copy of the model for pictures [size, size], with fewer faces: vertices in one cell of a grid are drawn as one.

    A cell is about a tenth of a pixel at the distance ``model.stat.extent``, and at most a 32nd of the mesh: cameras may be
    close to what is small.
    """
    simplified = copy.copy(model)
    for mesh in np.flatnonzero(model.mesh_facenum):
        first, vertex = model.mesh_faceadr[mesh], model.mesh_vertadr[mesh]
        faces = slice(first, first + model.mesh_facenum[mesh])
        vertices = model.mesh_vert[vertex : vertex + model.mesh_vertnum[mesh]]
        cell = min(model.stat.extent / (8 * size), float(np.ptp(vertices, axis=0).max()) / 32)
        corners, kept = _merged(vertices, model.mesh_face[faces], cell)
        fewer = slice(first, first + len(kept))
        simplified.mesh_facenum[mesh] = len(kept)
        simplified.mesh_face[fewer] = corners
        simplified.mesh_facenormal[fewer] = model.mesh_facenormal[faces][kept]
        simplified.mesh_facetexcoord[fewer] = model.mesh_facetexcoord[faces][kept]
    return simplified


def _merged(
    vertices: Float[np.ndarray, "vertex 3"], faces: Int[np.ndarray, "face 3"], cell: float
) -> tuple[Int[np.ndarray, "kept 3"], Int[np.ndarray, " kept"]]:
    """The faces with corners in three cells, each corner moved to the first vertex of its cell; and their numbers."""
    _, first, group = np.unique(np.floor(vertices / cell), axis=0, return_index=True, return_inverse=True)
    corners = first[group.reshape(-1)][faces]
    kept = np.flatnonzero((corners != np.roll(corners, 1, axis=1)).all(axis=1))
    return corners[kept], kept


def _gl_context(size: int) -> Any:
    """A current OpenGL context: that of ``MUJOCO_GL``, else EGL on Linux and MuJoCo's own choice elsewhere."""
    default = "egl" if sys.platform == "linux" else "cgl" if sys.platform == "darwin" else "glfw"
    backend = os.environ.get("MUJOCO_GL", "").lower() or default
    try:
        context = import_module(f"mujoco.{backend}").GLContext(size, size)
        context.make_current()
    except Exception as error:  # each backend has its own kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise EnvError(
            f"no images, since OpenGL cannot be used by {backend!r} ({reason}); fix: apt-get install libegl1 "
            "libegl-mesa0 libgl1-mesa-dri, or MUJOCO_GL=osmesa with libosmesa6, or learn from states "
            "(env.kwargs.obs='state')"
        ) from error
    return context


def _free(gl: Any, context: Any) -> None:
    gl.make_current()
    context.free()
    gl.free()
