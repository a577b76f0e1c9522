import math

import gymnasium
import numpy as np
import pytest
import torch

from groupwise.envs.groups import verify_group_start
from groupwise.envs.torch_control import TorchCartPole, TorchPendulum
from groupwise.functional.row_random import RowRandom

ALL = np.ones(4, np.bool_)
SEEDS = np.array([3, 11, 3, 2**31 - 1], np.int64)


@pytest.mark.parametrize("env", [TorchCartPole(4), TorchPendulum(4)])
def test_siblings_share_their_start(env):
    report = verify_group_start(env)
    assert (report.tier, report.start_varies, report.noise_varies) == ("native", True, False)


@pytest.mark.parametrize(("ours", "theirs"), [(TorchCartPole, "CartPole-v1"), (TorchPendulum, "Pendulum-v1")])
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
        single.unwrapped.state = env.snapshot([1])[0].state[""].astype(np.float64)
        torque = draws.uniform(-3, 3)  # beyond the bounds, too
        step = env.step(torch.full((4, 1), torque))
        expected, reward, terminated, truncated, _ = single.step(np.array([torque]))
        np.testing.assert_allclose(step.obs[1].numpy(), expected, rtol=1e-6, atol=1e-5)
        assert float(step.reward[1]) == pytest.approx(reward, rel=1e-5, abs=1e-5)
        assert bool(step.truncated[1]) == truncated == (count == 200)
        assert not step.terminated.any()
        assert not terminated


def test_the_pendulum_is_no_faster_than_its_bound():
    # level: 7.9 + (1.5 * 10 + 3 * 2) * .05 = 8.95, held at 8; it turns by 8 * .05
    zero = torch.zeros(1, dtype=torch.int64)
    for side in (1.0, -1.0):
        state, push = side * torch.tensor([[math.pi / 2, 7.9]]), torch.tensor([[side * 2.0]])
        state, _, _ = TorchPendulum(1).transition(state, push, RowRandom(zero, zero))
        torch.testing.assert_close(state, side * torch.tensor([[math.pi / 2 + 0.4, 8.0]]))


@pytest.mark.parametrize(("ours", "low", "high"), [(TorchCartPole, -0.05, 0.05), (TorchPendulum, -1.0, 1.0)])
def test_starts_fill_their_range(ours, low, high):
    obs = ours(4000).reset(seed=0)
    assert torch.allclose(obs.amin(0), torch.tensor(low), atol=2e-3 * (high - low) * 2)
    assert torch.allclose(obs.amax(0), torch.tensor(high), atol=2e-3 * (high - low) * 2)
