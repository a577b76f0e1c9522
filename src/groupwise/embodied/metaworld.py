"""The 50 tasks of Meta-World, as ``MetaWorld/push-v3`` and so on, and ``MetaWorld/multi`` for several in one run.

The simulation, rewards and criteria of success are those of the package ``metaworld``. Differences from it:

- The seed of ``reset`` alone decides the start: task, positions of objects and goal. The package ignores that seed,
  and its starts depend on the episode before.
- Success ends the episode. The package plays on, and success may be lost again.
- States can be captured and restored bit for bit (``clone_state``, ``restore_state``).
- Images are small, fast and drawn only on demand (``DrawsOnDemand``).
"""

from groupwise.envs.names import require_package

require_package("MetaWorld/")

import atexit
import json
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import gymnasium
import mujoco
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.envs.mujoco import MujocoEnv
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.sawyer_xyz_env import SawyerMocapBase, SawyerXYZEnv
from packaging.version import Version

from groupwise.embodied.experts import register_expert
from groupwise.errors import EnvError, UnknownNameError

VIEWS = ("topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV")
_PHYSICS = mujoco.mjtState.mjSTATE_INTEGRATION
_VIEWS_OF_DATA = ("init_left_pad", "init_right_pad")
"""Views of ``MjData``, so they follow it."""
_ARM_GROUP = 2
"""Group of the arm's geoms: the highest one that is drawn by default."""
_ARM = ("base", "controller_box", "head", "pedestal", "screen", "torso")
_STATE_KINDS = (np.ndarray, np.generic, bool, int, float, list, type(None))

Image: TypeAlias = npt.NDArray[np.uint8]
"""[height, width, 3]."""
State: TypeAlias = dict[str, Any]
"""``physics``, the positions of bodies and sites that a start moves in the model, and attributes of the task."""


@dataclass(eq=False)
class Episode:
    """An episode of a simulator, with its state while another one is played."""

    state: State | None = None


class Simulator:
    """One task of Meta-World."""

    def __init__(self, task: str) -> None:
        self._sawyer = ALL_V3_ENVIRONMENTS[task]()
        self._sawyer._freeze_rand_vec = False  # draw a start at each reset
        self._sawyer.seeded_rand_vec = True
        self._sawyer._set_task_called = True
        self._sawyer._partially_observable = False
        self._sawyer.max_path_length = 2**62  # the limit is TimeLimit's
        self._sawyer.touching_object = partial(touches, self._sawyer)
        vars(self._sawyer).pop("sawyer_observation_space", None)  # it was computed without the goal
        self._renderers: dict[int, Renderer] = {}
        """Renderers by the size of their pictures."""
        model = self._sawyer.model
        # RLinf's and LeRobot's; from the package's, objects are only four pixels wide in an image of 64
        model.camera("corner2").pos = (0.75, 0.075, 0.7)
        for geom in range(model.ngeom):  # the links get a group of their own: they are most of a picture's geometry
            body = model.body(model.geom_bodyid[geom]).name
            is_link = body in _ARM or (body.startswith("right_") and body != "right_hand")
            if is_link and model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_MESH and model.geom_group[geom] < _ARM_GROUP:
                model.geom_group[geom] = _ARM_GROUP
        self._now: Episode | None = None
        self._made = self._captured()

    def start(self, episode: Episode, random: np.random.Generator) -> None:
        """Begin an episode that follows from the generator alone."""
        self._set_aside()
        self._restore(self._made)
        sawyer = self._sawyer
        sawyer.np_random = random
        MujocoEnv.reset(sawyer)  # SawyerXYZEnv's simulates two starts and keeps the second
        for name, value in vars(sawyer).items():
            owner = value
            while isinstance(owner, np.ndarray) and owner.base is not None:
                owner = owner.base
            # a view of the data would move on, and the package means the start
            if owner is not value and not isinstance(owner, np.ndarray) and name not in _VIEWS_OF_DATA:
                setattr(sawyer, name, value.copy())
        mujoco.mj_forward(sawyer.model, sawyer.data)
        sawyer._prev_obs = sawyer._get_curr_obs_combined_no_goal()
        sawyer._last_stable_obs = sawyer._get_obs()
        self._now = episode

    def step(self, episode: Episode, action: npt.NDArray[np.float32]) -> tuple[float, bool]:
        """The shaped reward, in [0, 10], and whether the task is done."""
        self._play(episode)
        _, reward, _, _, info = self._sawyer.step(action)
        return float(reward), bool(info["success"])

    def state(self, episode: Episode) -> npt.NDArray[np.float64]:
        """[39] the package's observation."""
        self._play(episode)
        observed: npt.NDArray[np.float64] = self._sawyer._last_stable_obs
        return observed

    def draw(self, episode: Episode, view: str, size: int, *, hide_arm: bool = False) -> Image:
        """The picture [size, size, 3], with or without the links of the arm. The hand is always drawn."""
        self._play(episode)
        if size not in self._renderers:
            self._renderers[size] = Renderer(self._sawyer.model, size)
        hide_arm = hide_arm or view == "gripperPOV"  # it never sees the arm, which takes half the time
        image = self._renderers[size].render(self._sawyer.data, view, hide_arm=hide_arm)
        return image[::-1, ::-1] if view.startswith("corner") else image

    def capture(self, episode: Episode) -> State:
        """The state of an episode."""
        self._play(episode)
        return self._captured()

    def _play(self, episode: Episode) -> None:
        if self._now is not episode:
            assert episode.state is not None
            self._set_aside()
            self._restore(episode.state)
            self._now, episode.state = episode, None

    def _set_aside(self) -> None:
        if self._now is not None:
            self._now.state = self._captured()
            self._now = None

    def _captured(self) -> State:
        model, data = self._sawyer.model, self._sawyer.data
        physics = np.empty(mujoco.mj_stateSize(model, _PHYSICS))
        mujoco.mj_getState(model, data, physics, _PHYSICS)
        attributes = {
            name: value.copy() if isinstance(value, np.ndarray | list) else value
            for name, value in vars(self._sawyer).items()
            if _is_state(name, value)
        }
        return {
            "physics": physics,
            "body_pos": model.body_pos.copy(),
            "site_pos": model.site_pos.copy(),
            "attributes": attributes,
        }

    def _restore(self, state: State) -> None:
        model, data = self._sawyer.model, self._sawyer.data
        attributes = vars(self._sawyer)
        for name in attributes.keys() - state["attributes"].keys():
            if _is_state(name, attributes[name]):
                del attributes[name]
        for name, value in state["attributes"].items():
            attributes[name] = value.copy() if isinstance(value, np.ndarray | list) else value
        model.body_pos[:], model.site_pos[:] = state["body_pos"], state["site_pos"]
        mujoco.mj_setState(model, data, state["physics"], _PHYSICS)
        mujoco.mj_forward(model, data)


def _is_state(name: str, value: Any) -> bool:
    return isinstance(value, _STATE_KINDS) and name not in _VIEWS_OF_DATA


def touches(sawyer: SawyerXYZEnv, geom: int) -> bool:
    """Whether both fingers press against the object: the package's criterion, which makes a Python object of each contact."""
    contact, force = sawyer.data.contact, sawyer.data.efc_force
    of_object = (contact.geom == geom).any(axis=1)
    pads = [sawyer.data.geom(name).id for name in ("leftpad_geom", "rightpad_geom")]
    return all(force[contact.efc_address[of_object & (contact.geom == pad).any(axis=1)]].sum() > 0 for pad in pads)


def _reset_mocap_welds(sawyer: SawyerMocapBase) -> None:
    """Replaces the package's function, which fails for equality constraints of more than 11 numbers."""
    model = sawyer.model
    for number in range(model.neq):
        if model.eq_type[number] == mujoco.mjtEq.mjEQ_WELD:
            model.eq_data[number, :11] = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 5.0]


if Version(mujoco.__version__) >= Version("3.17"):
    SawyerMocapBase.reset_mocap_welds = _reset_mocap_welds


class Renderer:
    """Draws pictures of one model without shadows, reflections and anti-aliasing, most of a frame's cost on a CPU.

    One renderer serves any number of ``MjData`` of the model.

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
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        default = "egl" if sys.platform == "linux" else "cgl" if sys.platform == "darwin" else "glfw"
        backend = os.environ.get("MUJOCO_GL", "").lower() or default
        try:
            self._gl = import_module(f"mujoco.{backend}").GLContext(size, size)
            self._gl.make_current()
        except Exception as error:  # each backend has its own kinds
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise EnvError(
                f"no images, since OpenGL cannot be used by {backend!r} ({reason}); fix: apt-get install libegl1 "
                "libegl-mesa0 libgl1-mesa-dri, or MUJOCO_GL=osmesa with libosmesa6, or learn from states "
                "(env.kwargs.obs='state')"
            ) from error
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        free = weakref.finalize(self, _free, self._gl, self._context)
        free.atexit = False
        atexit.register(free)  # after MuJoCo registered the end of OpenGL, so it runs before that

    def render(self, data: Any, camera: str, *, hide_arm: bool) -> Image:
        """The picture [size, size, 3] of a camera of the model, with or without the group of the arm."""
        self._option.geomgroup[_ARM_GROUP] = not hide_arm
        self._camera.fixedcamid = self._model.camera(camera).id
        scene, everything = self._scene, mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(self._model, data, self._option, None, self._camera, everything, scene)
        self._gl.make_current()
        viewport = mujoco.MjrRect(0, 0, self._size, self._size)
        mujoco.mjr_render(viewport, scene, self._context)
        image = np.empty((self._size, self._size, 3), np.uint8)
        mujoco.mjr_readPixels(image, None, viewport, self._context)
        return image[::-1]  # OpenGL counts rows from below


def _free(gl: Any, context: Any) -> None:
    gl.make_current()
    context.free()
    gl.free()


INSTRUCTIONS: dict[str, str] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""One sentence per task, of at most 64 bytes."""
PROPRIO_SIZE = 4
"""Position of the hand and opening of the gripper."""
INSTRUCTION_BYTES = 64

_simulators: weakref.WeakValueDictionary[str, Simulator] = weakref.WeakValueDictionary()
"""Simulators of this process, shared by all rows that use the same ones."""


class MetaWorldEnv(gymnasium.Env[Any, npt.NDArray[np.float32]]):
    """One or several tasks of Meta-World for the Sawyer arm.

    Actions [4] in [-1, 1]: movement of the hand along x, y and z (1 is 1 cm), and closing of the gripper.

    ``obs="state"``: float32 [39], Meta-World's own with the goal; with several tasks T a one-hot of the task follows.
    ``obs="image"``: ``image`` uint8 [views, pixels, pixels, 3], ``proprio`` float32 [4] (position of the hand in m,
    opening of the gripper in [0, 1]), ``instruction`` uint8 [64] (UTF-8, zero-padded).

    ``info`` has ``success`` (bool) and ``task`` (its name).

    Args:
        tasks: names such as ``push-v3``. The start seed picks one of them.
        obs: ``state`` or ``image``, as above.
        views: cameras of ``obs="image"``. ``corner2`` is closer than the package's, and upright.
        pixels: height and width of an image.
        hide_arm: draw the hand but not the links of the arm, in half the time. Report it with results.
        reward: ``success``: 1 for success, else 0. ``dense``: Meta-World's, scaled to [-1, 0] per step, so that success,
            which ends the episode, costs no reward.

    Raises:
        UnknownNameError: a task that does not exist.
        EnvError: a camera that does not exist, no tasks, no pixels, or images that cannot be drawn here.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 80}

    def __init__(
        self,
        tasks: Sequence[str] = (),
        *,
        obs: str = "state",
        views: Sequence[str] = ("corner2", "gripperPOV"),
        pixels: int = 64,
        hide_arm: bool = False,
        reward: str = "success",
        render_mode: str | None = None,
    ) -> None:
        if isinstance(tasks, str) or not tasks or len(set(tasks)) < len(tasks):
            raise EnvError(f"tasks is {tasks!r}, expected names, none twice; fix: env.kwargs.tasks=['push-v3', ...]")
        for task in tasks:
            _check_task(task)
        for name, value, known in (("obs", obs, ("state", "image")), ("reward", reward, ("success", "dense"))):
            if value not in known:
                raise EnvError(f"{name} is {value!r}, expected one of {known}; fix: env.kwargs.{name}={known[0]!r}")
        if isinstance(views, str) or not views or not set(views) <= set(VIEWS):
            raise EnvError(f"views={views!r}, expected some of {', '.join(VIEWS)}; fix: env.kwargs.views=['corner2']")
        if pixels < 1:
            raise EnvError(f"pixels is {pixels}, expected at least 1; fix: env.kwargs.pixels=64")
        self.tasks = tuple(tasks)
        self.render_mode = render_mode
        self.action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
        if obs == "image":
            self.observation_space = spaces.Dict(
                image=spaces.Box(0, 255, (len(views), pixels, pixels, 3), np.uint8),
                proprio=spaces.Box(-np.inf, np.inf, (PROPRIO_SIZE,), np.float32),
                instruction=spaces.Box(0, 255, (INSTRUCTION_BYTES,), np.uint8),
            )
        else:
            size = 39 + (len(tasks) if len(tasks) > 1 else 0)  # the state of the package
            self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self._sees = self.draws = obs == "image"
        self._views, self._pixels, self._hide_arm = tuple(views), pixels, hide_arm
        self._reward = reward
        self._image = np.zeros((len(views), pixels, pixels, 3), np.uint8)
        self._simulators = {t: _simulators.get(t) or _simulators.setdefault(t, Simulator(t)) for t in tasks}
        self._task = self.tasks[0]
        self._episode = Episode()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first observation of an episode that follows from the seed alone."""
        super().reset(seed=seed)
        self._task = self.tasks[self.np_random.integers(len(self.tasks))]
        self._episode = Episode()
        self._simulators[self._task].start(self._episode, self.np_random)
        return self._observed(draw=True), {"task": self._task, "success": False}

    def step(self, action: npt.NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step of 12.5 ms."""
        simulator = self._simulators[self._task]
        dense, success = simulator.step(self._episode, np.clip(action, -1.0, 1.0))
        reward = float(success) if self._reward == "success" else dense / 10 - 1.0  # of at most 10
        return self._observed(draw=self.draws), reward, success, False, {"task": self._task, "success": success}

    @property
    def state(self) -> npt.NDArray[np.float64]:
        """[39] Meta-World's own observation of the present state, for ``expert``."""
        return self._simulators[self._task].state(self._episode)

    def image(self) -> Image:
        """[views, pixels, pixels, 3] of the present state."""
        simulator = self._simulators[self._task]
        draw = partial(simulator.draw, self._episode, size=self._pixels, hide_arm=self._hide_arm)
        return np.stack([draw(view) for view in self._views])

    def render(self) -> Image | None:
        """A larger picture for videos, with ``render_mode="rgb_array"``."""
        if self.render_mode is None:
            return None
        return self._simulators[self._task].draw(self._episode, "corner2", 400)

    def clone_state(self) -> dict[str, Any]:
        """The complete state."""
        return {"task": self._task, "image": self._image, **self._simulators[self._task].capture(self._episode)}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Go back to what ``clone_state`` returned, here or in another environment of the same tasks."""
        self._task, self._image = state["task"], state["image"]
        self._episode = Episode({name: part for name, part in state.items() if name not in ("task", "image")})

    def close(self) -> None:
        """Free the simulators that no other environment uses."""
        self._simulators = {}

    def _observed(self, draw: bool) -> Any:
        state = self.state.astype(np.float32)
        if not self._sees:
            one_hot = [task == self._task for task in self.tasks] if len(self.tasks) > 1 else []
            return np.concatenate([state, np.array(one_hot, np.float32)])
        if draw:
            self._image = self.image()
        return {
            "image": self._image,
            "proprio": state[:PROPRIO_SIZE],
            "instruction": instruction_bytes(INSTRUCTIONS[self._task]),
        }


def expert(task: str) -> Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float32]]:
    """Meta-World's scripted policy of a task: from ``env.unwrapped.state`` [39] to an action [4].

    Raises:
        UnknownNameError: a task that does not exist.
    """
    _check_task(task)
    from metaworld.policies import ENV_POLICY_MAP

    policy = ENV_POLICY_MAP[task]()

    def act(state: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns of actions beyond 1, which are meant
            action = policy.get_action(state)
        clipped: npt.NDArray[np.float32] = np.clip(action, -1.0, 1.0).astype(np.float32)
        return clipped

    return act


@register_expert("MetaWorld/")
def episode_expert(env: Any, info: dict[str, Any]) -> Callable[[Any], Any]:
    """The ``expert`` of the episode's task, whatever is observed: it sees the whole state."""
    policy = expert(info["task"])
    return lambda obs: policy(env.unwrapped.state)


def instruction_bytes(text: str) -> npt.NDArray[np.uint8]:
    """[64] the UTF-8 bytes of a text that is not longer, zero-padded."""
    return np.frombuffer(text.encode().ljust(INSTRUCTION_BYTES, b"\0"), np.uint8).copy()


def _check_task(task: str) -> None:
    if task not in INSTRUCTIONS:
        raise UnknownNameError("task of Meta-World", task, INSTRUCTIONS)


ids = {f"MetaWorld/{task}": {"tasks": (task,)} for task in INSTRUCTIONS} | {"MetaWorld/multi": {}}
for env_id, settings in ids.items():
    gymnasium.register(
        env_id, f"{__name__}:{MetaWorldEnv.__name__}", max_episode_steps=100, disable_env_checker=True, kwargs=settings
    )
