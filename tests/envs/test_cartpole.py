import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from groupwise.envs.torch_env import CartPoleGroupEnv

ALL = np.ones(4, np.bool_)
SEEDS = np.array([3, 11, 3, 2**31 - 1], np.int64)


def make(num_envs=4, **kwargs):
    return CartPoleGroupEnv(CartPoleVectorEnv(num_envs, **kwargs), env_id="CartPole-v1")


def actions(num_steps, num_envs=4, seed=0):
    return torch.randint(0, 2, (num_steps, num_envs), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kwargs", [{}, {"sutton_barto_reward": True}, {"max_episode_steps": 9}])
def test_every_row_is_the_single_environment_bit_for_bit(kwargs):
    env = make(**kwargs)
    singles = [gymnasium.make("CartPole-v1", **kwargs) for _ in range(4)]
    obs = env.start(ALL, SEEDS, SEEDS)
    for row, single in enumerate(singles):
        assert np.array_equal(obs[row].numpy(), single.reset(seed=int(SEEDS[row]))[0])
    running = set(range(4))
    for action in actions(500):
        step = env.step(action)
        for row in list(running):
            obs, reward, terminated, truncated, _ = singles[row].step(int(action[row]))
            assert np.array_equal(step.obs[row].numpy(), obs)
            assert (float(step.reward[row]), bool(step.terminated[row]), bool(step.truncated[row])) == (
                reward,
                terminated,
                truncated,
            )
            if terminated or truncated:
                running.discard(row)
        if not running:
            break
    assert not running


def test_fresh_environments_begin_alike():
    mask = np.array([True, False, True, False])
    assert torch.equal(make().reset(mask=mask), make().reset(mask=mask))


def test_a_reset_of_all_rows_lets_the_held_ones_go_on():
    env = make()
    env.start(ALL, SEEDS, SEEDS)
    env.pause(ALL)
    env.reset(seed=1)
    assert env.step(actions(1)[0]).reward.tolist() == [1.0] * 4


def test_the_environment_that_was_given_shows_where_its_rows_are():
    raw = CartPoleVectorEnv(3)
    env = CartPoleGroupEnv(raw, env_id="CartPole-v1")
    env.reset(seed=0)
    for action in actions(3, 3):
        obs = env.step(action).obs
        assert np.array_equal(raw.state.T.astype(np.float32), obs.numpy())
