"""A simulator of one Meta-World task that plays any number of episodes, one of them at a time.

Loading a task takes 20 MB and a renderer, so the rows of a process share one. When another episode takes a step, the
state of the one before is set aside: 0.03 ms, against 0.2 to 0.6 ms for the step.
"""

from functools import partial
from typing import Any, TypeAlias

import mujoco
import numpy as np
import numpy.typing as npt
from gymnasium.envs.mujoco import MujocoEnv
from metaworld.env_dict import ALL_V3_ENVIRONMENTS
from metaworld.sawyer_xyz_env import SawyerMocapBase, SawyerXYZEnv
from packaging.version import Version

from groupwise.embodied.rendering import Image, Renderer

VIEWS = ("topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV")
_CORNER2_POSITION = (0.75, 0.075, 0.7)
"""As in RLinf and LeRobot: the package's is so far away that objects are four pixels wide in an image of 64."""
_UPSIDE_DOWN = ("corner", "corner2", "corner3", "corner4")
_PHYSICS = mujoco.mjtState.mjSTATE_INTEGRATION
_VIEWS_OF_DATA = ("init_left_pad", "init_right_pad")
"""Views of ``MjData``, so they follow it."""
_ARM_GROUP = 2
"""Of geoms; the highest that is drawn by default."""
_NEVER_SEES_ARM = "gripperPOV"
"""Leaving the arm out changes no pixel there, and halves the time."""
_ARM = ("base", "controller_box", "head", "pedestal", "screen", "torso")
_STATE_KINDS = (np.ndarray, np.generic, bool, int, float, list, type(None))

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
        """By the size of their pictures."""
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
    """As the package's, for equality constraints of more than 11 numbers."""
    model = sawyer.model
    for number in range(model.neq):
        if model.eq_type[number] == mujoco.mjtEq.mjEQ_WELD:
            model.eq_data[number, :11] = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 5.0]


if Version(mujoco.__version__) >= Version("3.17"):
    SawyerMocapBase.reset_mocap_welds = _reset_mocap_welds
