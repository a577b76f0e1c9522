"""The 50 tasks of Meta-World, as ``MetaWorld/push-v3`` and so on, and ``MetaWorld/multi`` for several in one run.

The simulation, rewards and criteria of success are those of the package ``metaworld``. Differences from it:

- The seed of ``reset`` alone decides the start: task, positions of objects and goal. The package ignores that seed,
  and its starts depend on the episode before.
- Success ends the episode. The package plays on, and success may be lost again.
- States can be captured and restored bit for bit (``clone_state``, ``restore_state``).
- Images are small, fast and drawn only on demand.

**Images on demand** (``DrawsOnDemand``). Code that takes several steps for one decision sets
``env.unwrapped.draws = False`` before them: ``step`` then leaves ``obs["image"]`` as the last drawn one. After the
last step that code puts ``env.unwrapped.image()``, which draws the present state, into the observation, unless ``draws``
was False before.

**Expert.** ``expert(task)`` acts on ``env.unwrapped.state``, which exists with every kind of observation.
"""

from groupwise.envs.names import require_package

require_package("MetaWorld/")

import atexit
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
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

from groupwise.errors import EnvError, UnknownNameError

# Simulator of one Meta-World task, which plays any number of episodes, one at a time

VIEWS = ("topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV")
_CORNER2_POSITION = (0.75, 0.075, 0.7)
"""Position that RLinf and LeRobot use. From the package's, objects are only four pixels wide in an image of 64."""
_UPSIDE_DOWN = ("corner", "corner2", "corner3", "corner4")
_PHYSICS = mujoco.mjtState.mjSTATE_INTEGRATION
_VIEWS_OF_DATA = ("init_left_pad", "init_right_pad")
"""Views of ``MjData``, so they follow it."""
_ARM_GROUP = 2
"""Group of the arm's geoms: the highest one that is drawn by default."""
_NEVER_SEES_ARM = "gripperPOV"
"""Leaving the arm out changes no pixel there, and halves the time."""
_ARM = ("base", "controller_box", "head", "pedestal", "screen", "torso")
_STATE_KINDS = (np.ndarray, np.generic, bool, int, float, list, type(None))

Image: TypeAlias = npt.NDArray[np.uint8]
"""[height, width, 3]."""
State: TypeAlias = dict[str, Any]
"""``physics``, the positions of bodies and sites that a start moves in the model, and attributes of the task."""


class Episode:
    """An episode of a simulator, with its state while another one is played."""

    def __init__(self, state: State | None = None) -> None:
        self.state = state


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
        self._sawyer.model.camera("corner2").pos = _CORNER2_POSITION
        _group_arm(self._sawyer.model)
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
            if name not in _VIEWS_OF_DATA and _is_view_of_data(value):
                setattr(sawyer, name, value.copy())  # the package means the start, and it would move on
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
        without = _ARM_GROUP if hide_arm or view == _NEVER_SEES_ARM else None
        image = self._renderers[size].render(self._sawyer.data, view, without=without)
        return image[::-1, ::-1] if view in _UPSIDE_DOWN else image

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


def _is_view_of_data(value: Any) -> bool:
    owner = value
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    return isinstance(value, np.ndarray) and not isinstance(owner, np.ndarray)


def _group_arm(model: Any) -> None:
    """Give the links a group of their own, but not the hand. They are most of a picture's geometry."""
    for geom in range(model.ngeom):
        body = model.body(model.geom_bodyid[geom]).name
        is_link = body in _ARM or (body.startswith("right_") and body != "right_hand")
        if is_link and model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_MESH and model.geom_group[geom] < _ARM_GROUP:
            model.geom_group[geom] = _ARM_GROUP


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


# Small images, fast enough in software that a policy can learn from them.


class Renderer:
    """Draws pictures of one model without shadows, reflections and anti-aliasing, most of a frame's cost on a CPU.

    One renderer serves any number of ``MjData`` of the model.
    ``close`` it, or drop it.

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
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
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


# The tasks of Meta-World, and the instructions of the robot.

INSTRUCTIONS = {
    "assembly-v3": "put the ring over the peg",
    "basketball-v3": "throw the ball into the basket",
    "bin-picking-v3": "move the block from the red bin to the blue bin",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button from above",
    "button-press-topdown-wall-v3": "reach over the wall and press the button from above",
    "button-press-v3": "push the button in",
    "button-press-wall-v3": "reach around the wall and push the button in",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial by half a turn",
    "disassemble-v3": "lift the ring off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-close-v3": "close the faucet",
    "faucet-open-v3": "open the faucet",
    "hammer-v3": "drive the nail in with the hammer",
    "hand-insert-v3": "put the hand into the hole",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "push the peg into the hole at the side",
    "peg-unplug-side-v3": "pull the plug out at the side",
    "pick-out-of-hole-v3": "take the object out of the hole",
    "pick-place-v3": "pick the puck up and hold it at the goal",
    "pick-place-wall-v3": "carry the puck over the wall to the goal",
    "plate-slide-back-side-v3": "slide the plate out of the cabinet, sideways",
    "plate-slide-back-v3": "slide the plate out of the cabinet, backwards",
    "plate-slide-side-v3": "slide the plate into the cabinet, sideways",
    "plate-slide-v3": "slide the plate into the cabinet, forwards",
    "push-back-v3": "pull the block back to the goal",
    "push-v3": "push the puck to the goal",
    "push-wall-v3": "push the puck around the wall to the goal",
    "reach-v3": "move the hand to the goal",
    "reach-wall-v3": "move the hand around the wall to the goal",
    "shelf-place-v3": "put the block on the shelf",
    "soccer-v3": "kick the ball into the goal",
    "stick-pull-v3": "pull the thermos with the stick",
    "stick-push-v3": "push the thermos with the stick",
    "sweep-into-v3": "sweep the block into the hole",
    "sweep-v3": "sweep the block off the table",
    "window-close-v3": "close the window",
    "window-open-v3": "open the window",
}
"""One sentence per task, of at most 64 bytes."""


STATE_SIZE = 39
PROPRIO_SIZE = 4
"""Position of the hand and opening of the gripper."""
INSTRUCTION_BYTES = 64
MAX_EPISODE_STEPS = 100
_MAX_REWARD = 10.0
_VIDEO_SIZE = 400
"""Pixels; videos show no more (``report.video.MAX_SIZE``)."""

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
            raise EnvError(
                f"views is {views!r}, expected some of {', '.join(VIEWS)}; fix: env.kwargs.views=['corner2']"
            )
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
            size = STATE_SIZE + (len(tasks) if len(tasks) > 1 else 0)
            self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self._sees = self.draws = obs == "image"
        self._views, self._pixels, self._hide_arm = tuple(views), pixels, hide_arm
        self._reward = reward
        self._image = np.zeros((len(views), pixels, pixels, 3), np.uint8)
        self._simulators = {
            task: _simulators.get(task) or _simulators.setdefault(task, Simulator(task)) for task in tasks
        }
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
        reward = float(success) if self._reward == "success" else dense / _MAX_REWARD - 1.0
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
        return self._simulators[self._task].draw(self._episode, "corner2", _VIDEO_SIZE)

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
        env_id,
        f"{__name__}:{MetaWorldEnv.__name__}",
        max_episode_steps=MAX_EPISODE_STEPS,
        disable_env_checker=True,
        kwargs=settings,
    )
