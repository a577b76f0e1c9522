import math

import gymnasium
import numpy as np
import pytest
import torch

from groupwise.contrib.torch_tasks import TorchAcrobot, TorchMountainCar, TorchMountainCarContinuous
from groupwise.envs.torch_control import TorchCartPole, TorchPendulum
from groupwise.functional.random import RowRandom

ALL = np.ones(4, np.bool_)
SEEDS = np.array([3, 11, 3, 2**31 - 1], np.int64)


IDS = {
    TorchCartPole: "CartPole-v1",
    TorchPendulum: "Pendulum-v1",
    TorchAcrobot: "Acrobot-v1",
    TorchMountainCar: "MountainCar-v0",
    TorchMountainCarContinuous: "MountainCarContinuous-v0",
}


@pytest.mark.parametrize(("ours", "theirs"), IDS.items())
def test_spaces_and_limit_are_gymnasiums(ours, theirs):
    env, single = ours(4), gymnasium.make(theirs)
    assert env.observation_space == single.observation_space
    assert env.action_space == single.action_space
    assert env.max_episode_steps == single.spec.max_episode_steps


def balance(obs):
    x, x_dot, theta, theta_dot = obs
    return int(theta + 0.5 * theta_dot + 0.02 * x + 0.05 * x_dot > 0)


@pytest.mark.parametrize("policy", ["random", "left", "right", "balanced"])
def test_cartpole_follows_gymnasium_step_by_step(policy):
    env, single = TorchCartPole(4), gymnasium.make("CartPole-v1")
    draws = np.random.default_rng(0)
    chosen = {
        "random": lambda _: int(draws.integers(2)),
        "left": lambda _: 0,
        "right": lambda _: 1,
        "balanced": balance,
    }
    obs = env.start(ALL, SEEDS, SEEDS)
    assert obs.abs().max() <= 0.05
    single.reset(seed=0)
    for _ in range(500):
        single.unwrapped.state = obs[1].double().numpy()  # one step at a time: rounding would grow without bound
        action = chosen[policy](single.unwrapped.state)
        step = env.step(torch.full((4,), action))
        expected, reward, terminated, truncated, _ = single.step(action)
        obs = step.obs
        np.testing.assert_allclose(obs[1].numpy(), expected, rtol=1e-6, atol=1e-6)
        assert float(step.reward[1]) == reward
        assert bool(step.terminated[1]) == terminated
        assert bool(step.truncated[1]) == truncated
        if terminated or truncated:
            break
    assert truncated == (policy == "balanced")


@pytest.mark.parametrize(
    ("state", "fell"),
    [
        # position and angle move by .02 times their speed; the bounds are 2.4 and 12 degrees, .20944
        ((2.39, 1.0, 0.0, 0.0), True),
        ((2.37, 1.0, 0.0, 0.0), False),
        ((-2.39, -1.0, 0.0, 0.0), True),
        ((2.39, -1.0, 0.0, 0.0), False),
        ((0.0, 5.0, 0.2, 0.5), True),
        ((0.0, 5.0, 0.2, 0.4), False),
        ((0.0, 0.0, -0.2, -0.5), True),
    ],
)
def test_cartpole_ends_beyond_the_track_or_when_the_pole_leans(state, fell):
    zero = torch.zeros(1, dtype=torch.int64)
    _, reward, ended = TorchCartPole(1).transition(torch.tensor([state]), zero, RowRandom(zero, zero))
    assert (reward.tolist(), ended.tolist()) == ([1.0], [fell])


def test_pendulum_follows_gymnasium_step_by_step():
    env, single = TorchPendulum(4), gymnasium.make("Pendulum-v1")
    env.start(ALL, SEEDS, SEEDS)
    single.reset(seed=0)
    draws = np.random.default_rng(0)
    for count in range(1, 201):
        single.unwrapped.state = env.rows.state[""][1].double().numpy()
        torque = draws.uniform(-3, 3)  # beyond the bounds, too
        step = env.step(torch.full((4, 1), torque))
        expected, reward, terminated, truncated, _ = single.step(np.array([torque]))
        np.testing.assert_allclose(step.obs[1].numpy(), expected, rtol=1e-6, atol=1e-5)
        assert float(step.reward[1]) == pytest.approx(reward, rel=1e-5, abs=1e-5)
        assert bool(step.truncated[1]) == truncated == (count == 200)
        assert not step.terminated.any()
        assert not terminated


def test_the_pendulum_is_no_faster_than_its_bound():
    # level: 7.9 + (1.5 * 10 + 3 * 2) * .05 = 8.95, paused at 8; it turns by 8 * .05
    zero = torch.zeros(1, dtype=torch.int64)
    for side in (1.0, -1.0):
        state, push = side * torch.tensor([[math.pi / 2, 7.9]]), torch.tensor([[side * 2.0]])
        state, _, _ = TorchPendulum(1).transition(state, push, RowRandom(zero, zero))
        torch.testing.assert_close(state, side * torch.tensor([[math.pi / 2 + 0.4, 8.0]]))


def one_step(env, states, actions):
    """Next states, rewards and terminations of single rows."""
    zero = torch.zeros(len(states), dtype=torch.int64)
    return env.transition(torch.tensor(states), torch.tensor(actions), RowRandom(zero, zero))


PI = math.pi
# states reach beyond the walls and the flag, and actions beyond their bounds. What rounding does to one step of an Acrobot
# grows with its speed: at half of what is allowed it is 1e-5, at full speed a thousandth
ANYWHERE = {
    "cartpole": (TorchCartPole, [2.5, 3.0, 0.25, 3.0], 2, 1e-6),
    "pendulum": (TorchPendulum, [3 * PI, 8.0], (-3.0, 3.0), 1e-5),
    "acrobot": (TorchAcrobot, [PI, PI, 2 * PI, 4.5 * PI], 3, 2e-5),
    "fast acrobot": (TorchAcrobot, [PI, PI, 4 * PI, 9 * PI], 3, 3e-3),
    "mountain car": (TorchMountainCar, [1.2, 0.07], 3, 1e-6),
    "continuous mountain car": (TorchMountainCarContinuous, [1.2, 0.07], (-2.0, 2.0), 1e-6),
}


@pytest.mark.parametrize("task", ANYWHERE)
def test_one_step_from_anywhere_is_gymnasiums(task):
    ours, high, actions, tolerance = ANYWHERE[task]
    count, draws = 2000, np.random.default_rng(0)
    single = gymnasium.make(IDS[ours]).unwrapped
    single.reset(seed=0)
    states = draws.uniform(-np.array(high), high, (count, len(high))).astype(np.float32)
    if isinstance(actions, int):
        chosen = draws.integers(actions, size=count)
    else:
        chosen = draws.uniform(*actions, (count, 1)).astype(np.float32)
    state, reward, terminated = one_step(env := ours(count), states, chosen)
    obs = env.observe(state).numpy()
    for row in range(count):
        single.state = states[row].astype(np.float64)
        single.steps_beyond_terminated = None  # CartPole warns of steps after an end
        expected, expected_reward, ended, _, _ = single.step(chosen[row])
        np.testing.assert_allclose(obs[row], expected, rtol=1e-6, atol=tolerance)
        assert float(reward[row]) == pytest.approx(expected_reward, rel=1e-6, abs=1e-5)
        assert bool(terminated[row]) == ended
    assert terminated.any() == (ours is not TorchPendulum)
    assert not terminated.all()


def follow(ours, policy, tolerance):
    """Steps that an episode of ours and Gymnasium's took, and how both ended, each step begun in the same state."""
    env, single = ours(4), gymnasium.make(IDS[ours])
    obs = env.start(ALL, SEEDS, SEEDS)
    single.reset(seed=0)
    for count in range(1, 1001):
        single.unwrapped.state = env.rows.state[""][1].double().numpy()
        action = policy(obs[1].numpy())
        step = env.step(torch.from_numpy(np.stack([action] * 4)))
        expected, reward, terminated, truncated, _ = single.step(action)
        obs = step.obs
        np.testing.assert_allclose(obs[1].numpy(), expected, rtol=1e-6, atol=tolerance)
        assert float(step.reward[1]) == pytest.approx(reward, rel=1e-6, abs=1e-5)
        assert (bool(step.terminated[1]), bool(step.truncated[1])) == (terminated, truncated)
        if terminated or truncated:
            return count, terminated, truncated
    raise AssertionError("no end")


@pytest.mark.parametrize(
    ("ours", "swing", "rest", "limit"),
    [
        # what speeds up the motion gets to the goal
        (TorchAcrobot, lambda obs: np.int64(0 if obs[4] > 0 else 2), np.int64(1), 500),
        (TorchMountainCar, lambda obs: np.int64(2 if obs[1] > 0 else 0), np.int64(1), 200),
        (TorchMountainCarContinuous, lambda obs: np.sign(obs[1:]) * np.float32(0.7), np.zeros(1, np.float32), 999),
    ],
)
def test_whole_episodes_end_as_gymnasiums_do(ours, swing, rest, limit):
    count, terminated, truncated = follow(ours, swing, 2e-5)
    assert terminated
    assert not truncated
    assert 60 < count < limit
    assert follow(ours, lambda _: rest, 2e-5) == (limit, False, True)


@pytest.mark.parametrize(
    ("angles", "high"),
    [
        # the tip is -cos(first) - cos(first + second) above the base; 2 when upright, and 1 is not enough
        ((PI, 0.0), True),
        ((0.0, 0.0), False),
        ((0.0, PI), False),
        ((PI, PI), False),
        ((PI, 1.5), True),
        ((PI, 1.65), False),
        ((-PI / 2, -0.1), False),
    ],
)
def test_acrobot_ends_when_its_tip_is_high(angles, high, monkeypatch):
    monkeypatch.setattr(TorchAcrobot, "SECONDS", 1e-6)
    _, reward, ended = one_step(TorchAcrobot(1), [(*angles, 0.0, 0.0)], [1])
    assert (reward.tolist(), ended.tolist()) == ([0.0 if high else -1.0], [high])


def test_acrobot_hangs_still_and_falls_from_upright_by_symmetry():
    state, _, _ = one_step(TorchAcrobot(1), [(0.0, 0.0, 0.0, 0.0)], [1])
    assert torch.equal(state, torch.zeros(1, 4))
    left, right = (one_step(TorchAcrobot(1), [(s * 2.0, -s * 0.3, 0.0, s)], [1 + s])[0] for s in (1, -1))
    assert torch.equal(left, -right)


def test_acrobot_keeps_angles_within_half_a_turn_and_rates_within_their_bounds():
    draws = np.random.default_rng(0)
    states = draws.uniform(-1, 1, (4000, 4)) * [PI, PI, 4 * PI, 9 * PI]
    states, _, _ = one_step(TorchAcrobot(4000), states.astype(np.float32), draws.integers(3, size=4000))
    bounds = torch.tensor([PI, PI, 4 * PI, 9 * PI])
    torch.testing.assert_close(states.abs().amax(0), bounds, rtol=5e-3, atol=0)
    assert (states.abs() <= bounds).all()


@pytest.mark.parametrize("ours", [TorchMountainCar, TorchMountainCarContinuous])
def test_mountain_cars_stop_at_the_wall_and_at_the_end_of_the_slope(ours):
    action = 1 if ours is TorchMountainCar else [0.0]
    # cos(3 * -1.2) is -.8968, so gravity pushes by .0022 to the right there; cos(1.8) is -.2272, so .0006 at the right end
    states = [(-1.19, -0.05), (-1.2, 0.0), (-1.19, 0.01), (0.59, 0.07), (0.6, 0.0)]
    states, _, _ = one_step(ours(5), states, [action] * 5)
    moved = 0.01 + 0.0025 * 0.9091  # cos(3 * -1.19) is -.9096
    expected = [(-1.2, 0.0), (-1.2 + 0.0022419, 0.0022419), (-1.19 + moved, moved), (0.6, 0.07), (0.6, 0.000568)]
    torch.testing.assert_close(states, torch.tensor(expected), rtol=0, atol=2e-6)


@pytest.mark.parametrize(("ours", "goal"), [(TorchMountainCar, 0.5), (TorchMountainCarContinuous, 0.45)])
def test_mountain_cars_arrive_only_if_they_do_not_roll_back(ours, goal):
    action, cost = (1, -1.0) if ours is TorchMountainCar else ([0.0], 0.0)
    bonus = 0.0 if ours is TorchMountainCar else 100.0
    states = [(goal - 0.01, 0.02), (goal - 0.03, 0.02), (goal + 0.05, -0.02), (goal + 0.05, 0.001)]
    _, reward, ended = one_step(ours(4), states, [action] * 4)
    assert ended.tolist() == [True, False, False, True]
    assert reward.tolist() == [cost + bonus, cost, cost, cost + bonus]


def test_the_continuous_car_pays_for_what_it_asks_and_gets_what_is_allowed():
    # cos(3 * -.5) is .0707, gravity .000177; 1 or more pushes by .0015; a tenth of the square is paid
    states, reward, _ = one_step(TorchMountainCarContinuous(3), [(-0.5, 0.0)] * 3, [[0.5], [1.0], [3.0]])
    expected = torch.tensor([0.00075, 0.0015, 0.0015]) - 0.0025 * 0.0707372
    torch.testing.assert_close(states[:, 1], expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(reward, torch.tensor([-0.025, -0.1, -0.9]))


@pytest.mark.parametrize(
    ("ours", "low", "high"),
    [
        (TorchCartPole, [-0.05] * 4, [0.05] * 4),
        (TorchPendulum, [-PI, -1.0], [PI, 1.0]),
        (TorchAcrobot, [-0.1] * 4, [0.1] * 4),
        (TorchMountainCar, [-0.6, 0.0], [-0.4, 0.0]),
        (TorchMountainCarContinuous, [-0.6, 0.0], [-0.4, 0.0]),
    ],
)
def test_starts_fill_their_range(ours, low, high):
    low, high = torch.tensor(low), torch.tensor(high)
    seed = torch.arange(4000)
    states = ours(4000).initial(RowRandom(seed, torch.zeros_like(seed)))
    assert (states >= low).all()
    assert (states <= high).all()
    slack = 2e-3 * (high - low)
    assert (states.amin(0) <= low + slack).all()
    assert (states.amax(0) >= high - slack).all()
    torch.testing.assert_close(states.mean(0), (low + high) / 2, rtol=0, atol=0.02 * float((high - low).max()))
