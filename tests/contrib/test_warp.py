"""What any model simulated by MuJoCo Warp does, shown with a ball that falls and is pushed along the floor."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces

import groupwise as gw
from groupwise.contrib import warp
from groupwise.contrib.warp import WarpGroupEnv
from groupwise.envs.starts import verify_group_start
from groupwise.functional.row_random import RowRandom

BALL = """
<mujoco>
  <worldbody>
    <geom type="plane" size="5 5 0.1"/>
    <body pos="0 0 0.3">
      <joint name="along" type="slide" axis="1 0 0"/>
      <joint name="up" type="slide" axis="0 0 1"/>
      <geom type="sphere" size="0.1" mass="2"/>
      <site name="top" pos="0 0 0.1"/>
    </body>
  </worldbody>
  <actuator>
    <general joint="along" dyntype="filter" dynprm="0.1" gainprm="5" ctrllimited="true" ctrlrange="-1 2"/>
    <motor joint="up"/>
  </actuator>
</mujoco>
"""
"""Steps of 0.002 s; the first actuator follows its control with a lag of 0.1 s."""


class Ball(WarpGroupEnv):
    def __init__(self, num_envs, *, model=BALL, frame_skip=2, poses=("site_xpos",), **kwargs):
        box = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        kwargs = {"max_episode_steps": 40, "nconmax": 2, "njmax": 8} | kwargs
        super().__init__(
            num_envs,
            env_id="Ball",
            model=model,
            frame_skip=frame_skip,
            observation_space=box,
            poses=poses,
            **kwargs,
        )

    def begin(self, random):
        height = random.uniform(1, low=-0.1, high=0.1)
        place = torch.cat([random.uniform(1), height], dim=1)
        return {"qpos": place, "qvel": torch.zeros_like(place), "goal": random.uniform(low=1.0, high=2.0)}

    def outcome(self, before, after, action):
        return (after["qpos"][:, 0] - before["qpos"][:, 0]) / self.seconds, after["qpos"][:, 0] > after["goal"]


def placed(env, *rows):
    """States with these positions and velocities, all else as at a start."""
    seed = torch.zeros(env.num_envs, dtype=torch.int64)
    state = env.initial(RowRandom(seed, seed))
    rows = torch.tensor(rows, dtype=torch.float32)
    return {**state, "qpos": rows[:, :2].clone(), "qvel": rows[:, 2:].clone()}, RowRandom(seed, seed)


def everyone(count):
    return np.ones(count, np.bool_), np.arange(count, dtype=np.int64)


def test_controls_are_the_actions_unless_others_are_given():
    space = Ball(1).action_space
    assert (space.low.tolist(), space.high.tolist(), space.dtype) == ([-1.0, -np.inf], [2.0, np.inf], np.float32)
    assert Ball(1, action_space=spaces.Discrete(2)).action_space == spaces.Discrete(2)


def test_a_step_by_hand():
    # 2 steps of h = .002, velocity first. Up: 9.81 h less a step, so -2 g h, and (1 + 2) g h^2 lower. The lag takes the
    # activation to h / .1 * 1 = .02, then to .02 + .02 * .98 = .0396; the force is 5 times what it was, the mass 2 kg:
    # velocities 0 and .05 h, so .05 h^2 along. The controls of the first actuator end at 2
    env = Ball(3)
    state, random = placed(env, (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), (0.5, 0.1, 1.0, 0.0))
    after, reward, terminated = env.transition(state, torch.tensor([[1.0, 0.0], [9.0, 0.0], [0.0, 19.62]]), random)
    h = 0.002
    expected = [[0.05 * h * h, -3 * 9.81 * h * h], [0.1 * h * h, -3 * 9.81 * h * h], [0.5 + 2 * h, 0.1]]
    torch.testing.assert_close(after["qpos"], torch.tensor(expected), rtol=1e-4, atol=1e-7)
    expected = [[0.05 * h, -2 * 9.81 * h], [0.1 * h, -2 * 9.81 * h], [1.0, 0.0]]
    torch.testing.assert_close(after["qvel"], torch.tensor(expected), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(after["act"], torch.tensor([[0.0396], [0.0792], [0.0]]))
    assert env.seconds == 2 * h
    torch.testing.assert_close(reward, torch.tensor([0.025 * h, 0.05 * h, 1.0]), rtol=1e-3, atol=1e-6)
    assert torch.equal(after["goal"], state["goal"])
    assert torch.equal(terminated, after["qpos"][:, 0] > after["goal"])
    torch.testing.assert_close(env.observe(after), torch.cat([after["qpos"], after["qvel"]], dim=1))


def test_poses_are_those_of_the_positions_beside_them():
    env = Ball(2, poses=("site_xpos", "geom_xpos", "xmat"))
    random = RowRandom(torch.arange(2), torch.zeros(2, dtype=torch.int64))
    state = env.initial(random)
    for _ in range(3):
        along, up = state["qpos"].unbind(1)
        ball = torch.stack([along, torch.zeros_like(along), 0.3 + up], dim=1)
        torch.testing.assert_close(state["geom_xpos"][:, 1], ball)
        torch.testing.assert_close(state["site_xpos"][:, 0], ball + torch.tensor([0.0, 0.0, 0.1]))
        assert torch.equal(state["xmat"], torch.eye(3).expand(2, 2, 3, 3))
        state, _, _ = env.transition(state, torch.rand(2, 2), random)


def test_what_lies_on_the_floor_stays_there():
    env = Ball(1, frame_skip=20)
    after, random = placed(env, (0.0, 0.1, 0.0, 0.0))
    for _ in range(25):
        after, reward, _ = env.transition(after, torch.zeros(1, 2), random)
    assert float(after["qpos"][0, 1]) == pytest.approx(-0.2, abs=2e-3)  # 0.1 above the floor, pressed in a little
    assert after["qvel"].abs().max() < 1e-3
    assert float(reward) == pytest.approx(0, abs=1e-4)


def test_a_row_that_is_no_number_disturbs_neither_others_nor_what_follows():
    env, fresh = Ball(3, frame_skip=20), Ball(3, frame_skip=20)
    state, random = placed(env, (0.0, -0.2, 1.0, -0.5), (0.2, -0.2, 0.0, 0.0), (0.1, 0.0, 1.0, -1.0))
    expected, _, _ = fresh.transition(state, torch.ones(3, 2), random)
    broken = {name: leaf.clone() for name, leaf in state.items()}
    for name in ("qpos", "qvel", "qacc_warmstart", "act"):
        broken[name][1] = torch.nan
    found, reward, _ = env.transition(broken, torch.ones(3, 2), random)
    assert reward.isnan().tolist() == [False, True, False]
    for name, leaf in found.items():
        assert torch.equal(leaf[::2], expected[name][::2]), name
    found, reward, _ = env.transition(state, torch.ones(3, 2), random)
    assert reward.isfinite().all()
    for name, leaf in found.items():
        assert torch.equal(leaf, expected[name]), name


class Shaken(Ball):
    """Its pushes are noisy; one action instead of two."""

    def __init__(self, num_envs):
        super().__init__(num_envs, action_space=spaces.Box(-1, 1, (1,), np.float32))

    def control(self, state, action, random):
        return torch.cat([action + random.normal(1), torch.zeros_like(action)], dim=1)


def test_controls_can_be_noisy_and_members_draw_their_own():
    report = verify_group_start(Shaken(4))
    assert (report.start_mode, report.start_varies, report.noise_varies) == ("native", True, True)


def test_branches_copy_all_that_a_row_is_and_held_rows_stay():
    env = Ball(4, frame_skip=20, max_episode_steps=None)
    env.start(*everyone(4), everyone(4)[1])
    for _ in range(5):
        env.step(torch.rand(4, 2))
    chosen = torch.tensor([False, True, True, False])
    rows = env.copied(env.rows, chosen, torch.tensor([0, 0, 3, 3]), torch.arange(4))
    for leaf in rows.state.values():
        assert torch.equal(leaf[1], leaf[0])
        assert torch.equal(leaf[2], leaf[3])
    rows = rows._replace(paused=torch.tensor([False, True, False, False]))
    after, step = env.stepped(rows, torch.ones(4, 2))
    for name, leaf in after.state.items():
        assert torch.equal(leaf[1], rows.state[name][1])
        assert torch.equal(leaf[2], leaf[3])
    assert float(step.reward[1]) == 0


def test_a_row_without_room_for_its_constraints_is_no_number():
    env = Ball(2, njmax=3)  # a contact takes 4
    state, random = placed(env, (0.0, 0.1, 0.0, 0.0), (0.0, -0.21, 0.0, 0.0))
    for _ in range(2):  # and it is told of this step, not of those before
        _, reward, _ = env.transition(state, torch.zeros(2, 2), random)
        assert reward.isnan().tolist() == [False, True]
    state, random = placed(env, (0.0, 0.1, 0.0, 0.0), (0.0, 0.1, 0.0, 0.0))
    _, reward, _ = env.transition(state, torch.zeros(2, 2), random)
    assert reward.isfinite().all()


def test_all_rows_are_no_numbers_where_contacts_do_not_fit():
    log = BALL.replace('type="sphere" size="0.1"', 'type="capsule" size="0.1 0.2" euler="0 90 0"')
    env = Ball(2, model=log, nconmax=1)  # both ends touch the floor, and rows share what room there is
    state, random = placed(env, (0.0, 0.1, 0.0, 0.0), (0.0, -0.21, 0.0, 0.0))
    _, reward, _ = env.transition(state, torch.zeros(2, 2), random)
    assert reward.isfinite().all()
    state, random = placed(env, *[(0.0, -0.21, 0.0, 0.0)] * 2)
    _, reward, _ = env.transition(state, torch.zeros(2, 2), random)
    assert reward.isnan().all()


def test_training_ends_where_contacts_are_lost(tmp_path):
    cfg = gw.PPOCfg(num_steps=40, num_epochs=1)
    with pytest.raises(gw.errors.DataError, match=r"reward of environment . at step .* of the rollout is not finite"):
        gw.train(
            lambda num_envs: Ball(num_envs, njmax=3, frame_skip=20),
            cfg,
            num_envs=4,
            total_steps=160,
            run_dir=tmp_path / "run",
        )


SLEEPY = BALL.replace("<worldbody>", '<option><flag sleep="enable"/></option><worldbody>')
LATE = BALL.replace("<motor ", '<motor delay="0.02" nsample="4" ')
NEITHER = BALL.replace("<worldbody>", '<option integrator="discrete" noslip_iterations="2"/><worldbody>')


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"poses": ("site_xpos", "cvel")}, r"poses of Ball are \['cvel'\], expected some of xpos, .*; fix: leave"),
        ({"frame_skip": 0}, "frame_skip of Ball is 0, expected 1 or more"),
        ({"model": 7}, r"the model of Ball is a int, expected MJCF or a mujoco.MjModel; fix: a path or its text"),
        ({"model": "<mujoco><nope/></mujoco>"}, "the model of Ball cannot be read: .*; fix: the MJCF, or its path"),
        ({"model": "nowhere.xml"}, "the model of Ball cannot be read: .*nowhere.xml"),
        ({"model": SLEEPY}, "has bodies that fall asleep, whose state is not kept, so members would not agree; fix"),
        ({"model": LATE}, "has delays of actuators or sensors, whose state is not kept"),
        ({"model": NEITHER}, "MuJoCo Warp does not take the model of Ball: noslip .*; fix: the model"),
        ({"njmax": -1}, "njmax of Ball is -1, expected 1 or more; fix: a larger one"),
        ({"nconmax": 0}, "nconmax of Ball is 0, expected 1 or more"),
    ],
)
def test_what_cannot_be_simulated_is_refused(given, says):
    with pytest.raises(gw.errors.EnvError, match=says):
        Ball(2, **given)


class Short(Ball):
    def control(self, state, action, random):
        return action[:, :1]


def test_controls_of_another_shape_are_refused():
    env = Short(3)
    env.reset(seed=0)
    with pytest.raises(
        gw.errors.EnvError, match=r"control of Ball returned \[3, 1\], expected \[3, 2\]; fix: a number for each"
    ):
        env.step(torch.zeros(3, 2))


class Misplaced(Ball):
    def begin(self, random):
        return {"qpos": random.uniform(3), "qvel": random.uniform(2)}


class Taken(Ball):
    def begin(self, random):
        return {**super().begin(random), "act": random.uniform(1)}


def test_starts_of_another_shape_or_name_are_refused():
    with pytest.raises(
        gw.errors.EnvError, match=r"begin of Ball returned {'qpos': \(2, 3\).*expected {'qpos': \(2, 2\)"
    ):
        Misplaced(2).reset(seed=0)
    with pytest.raises(
        gw.errors.EnvError, match=r"begin of Ball returned \['act'\], which the state has already; fix: other"
    ):
        Taken(2).reset(seed=0)


def test_models_come_as_text_as_a_path_and_as_they_are(tmp_path):
    path = tmp_path / "ball.xml"
    path.write_text(BALL)
    mine = warp.load_model(BALL, "Ball")
    assert warp.load_model(mine, "Ball") is mine
    assert warp.load_model(path, "Ball").nq == warp.load_model(str(path), "Ball").nq == mine.nq == 2


@pytest.mark.parametrize("missing", ["mujoco", "mujoco_warp", "warp"])
def test_a_missing_extra_is_named(missing, monkeypatch):
    find = gw.errors.find_spec
    monkeypatch.setattr("groupwise.errors.find_spec", lambda name: None if name == missing else find(name))
    with pytest.raises(
        gw.errors.MissingExtraError, match=rf"'{missing}' is not installed; fix: pip install -e '\.\[mujoco-warp\]'"
    ):
        Ball(2)


def test_the_simulator_comes_when_it_is_used_and_is_quiet():
    code = """
import sys
import groupwise as gw
from groupwise.contrib.warp_tasks import WarpHalfCheetah
assert not {"warp", "mujoco", "mujoco_warp"} & set(sys.modules), sys.modules
from groupwise.contrib.warp import imported
warp, _ = imported()
assert warp.config.log_level == warp.LOG_WARNING
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == ""


def test_what_a_user_set_in_warp_stays():
    import warp as theirs

    before = theirs.config.log_level
    theirs.config.log_level = theirs.LOG_ERROR
    try:
        assert warp.imported()[0].config.log_level == theirs.LOG_ERROR
    finally:
        theirs.config.log_level = before
