"""Scripted experts for the Fetch tasks of gymnasium-robotics: proportional controllers of the gripper's position.

Actions [4]: movement along x, y and z (1 is 5 cm), and the gripper (1 opens, -1 closes). They act on the task's own
observation: ``observation`` [25] begins with the gripper's position, the object's, and the object's relative to the gripper.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Controller = Callable[[dict[str, Any]], npt.NDArray[np.float32]]

STEP = 0.05
"""Metres that an action of 1 moves the gripper."""
OPEN, CLOSED = 1.0, -1.0
_GAIN = 0.6
"""Share of the distance to go in one step."""


def reach(env: Any, info: dict[str, Any]) -> Controller:
    """Moves to the goal."""

    def act(obs: dict[str, Any]) -> npt.NDArray[np.float32]:
        return _towards(obs["observation"][:3], obs["desired_goal"], 0.0)

    return act


def push(env: Any, info: dict[str, Any]) -> Controller:
    """Goes behind the object, as the goal sees it, from above, and pushes it there."""

    def act(obs: dict[str, Any]) -> npt.NDArray[np.float32]:
        hand, cube, goal = obs["observation"][:3], obs["achieved_goal"], obs["desired_goal"]
        to_goal = goal[:2] - cube[:2]
        distance = float(np.linalg.norm(to_goal))
        direction = to_goal / max(distance, 1e-6)
        behind = cube[:2] - 0.075 * direction
        off = float(np.linalg.norm(hand[:2] - behind))
        offset = hand[:2] - cube[:2]
        along = float(offset @ direction)
        aside = float(np.linalg.norm(offset - along * direction))
        low = hand[2] < cube[2] + 0.02
        if distance < 0.02:
            return _towards(hand, hand, CLOSED)
        if low and along < -0.03 and aside < 0.025:  # in place: push, and hold the line through cube and goal
            ahead = cube[:2] + (min(distance, 0.03) - 0.05) * direction
            return _towards(hand, np.array([*ahead, cube[2]]), CLOSED)
        if off < 0.015:
            return _towards(hand, np.array([*behind, cube[2]]), CLOSED)
        return _towards(hand, np.array([*behind, cube[2] + 0.08]), CLOSED)

    return act


def pick_and_place(env: Any, info: dict[str, Any]) -> Controller:
    """Grasps the object from above, and carries it to the goal."""
    held = 0

    def act(obs: dict[str, Any]) -> npt.NDArray[np.float32]:
        nonlocal held
        hand, cube, goal = obs["observation"][:3], obs["achieved_goal"], obs["desired_goal"]
        offset = hand - cube
        if np.linalg.norm(offset[:2]) > 0.01 and held == 0:  # above it first, with the fingers open
            return _towards(hand, cube + np.array([0.0, 0.0, 0.06]), OPEN)
        if np.linalg.norm(offset) > 0.012 and held == 0:
            return _towards(hand, cube, OPEN)
        held += 1
        if held <= 3:  # the fingers take some steps to close
            return _towards(hand, hand, CLOSED)
        if np.linalg.norm(offset) > 0.04:  # lost it
            held = 0
        return _towards(hand, goal + offset, CLOSED)

    return act


def _towards(hand: Vector, target: Vector, gripper: float) -> npt.NDArray[np.float32]:
    action = np.array([*(_GAIN * (target - hand) / STEP), gripper], np.float32)
    return action.clip(-1.0, 1.0)
