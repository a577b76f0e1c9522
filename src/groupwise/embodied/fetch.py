"""The Fetch tasks of gymnasium-robotics (``FetchPush-v4``, ``FetchPickAndPlace-v4``, ``FetchReach-v4``, ...), and experts for them.

Importing this module registers the tasks and makes them run on current versions of MuJoCo.
"""

import os
import sys
from contextlib import redirect_stderr
from ctypes.util import find_library
from io import StringIO
from types import SimpleNamespace
from typing import Any, TypeAlias

import mujoco
import numpy as np
import numpy.typing as npt
from packaging.version import Version

with redirect_stderr(StringIO()):  # at every import it prints a note on tasks of another robot
    import gymnasium_robotics  # noqa: F401
from gymnasium_robotics.utils import mujoco_utils

from groupwise.embodied.experts import Expert, register_expert

# draw without a display, unless the user chose how
has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
if sys.platform == "linux" and not has_display and find_library("EGL"):
    os.environ.setdefault("MUJOCO_GL", "egl")

if Version(mujoco.__version__) >= Version("3.12"):
    # Enums no longer equal NumPy's integers there, so mujoco_utils finds the type of no joint.
    _joints = SimpleNamespace(**{name: int(kind) for name, kind in mujoco.mjtJoint.__members__.items()})
    mujoco_utils.mujoco = SimpleNamespace(**{**vars(mujoco), "mjtJoint": _joints})

Vector: TypeAlias = npt.NDArray[Any]


@register_expert("FetchReach")
def reach(env: Any, info: dict[str, Any]) -> Expert:
    """Moves the gripper of a Fetch task to the goal."""
    return lambda obs: _towards(obs["observation"][:3], obs["desired_goal"], 0.0)


@register_expert("FetchPush")
def push(env: Any, info: dict[str, Any]) -> Expert:
    """Goes behind the object, as the goal sees it, from above, and pushes it there."""

    def act(obs: dict[str, Any]) -> Vector:
        hand, cube, goal = obs["observation"][:3], obs["achieved_goal"], obs["desired_goal"]
        to_goal = goal[:2] - cube[:2]
        distance = float(np.linalg.norm(to_goal))
        direction = to_goal / max(distance, 1e-6)
        behind = cube[:2] - 0.075 * direction
        off, offset = float(np.linalg.norm(hand[:2] - behind)), hand[:2] - cube[:2]
        along = float(offset @ direction)
        aside = float(np.linalg.norm(offset - along * direction))
        if distance < 0.02:
            return _towards(hand, hand, -1.0)
        if hand[2] < cube[2] + 0.02 and along < -0.03 and aside < 0.025:  # in place: push along the line to the goal
            ahead = cube[:2] + (min(distance, 0.03) - 0.05) * direction
            return _towards(hand, np.array([*ahead, cube[2]]), -1.0)
        return _towards(hand, np.array([*behind, cube[2] + (0.0 if off < 0.015 else 0.08)]), -1.0)

    return act


@register_expert("FetchPickAndPlace")
def pick_and_place(env: Any, info: dict[str, Any]) -> Expert:
    """Grasps the object from above, and carries it to the goal."""
    held = 0

    def act(obs: dict[str, Any]) -> Vector:
        nonlocal held
        hand, cube, goal = obs["observation"][:3], obs["achieved_goal"], obs["desired_goal"]
        offset = hand - cube
        if np.linalg.norm(offset[:2]) > 0.01 and held == 0:  # above it first, with the fingers open
            return _towards(hand, cube + np.array([0.0, 0.0, 0.06]), 1.0)
        if np.linalg.norm(offset) > 0.012 and held == 0:
            return _towards(hand, cube, 1.0)
        held += 1
        if held <= 3:  # the fingers take some steps to close
            return _towards(hand, hand, -1.0)
        if np.linalg.norm(offset) > 0.04:  # lost it
            held = 0
        return _towards(hand, goal + offset, -1.0)

    return act


def _towards(hand: Vector, target: Vector, gripper: float) -> Vector:
    """The action that goes 0.6 of the way, which is 5 cm for each 1, with a gripper of 1 (opens) or -1 (closes)."""
    return np.array([*(0.6 * (target - hand) / 0.05), gripper], np.float32).clip(-1.0, 1.0)
