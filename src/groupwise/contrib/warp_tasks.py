"""Tasks simulated by MuJoCo Warp: Gymnasium's HalfCheetah, and an arm that pushes a cube."""

from pathlib import Path

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.contrib.warp import WarpGroupEnv, WarpState
from groupwise.functional.random import RowRandom


class WarpHalfCheetah(WarpGroupEnv):
    """Gymnasium's HalfCheetah-v5 by MuJoCo Warp, in float32. Starts have the same distribution, from other random streams.

    The reward is ``v - 0.1 |a|^2`` with the forward velocity ``v`` over the step (m/s) and the actions ``a`` as they were
    asked for. It never terminates. Needs the extra ``mujoco-warp``.

    Source: Wawrzynski, "A cat-like robot real-time learning to run", 2009; model and constants are Gymnasium's.
    """

    FORWARD_WEIGHT = 1.0
    CONTROL_COST = 0.1
    START_NOISE = 0.1

    def __init__(self, num_envs: int, *, max_episode_steps: int = 1000, device: torch.device | str = "cpu") -> None:
        super().__init__(
            num_envs,
            env_id="WarpHalfCheetah",
            model=Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets" / "half_cheetah.xml",
            frame_skip=5,
            observation_space=spaces.Box(-np.inf, np.inf, (17,), np.float32),
            max_episode_steps=max_episode_steps,
            # both ends of 8 capsules on the ground, with 4 rows each, and 6 joints at their limits
            nconmax=16,
            njmax=70,
            device=device,
        )

    def begin(self, random: RowRandom) -> WarpState:
        """Positions within 0.1 of the model's own [N, 9], and normal velocities of 0.1 [N, 9]."""
        qpos = random.uniform(self.model.nq, low=-self.START_NOISE, high=self.START_NOISE)
        return {"qpos": qpos, "qvel": random.normal(self.model.nv, std=self.START_NOISE)}

    def outcome(
        self, before: WarpState, after: WarpState, action: Float[Tensor, "row 6"]
    ) -> tuple[Float[Tensor, " row"], Bool[Tensor, " row"]]:
        """Forward velocity less the cost of the actions; no episode terminates."""
        velocity = (after["qpos"][:, 0] - before["qpos"][:, 0]) / self.seconds
        reward = self.FORWARD_WEIGHT * velocity - self.CONTROL_COST * action.square().sum(1)
        return reward, torch.zeros_like(reward, dtype=torch.bool)

    def observe(self, state: WarpState) -> Float[Tensor, "row 17"]:
        """Positions but for the distance run, and velocities [N, 17]."""
        return torch.cat([state["qpos"][:, 1:], state["qvel"]], dim=1)


class WarpCubePush(WarpGroupEnv):
    """An arm of three links over a table, whose finger is to push a cube to a goal. It never terminates.

    The joints turn about vertical axes; each is driven by up to 2 N m, against 1 N m s/rad of damping. Links of 0.25, 0.25
    and 0.15 m, 0.3, 0.2 and 0.1 kg; a cube of 0.06 m and 0.1 kg that slides, turns and topples as contacts and friction
    have it; a step takes 0.05 s. The reward is ``-|cube - goal| - 0.25 |finger - cube|`` after the step, horizontal
    distances in m. The cube begins 0.3 to 0.36 m from the shoulder, the finger between both, and the goal lies 0.1 to 0.2 m
    from the cube, outwards but for 0.6 rad. An episode succeeds if the cube ends within 0.03 m of its goal.

    Needs the extra ``mujoco-warp``. The task has no counterpart in Gymnasium.
    """

    SUCCESS_DISTANCE = 0.03
    REACH_COST = 0.25
    FOLDED = (-2.0, 2.4, 0.6)
    """Angles of the joints near which episodes begin."""
    START_NOISE = 0.05
    MAX_TURN = 0.5
    CUBE_HEIGHT = 0.03

    def __init__(self, num_envs: int, *, max_episode_steps: int = 60, device: torch.device | str = "cpu") -> None:
        super().__init__(
            num_envs,
            env_id="WarpCubePush",
            model=Path(__file__).parent / "cube_push.xml",
            frame_skip=5,
            observation_space=spaces.Box(-np.inf, np.inf, (20,), np.float32),
            max_episode_steps=max_episode_steps,
            poses=("site_xpos", "xmat"),
            # the cube's corners on the table and the finger's ends on the cube, with 4 rows each, and 3 joints at their limits
            nconmax=10,
            njmax=43,
            device=device,
        )
        self._cube = self.model.body("cube").id
        self._folded = torch.tensor(self.FOLDED, device=device)

    def begin(self, random: RowRandom) -> WarpState:
        """At rest: the arm folded, the cube beyond the finger, and ``goal`` [N, 2] beyond the cube."""
        joints = self._folded + random.uniform(3, low=-self.START_NOISE, high=self.START_NOISE)
        turn = random.uniform(low=-self.MAX_TURN, high=self.MAX_TURN)
        cube = polar(random.uniform(low=0.3, high=0.36), turn)
        goal = cube + polar(random.uniform(low=0.1, high=0.2), turn + random.uniform(low=-0.6, high=0.6))
        height = torch.full_like(cube[:, :1], self.CUBE_HEIGHT)
        upright = torch.zeros_like(height).expand(-1, 3)
        qpos = torch.cat([joints, cube, height, torch.ones_like(height), upright], dim=1)
        return {"qpos": qpos, "qvel": torch.zeros_like(qpos[:, :9]), "goal": goal}

    def outcome(
        self, before: WarpState, after: WarpState, action: Float[Tensor, "row 3"]
    ) -> tuple[Float[Tensor, " row"], Bool[Tensor, " row"]]:
        """The distances of cube from goal and of finger from cube, as costs; no episode terminates."""
        cube = after["qpos"][:, 3:5]
        missing, reach = (cube - after["goal"]).norm(dim=1), (cube - self._finger(after)).norm(dim=1)
        return -missing - self.REACH_COST * reach, torch.zeros_like(missing, dtype=torch.bool)

    def observe(self, state: WarpState) -> Float[Tensor, "row 20"]:
        """Cosines and sines of the joints, their rates, finger, cube from finger, goal from cube, and the cube's velocity, turn and rate of turning [N, 20]."""
        joints, cube, finger = state["qpos"][:, :3], state["qpos"][:, 3:5], self._finger(state)
        rates, velocity, turning = state["qvel"][:, :3], state["qvel"][:, 3:5], state["qvel"][:, 8:]
        turn = state["xmat"][:, self._cube, :2, 0]
        places = [finger, cube - finger, state["goal"] - cube]
        return torch.cat([joints.cos(), joints.sin(), rates, *places, velocity, turn, turning], dim=1)

    def success(self, state: WarpState) -> Bool[Tensor, " row"]:
        """Whether the cube is at its goal."""
        distance: Tensor = (state["qpos"][:, 3:5] - state["goal"]).norm(dim=1)
        return distance < self.SUCCESS_DISTANCE

    @staticmethod
    def _finger(state: WarpState) -> Float[Tensor, "row 2"]:
        return state["site_xpos"][:, 0, :2]


def polar(radius: Float[Tensor, " row"], turn: Float[Tensor, " row"]) -> Float[Tensor, "row 2"]:
    """The point at this distance and angle."""
    return torch.stack([radius * turn.cos(), radius * turn.sin()], dim=1)
