"""The cheetah is Gymnasium's, the cube's table does as its class says, and both train as simulators in torch do."""

import gymnasium
import numpy as np
import pytest
import torch
from no_waiting import NoWaiting
from torch_rollouts import same

import groupwise as gw
from groupwise.collectors.torch_groups import TorchGroupCollector
from groupwise.collectors.torch_vector import TorchVectorCollector
from groupwise.contrib.warp_tasks import WarpCubePush, WarpHalfCheetah
from groupwise.functional.row_random import RowRandom


def seeded(count):
    return RowRandom(torch.arange(count), torch.zeros(count, dtype=torch.int64))


@pytest.fixture(scope="module")
def gait():
    """States that Gymnasium's cheetah came to, most of them on the ground, float32, and actions, some out of bounds."""
    single, draws, states = gymnasium.make("HalfCheetah-v5").unwrapped, np.random.default_rng(0), []
    for episode in range(8):
        single.reset(seed=episode)
        same_all_along = draws.uniform(-1, 1, 6)
        for _ in range(50):
            single.step(same_all_along if episode % 2 else draws.uniform(-1, 1, 6))
            states.append(np.concatenate([single.data.qpos, single.data.qvel]))
    chosen = draws.permutation(len(states))[:96]
    return np.array(states, np.float32)[chosen], draws.uniform(-1.3, 1.3, (20, 96, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def walked(gait):
    """Differences from Gymnasium after each step [20, 96] of positions, velocities and rewards, and who was on the ground."""
    states, actions = gait
    env, single = WarpHalfCheetah(96), gymnasium.make("HalfCheetah-v5").unwrapped
    single.reset(seed=0)
    state = {**env.initial(seeded(96)), "qpos": torch.tensor(states[:, :9]), "qvel": torch.tensor(states[:, 9:])}
    found = []
    for action in actions:
        state, reward, terminated = env.transition(state, torch.tensor(action), seeded(96))
        found.append(np.column_stack([env.observe(state).numpy(), reward.numpy()]))
        assert not terminated.any()
    expected, grounded = np.zeros_like(found), np.zeros((20, 96), np.bool_)
    for row in range(96):
        single.set_state(*np.split(states[row].astype(np.float64), 2))
        for step, action in enumerate(actions[:, row]):
            obs, reward, _, _, _ = single.step(action)
            expected[step, row] = [*obs, reward]
            grounded[step, row] = single.data.ncon > 0
    off = np.abs(np.array(found) - expected)
    return off[..., :8].max(2), off[..., 8:17].max(2), off[..., 17], grounded


def test_spaces_and_limit_of_the_cheetah_are_gymnasiums():
    env, single = WarpHalfCheetah(1), gymnasium.make("HalfCheetah-v5")
    assert env.action_space == single.action_space
    assert env.observation_space.shape == single.observation_space.shape
    assert env.max_episode_steps == single.spec.max_episode_steps
    assert env.seconds == pytest.approx(single.unwrapped.dt)


# of 2,000 such states none was off by more than 2.5e-5, 3.1e-3 and 1.2e-5 after a step, positions, velocities and rewards;
# twice that is allowed
def test_a_step_of_the_cheetah_is_gymnasiums(walked):
    *off, grounded = walked
    assert grounded[0].mean() > 0.5
    for part, tolerance in zip(off, (5e-5, 6e-3, 2.5e-5), strict=True):
        assert part[0].max() < tolerance


# of 2,000 states 1 in 100 was off by more than 1.8e-4, 5.8e-3 and 2.8e-4 after 5 steps, and half by more than 1.2e-4, 1.9e-3
# and 1.5e-4 after 20: where a foot lands in the next step of the simulator instead, all that follows is another
@pytest.mark.parametrize(
    ("steps", "share", "tolerances"), [(5, 0.95, (3.6e-4, 1.2e-2, 5.6e-4)), (20, 0.5, (3e-4, 5e-3, 4e-4))]
)
def test_rounding_grows_but_the_cheetah_stays_with_gymnasium(walked, steps, share, tolerances):
    for part, tolerance in zip(walked, tolerances, strict=False):
        assert np.quantile(part[steps - 1], share) < tolerance


def test_starts_of_the_cheetah_are_as_wide_as_gymnasiums():
    state = WarpHalfCheetah(4000).begin(seeded(4000))
    assert state["qpos"].abs().max() <= 0.1
    torch.testing.assert_close(state["qpos"].std(0), torch.full((9,), 0.2 / 12**0.5), rtol=0.05, atol=0)
    torch.testing.assert_close(state["qvel"].std(0), torch.full((9,), 0.1), rtol=0.05, atol=0)
    assert state["qvel"].mean(0).abs().max() < 0.01


def on_table(env, *rows):
    """States of the cube's task with these joints, and places of cube and goal; the cube's side faces the shoulder."""
    rows = torch.tensor(rows)
    state = dict(env.initial(seeded(len(rows))))
    state["qpos"] = torch.cat([rows[:, :5], state["qpos"][:, 5:]], dim=1)
    return {**state, "goal": rows[:, 5:]}


def test_an_arm_at_rest_leaves_the_cube_and_pays_for_both_distances():
    # the arm stretched to .65 m sideways, cube at (.3, .4), goal .13 from it: -.13 - .25 * |(.3, -.25)|
    env = WarpCubePush(2)
    state = on_table(env, (np.pi / 2, 0.0, 0.0, 0.3, 0.4, 0.42, 0.45), (np.pi / 2, 0.0, 0.0, 0.3, 0.4, 0.3, 0.421))
    after, reward, terminated = env.transition(state, torch.zeros(2, 3), seeded(2))
    reach = 0.25 * (0.3**2 + 0.25**2) ** 0.5
    torch.testing.assert_close(reward, torch.tensor([-0.13 - reach, -0.021 - reach]), rtol=0, atol=1e-5)
    torch.testing.assert_close(after["qpos"][:, :5], state["qpos"][:, :5], rtol=0, atol=1e-5)
    assert not terminated.any()
    assert env.success(after).tolist() == [False, True]
    expected = [0.0, 1.0, 1.0, 1.0, 0.0, 0.0, *[0.0] * 3, 0.0, 0.65, 0.3, -0.25, 0.12, 0.05, 0.0, 0.0, 1.0, 0.0, 0.0]
    torch.testing.assert_close(env.observe(after)[0], torch.tensor(expected), rtol=0, atol=1e-4)


def test_a_finger_that_turns_takes_the_cube_along():
    """The stretched arm sweeps towards a cube beside its finger; no joint turns faster than 2 rad/s."""
    env = WarpCubePush(1)
    state = on_table(env, (0.0, 0.0, 0.0, 0.65, 0.1, 0.5, 0.4))
    for _ in range(12):
        state, _, _ = env.transition(state, torch.tensor([[1.0, 0.0, 0.0]]), seeded(1))
    cube = state["qpos"][0, 3:6]
    assert cube[1] > 0.2
    assert float(cube[2]) == pytest.approx(0.03, abs=2e-3)
    assert state["qvel"][0, :3].abs().max() < 2


def test_starts_on_the_table_are_as_described():
    env = WarpCubePush(2000)
    state = env.initial(seeded(2000))
    cube, finger, goal = state["qpos"][:, 3:5], state["site_xpos"][:, 0, :2], state["goal"]
    assert (cube.norm(dim=1) - 0.33).abs().max() <= 0.03001
    assert ((goal - cube).norm(dim=1) - 0.15).abs().max() <= 0.05001
    outwards = torch.cosine_similarity(goal - cube, cube)
    assert float(outwards.min()) == pytest.approx(np.cos(0.6), abs=1e-3)
    # wherever it turned, the cube, .0424 to its corners, is clear of the finger, .012 thick
    assert (cube - finger).norm(dim=1).min() > 0.0424 + 0.012
    assert finger.norm(dim=1).max() < 0.3
    assert not env.success(state).any()


TASKS = {"cheetah": lambda n: WarpHalfCheetah(n, max_episode_steps=5), "cube": WarpCubePush}
tasks = pytest.mark.parametrize("task", TASKS)


def made(task, kind):
    """A collector of 8 rows and its buffer, with the same policy each time."""
    env = TASKS[task](8)
    torch.manual_seed(0)
    groups = kind is TorchGroupCollector
    policy = gw.ActorCritic(env.observation_space, env.action_space, gw.PolicyCfg(hidden_sizes=(8,)), actor_only=groups)
    spec = {"obs_spec": env.obs_spec, "action_spec": policy.action_spec, "value": not groups}
    buffer = gw.RolloutBuffer(8, 7, **spec)
    more = {"group_size": 4} if groups else {}
    return kind(env, policy, **more), buffer


def rollouts(collector, buffer, count):
    """That many, the same storage for all."""
    for _ in range(count):
        yield collector.collect(7, buffer.start_rollout()).clone()


@tasks
def test_windows_are_those_of_the_reference(task):
    found = rollouts(*made(task, TorchVectorCollector), 3)
    for rollout, expected in zip(found, rollouts(*made(task, gw.VectorCollector), 3), strict=True):
        same(rollout, expected)


def test_members_begin_together_and_branch_where_their_first_member_was():
    collector, buffer = made("cube", TorchGroupCollector)
    assert collector.env.start_report.start_mode == "native"
    last = None
    for rollout in rollouts(collector, buffer, 3):
        buffer.add(rollout)
        obs = rollout["obs"].view(2, 4, 8, -1)
        assert torch.equal(obs[:, :, 0], obs[:, :1, 0].expand(-1, 4, -1))
        assert not torch.equal(obs[:, 0, -1], obs[:, 1, -1])
        if last is not None:
            assert torch.equal(obs[:, 0, 0], last)
        last = obs[:, 0, -1]


@tasks
def test_a_step_waits_for_nothing(task):
    env = TASKS[task](4)
    state, action = env.initial(seeded(4)), torch.zeros(4, *env.action_space.shape)
    with torch.no_grad(), NoWaiting():
        state, _, _ = env.transition(state, action, seeded(4))
        env.observe(state)


STEPS = {"group_key": "group_step", "returns": "return_to_go", "scale": "batch_std"}


def test_training_repeats_bit_for_bit(tmp_path):
    cfg = gw.GRPOCfg(group_size=4, num_steps=8, num_epochs=1, credit=STEPS, collection={"partial_groups": "truncate"})
    logged = {"logging": {"progress": "none"}, "num_envs": 8, "total_steps": 128, "seed": 0}
    run, again = (gw.train(WarpCubePush, cfg, run_dir=tmp_path / name, **logged) for name in "ab")
    assert [entry["env_steps"] for entry in run.metrics()] == [64, 128]
    for one, other in zip(run.policy.parameters(), again.policy.parameters(), strict=True):
        assert torch.equal(one, other)
