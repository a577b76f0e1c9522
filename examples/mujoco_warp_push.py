"""An arm pushes a cube to a goal, simulated by MuJoCo Warp: how a simulator of others becomes a ``gw.TorchGroupEnv``.

MuJoCo Warp steps all rows at once, on a CPU or an NVIDIA GPU. Its arrays and torch's tensors share their memory. They are
scratch here: the state of the rows is copied into them before a step and out of them afterwards, so rows can be started,
copied and saved one by one. The first run compiles kernels, about 20 seconds.

    pip install -e '.[mujoco-warp]'
    python examples/mujoco_warp_push.py

Source: MuJoCo Warp 4.0, https://mujoco.readthedocs.io/en/latest/mjwarp/index.html.
"""

import argparse

import mujoco
import numpy as np
import torch
import warp as wp
from gymnasium import spaces

import groupwise as gw
from groupwise.envs.starts import verify_group_start

wp.config.log_level = wp.LOG_WARNING
import mujoco_warp as mjw  # noqa: E402  (logs while it is imported)

wp.init()
MJCF = """
<mujoco model="cube push">
  <compiler angle="radian"/>
  <option timestep="0.01"/>
  <default>
    <joint type="hinge" axis="0 0 1" damping="1" armature="0.02"/>
    <motor gear="2" ctrllimited="true" ctrlrange="-1 1"/>
    <default class="link">
      <geom type="capsule" size="0.02" contype="0" conaffinity="0" rgba="0.5 0.5 0.6 1"/>
    </default>
  </default>
  <worldbody>
    <light pos="0 0 2"/>
    <geom name="table" type="plane" size="1 1 0.1" friction="0.6 0.005 0.0001" rgba="0.8 0.7 0.6 1"/>
    <body name="upper" pos="0 0 0.1">
      <joint name="shoulder" limited="true" range="-2.8 2.8"/>
      <geom class="link" fromto="0 0 0 0.25 0 0" mass="0.3"/>
      <body name="fore" pos="0.25 0 0">
        <joint name="elbow" limited="true" range="-2.8 2.8"/>
        <geom class="link" fromto="0 0 0 0.25 0 0" mass="0.2"/>
        <body name="hand" pos="0.25 0 0">
          <joint name="wrist" limited="true" range="-2.8 2.8"/>
          <geom class="link" fromto="0 0 0 0.15 0 0" mass="0.1"/>
          <geom name="finger" type="capsule" size="0.012" fromto="0.15 0 -0.08 0.15 0 -0.02" mass="0.02" contype="2" conaffinity="0" friction="0.6 0.005 0.0001"/>
          <site name="tip" pos="0.15 0 -0.07" size="0.005"/>
        </body>
      </body>
    </body>
    <body name="cube" pos="0.33 0 0.03">
      <freejoint name="cube"/>
      <geom name="cube" type="box" size="0.03 0.03 0.03" mass="0.1" contype="0" conaffinity="3" friction="0.6 0.005 0.0001" rgba="0.8 0.3 0.3 1"/>
    </body>
  </worldbody>
  <actuator>
    <motor name="shoulder" joint="shoulder"/>
    <motor name="elbow" joint="elbow"/>
    <motor name="wrist" joint="wrist"/>
  </actuator>
</mujoco>
"""

FOLDED = (-2.0, 2.4, 0.6)
"""Angles of the joints near which episodes begin."""
SUBSTEPS = 5
"""Steps of the simulator, of 0.01 s, in a step of the environment."""


class CubePush(gw.TorchGroupEnv):
    """An arm of three links over a table, whose finger is to push a cube to a goal. It never terminates.

    The reward is ``-|cube - goal| - 0.25 |finger - cube|`` after the step, horizontal distances in m. An episode succeeds if
    the cube ends within 0.03 m of its goal, which lies 0.1 to 0.2 m from where the cube begins.
    """

    def __init__(self, num_envs, *, max_episode_steps=60, device="cpu"):
        super().__init__(
            num_envs,
            observation_space=spaces.Box(-np.inf, np.inf, (20,), np.float32),
            action_space=spaces.Box(-1, 1, (3,), np.float32),
            max_episode_steps=max_episode_steps,
            device=device,
        )
        self.model = mujoco.MjModel.from_xml_string(MJCF)
        self._warp_device = wp.device_from_torch(self.device)
        with wp.ScopedDevice(self._warp_device):
            self._sim = mjw.put_model(self.model)
            # the cube's corners on the table and the finger's ends on the cube, with 4 rows each, and 3 joints at limits
            self._data = mjw.make_data(self.model, nworld=num_envs, nconmax=10, njmax=43)
            wp.synchronize_device()  # torch's stream knows nothing of Warp's
        # members of a group must agree bit for bit, on a GPU, too
        self._sim.opt.deterministic = int(mjw.DeterminismType.ALL)
        self._sim.opt.graph_conditional = self._warp_device.is_cpu or wp.is_conditional_graph_supported()
        kinds = mjw.OverflowType
        self._lost = int(kinds.ALL & ~(kinds.ITERATIONS | kinds.LS_ITERATIONS))
        self._views = {name: wp.to_torch(getattr(self._data, name)) for name in ("qpos", "qvel", "qacc_warmstart")}
        self._ctrl, self._overflow = wp.to_torch(self._data.ctrl), wp.to_torch(self._data.overflow)
        self._tip, self._rotation = wp.to_torch(self._data.site_xpos), wp.to_torch(self._data.xmat)
        self._cube = self.model.body("cube").id
        self._folded = torch.tensor(FOLDED, device=device)
        self._step, self._kinematics = self._recorded(mjw.step, SUBSTEPS), self._recorded(mjw.kinematics, 1)

    def initial(self, random):
        """At rest: the arm folded, the cube beyond the finger, and the goal beyond the cube."""
        joints = self._folded + random.uniform(3, low=-0.05, high=0.05)
        turn = random.uniform(low=-0.5, high=0.5)
        cube = polar(random.uniform(low=0.3, high=0.36), turn)
        goal = cube + polar(random.uniform(low=0.1, high=0.2), turn + random.uniform(low=-0.6, high=0.6))
        height = torch.full_like(cube[:, :1], 0.03)
        upright = torch.zeros_like(height).expand(-1, 3)
        qpos = torch.cat([joints, cube, height, torch.ones_like(height), upright], dim=1)
        state = {"qpos": qpos, "qvel": torch.zeros_like(qpos[:, :9]), "goal": goal}
        return state | {"qacc_warmstart": torch.zeros_like(state["qvel"])} | self._poses(qpos)

    def transition(self, state, action, random):
        for name, view in self._views.items():
            view.copy_(state[name])
        self._ctrl.copy_(action)
        self._overflow.zero_()
        self._launch(self._step)
        moved = {name: view.clone() for name, view in self._views.items()}
        lost = (self._overflow & self._lost) != 0  # too little room for contacts: training stops at NaN
        after = {**state, **moved, **self._poses(moved["qpos"])}
        cube = after["qpos"][:, 3:5]
        reward = -(cube - after["goal"]).norm(dim=1) - 0.25 * (cube - after["tip"]).norm(dim=1)
        return after, reward.masked_fill(lost, torch.nan), torch.zeros_like(lost)

    def observe(self, state):
        """Cosines and sines of the joints, their rates, finger, cube from finger, goal from cube, and how the cube moves and is turned."""
        joints, cube, tip = state["qpos"][:, :3], state["qpos"][:, 3:5], state["tip"]
        rates, velocity, turning = state["qvel"][:, :3], state["qvel"][:, 3:5], state["qvel"][:, 8:]
        places = [tip, cube - tip, state["goal"] - cube]
        return torch.cat([joints.cos(), joints.sin(), rates, *places, velocity, state["turn"], turning], dim=1)

    def success(self, state):
        return (state["qpos"][:, 3:5] - state["goal"]).norm(dim=1) < 0.03

    def _poses(self, qpos):
        """Where the finger is, and how the cube is turned, both [N, 2]."""
        self._views["qpos"].copy_(qpos)
        self._launch(self._kinematics)
        return {"tip": self._tip[:, 0, :2].clone(), "turn": self._rotation[:, self._cube, :2, 0].clone()}

    def _recorded(self, function, times):
        """The function's kernels, to be replayed: launching them from Python takes 50 times as long."""
        with wp.ScopedDevice(self._warp_device), wp.ScopedCapture() as capture:
            for _ in range(times):
                function(self._sim, self._data)
        return capture.graph

    def _launch(self, graph):
        on_cuda = self.device.type == "cuda"
        stream = wp.stream_from_torch(torch.cuda.current_stream(self.device)) if on_cuda else None
        wp.capture_launch(graph, stream=stream)


def polar(radius, turn):
    """Points at these distances and angles [N, 2]."""
    return torch.stack([radius * turn.cos(), radius * turn.sin()], dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=1_500_000)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--run-dir")
    args = parser.parse_args()

    report = verify_group_start(CubePush(4))
    print(f"members of a group share their start by {report.start_mode}")
    cfg = gw.PPOCfg(
        num_steps=32, num_epochs=8, minibatch_size=512, learning_rate=7e-4, gamma=0.95, schedule={"name": "linear"}
    )
    run = gw.train(CubePush, cfg, num_envs=args.num_envs, total_steps=args.total_steps, run_dir=args.run_dir)
    result = gw.evaluate(run.path, episodes=100, env=CubePush)
    print(f"{result.success_rate:.0%} of {result.episodes} cubes reach their goals, return {result.return_mean:.1f}")


if __name__ == "__main__":
    main()
