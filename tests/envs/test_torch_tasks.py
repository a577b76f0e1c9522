"""Promises of tasks in torch: the steps of their originals, exact copies, no waiting for the device."""

import gymnasium
import numpy as np
import pytest
import torch
from no_waiting import NoWaiting
from torch_pendulum import TorchPendulum

from groupwise.envs.torch_env import TorchCartPole
from groupwise.functional.random import RowRandom

tasks = pytest.mark.parametrize("task", [TorchCartPole, TorchPendulum])


def everyone(count):
    return np.ones(count, np.bool_), np.arange(count, dtype=np.int64)


def actions(env, seed=0, device="cpu"):
    """Random ones for all rows, some of them out of bounds."""
    draws = torch.Generator().manual_seed(seed)
    if isinstance(env.action_space, gymnasium.spaces.Discrete):
        return torch.randint(int(env.action_space.n), (env.num_envs,), generator=draws).to(device)
    return (3 * torch.rand(env.num_envs, *env.action_space.shape, generator=draws) - 1.5).to(device)


def alike(env, seed):
    """A random action, the same for all rows."""
    action = actions(env, seed)
    return action[:1].expand_as(action)


@tasks
def test_copied_rows_go_on_bit_for_bit_wherever_they_are_put(task):
    env = task(5)
    env.start(*everyone(5), everyone(5)[1])
    for seed in range(4):
        env.step(alike(env, seed))
    everywhere, noise = torch.tensor([True, False, True, True, True]), torch.zeros(5, dtype=torch.int64)
    rows = env.copied(env.rows, everywhere, torch.full((5,), 2), noise)
    for seed in range(5):
        rows, step = env.stepped(rows, alike(env, seed))
        for row in (0, 3, 4):
            assert torch.equal(step.obs[row], step.obs[2])
            assert torch.equal(step.reward[row], step.reward[2])
            assert step.terminated[row] == step.terminated[2]


@tasks
def test_the_number_of_rows_changes_no_row(task):
    """Bit for bit: branches copy a row into any place, and evaluation has other rows than training."""
    many = task(67)
    obs = many.start(*everyone(67), everyone(67)[1])
    for count in (1, 3, 8, 33):
        few = task(count)
        assert torch.equal(few.start(*everyone(count), everyone(count)[1]), obs[:count])
    few = [task(count) for count in (1, 3, 8, 33)]
    for env in few:
        env.start(*everyone(env.num_envs), everyone(env.num_envs)[1])
    for seed in range(20):
        action = actions(many, seed)
        wide = many.step(action)
        for env in few:
            step = env.step(action[: env.num_envs])
            assert torch.equal(step.obs, wide.obs[: env.num_envs])
            assert torch.equal(step.reward, wide.reward[: env.num_envs])


@tasks
def test_never_waits_for_the_device(task):
    env = task(8)
    env.reset(seed=0)
    action, seed = actions(env), torch.arange(8)
    with torch.no_grad(), NoWaiting():
        state = env.initial(RowRandom(seed, seed))
        state, _, _ = env.transition(state, action, RowRandom(seed, seed))
        env.observe(state)
        env.step(action)


@pytest.mark.gpu
@tasks
def test_is_the_same_on_a_gpu_up_to_rounding(task):
    here, there = task(64), task(64, device="cuda")
    torch.testing.assert_close(there.reset(seed=0).cpu(), here.reset(seed=0))
    for seed in range(5):
        expected, step = here.step(actions(here, seed)), there.step(actions(here, seed, "cuda"))
        torch.testing.assert_close(step.obs.cpu(), expected.obs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(step.reward.cpu(), expected.reward, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@tasks
def test_can_be_captured_in_a_cuda_graph(task):
    env = task(64, device="cuda")
    seed, action = torch.arange(64, device="cuda"), actions(env, device="cuda")

    def episode():
        state = env.initial(RowRandom(seed, seed))
        state, reward, terminated = env.transition(state, action, RowRandom(seed, seed))
        return env.observe(state), reward, terminated

    expected = episode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = episode()
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_a_balanced_cartpole_follows_gymnasium_to_its_limit():
    env, single = TorchCartPole(4), gymnasium.make("CartPole-v1")
    obs = env.start(*everyone(4), everyone(4)[1])
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
    torch.testing.assert_close(states.amin(0), torch.full((4,), -0.05), rtol=0, atol=0.0002)
    torch.testing.assert_close(states.amax(0), torch.full((4,), 0.05), rtol=0, atol=0.0002)
