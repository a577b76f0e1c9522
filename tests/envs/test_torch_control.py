import gymnasium
import numpy as np
import torch

from groupwise.envs.torch_env import TorchCartPole
from groupwise.functional.random import RowRandom

ALL = np.ones(4, np.bool_)
SEEDS = np.array([3, 11, 3, 2**31 - 1], np.int64)


def test_a_balanced_cartpole_follows_gymnasium_to_its_limit():
    env, single = TorchCartPole(4), gymnasium.make("CartPole-v1")
    obs = env.start(ALL, SEEDS, SEEDS)
    single.reset(seed=0)
    for count in range(1, 501):
        x, x_dot, theta, theta_dot = single.unwrapped.state = obs[1].double().numpy()  # or rounding would grow
        action = int(theta + 0.5 * theta_dot + 0.02 * x + 0.05 * x_dot > 0)
        step = env.step(torch.full((4,), action))
        expected, reward, terminated, truncated, _ = single.step(action)
        obs = step.obs
        np.testing.assert_allclose(obs[1].numpy(), expected, rtol=1e-6, atol=1e-6)
        outcome = float(step.reward[1]), bool(step.terminated[1]), bool(step.truncated[1])
        assert outcome == (reward, terminated, truncated) == (1.0, False, count == 500)


def test_one_step_from_anywhere_is_gymnasiums():
    count, draws = 2000, np.random.default_rng(0)
    single = gymnasium.make("CartPole-v1").unwrapped
    single.reset(seed=0)
    high = np.array([2.5, 3.0, 0.25, 3.0])  # beyond the track, too
    states = draws.uniform(-high, high, (count, 4)).astype(np.float32)
    chosen, zero = draws.integers(2, size=count), torch.zeros(count, dtype=torch.int64)
    env = TorchCartPole(count)
    state, reward, terminated = env.transition(
        torch.from_numpy(states), torch.from_numpy(chosen), RowRandom(zero, zero)
    )
    for row in range(count):
        single.state = states[row].astype(np.float64)
        single.steps_beyond_terminated = None  # CartPole warns of steps after an end
        expected, expected_reward, ended, _, _ = single.step(chosen[row])
        np.testing.assert_allclose(state[row], expected, rtol=1e-6, atol=1e-6)
        assert (float(reward[row]), bool(terminated[row])) == (expected_reward, ended)
    assert terminated.any()
    assert not terminated.all()


def test_starts_fill_their_range():
    seed = torch.arange(4000)
    states = TorchCartPole(4000).initial(RowRandom(seed, torch.zeros_like(seed)))
    assert states.abs().max() <= 0.05
    assert (states.amin(0) <= -0.0498).all()
    assert (states.amax(0) >= 0.0498).all()
    torch.testing.assert_close(states.mean(0), torch.zeros(4), rtol=0, atol=0.002)
