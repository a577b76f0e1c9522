"""The contract of ``GroupEnv``, by CartPole of every kind."""

from contextlib import closing

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from groupwise.config.run import EnvCfg
from groupwise.envs.make import make_env
from groupwise.envs.torch_env import CartPoleGroupEnv, TorchCartPole

ALL = np.ones(4, np.bool_)
SEEDS = np.array([3, 11, 3, 2**31 - 1], np.int64)


def rows(limit):
    cfg = EnvCfg(num_envs=4, vectorization="sync", max_episode_steps=limit)
    return make_env(cfg, grouped=True, verify=False)


KINDS = {
    "native": lambda limit: CartPoleGroupEnv(CartPoleVectorEnv(4, max_episode_steps=limit), env_id="CartPole-v1"),
    "torch": lambda limit: TorchCartPole(4, max_episode_steps=limit),
    "rows": rows,
}


@pytest.fixture(params=KINDS)
def make(request):
    return lambda limit=500: KINDS[request.param](limit)


def mask(*chosen):
    return np.isin(np.arange(4), chosen)


def actions(num_steps):
    return torch.randint(0, 2, (num_steps, 4), generator=torch.Generator().manual_seed(0))


PUSH = actions(1)[0]


def test_equal_seeds_start_alike_and_any_row_may_start_anywhere(make):
    with closing(make()) as env:
        obs = env.start(ALL, SEEDS, SEEDS).clone()
        assert torch.equal(obs[0], obs[2])
        assert len({tuple(row) for row in obs.tolist()}) == 3
        assert torch.equal(env.start(ALL, SEEDS[::-1].copy(), SEEDS), obs.flip(0))


def test_finished_rows_are_held_until_they_are_started_again(make):
    with closing(make(3)) as env:
        first = env.start(ALL, SEEDS, SEEDS).clone()
        ends = [env.step(action).truncated.all().item() for action in actions(3)]
        assert ends == [False, False, True]
        last = env.step(PUSH).obs.clone()
        paused = env.step(PUSH)
        assert torch.equal(paused.obs, last)
        assert not (paused.truncated | paused.terminated).any()
        assert paused.reward.eq(0).all()
        obs = env.start(mask(1), SEEDS, SEEDS)
        assert torch.equal(obs[[0, 2, 3]], last[[0, 2, 3]])
        assert torch.equal(obs[1], first[1])
        for count, action in enumerate(actions(3), start=1):
            step = env.step(action)
            assert step.reward.tolist() == [0.0, 1.0, 0.0, 0.0]
            assert step.truncated.tolist() == [False, count == 3, False, False]


def test_rows_can_be_held_from_outside(make):
    with closing(make()) as env:
        before = env.start(ALL, SEEDS, SEEDS).clone()
        env.pause(mask(0, 3))
        step = env.step(PUSH)
        assert torch.equal(step.obs[[0, 3]], before[[0, 3]])
        assert not torch.equal(step.obs[1], before[1])
        assert step.reward.tolist() == [0.0, 1.0, 1.0, 0.0]


def test_starting_some_rows_or_none_disturbs_no_other(make):
    with closing(make()) as calm, closing(make()) as busy:
        for env in (calm, busy):
            env.start(ALL, SEEDS, SEEDS)
        busy.start(mask(1), SEEDS[::-1].copy(), SEEDS)
        busy.start(mask(), SEEDS, SEEDS)
        for action in actions(3):
            assert torch.equal(calm.step(action).obs[[0, 2, 3]], busy.step(action).obs[[0, 2, 3]])


def test_resets_repeat_with_their_seed_and_may_leave_rows_running(make):
    def run(seed):
        with closing(make()) as env:
            first = env.reset(seed=seed).clone()
            moved = env.step(PUSH).obs.clone()
            return first, moved, env.reset(mask=mask(1, 3)).clone(), env.reset().clone()

    first, moved, again, later = run(7)
    assert len({tuple(row) for row in first.tolist()}) == 4
    assert torch.equal(again[[0, 2]], moved[[0, 2]])
    assert not torch.equal(again[[1, 3]], moved[[1, 3]])
    assert not torch.equal(later, first)
    assert all(torch.equal(*pair) for pair in zip((first, moved, again, later), run(7), strict=True))
    assert not torch.equal(first, run(8)[0])


def test_a_reset_row_counts_its_steps_anew(make):
    with closing(make(4)) as env:
        env.reset(seed=0)
        for action in actions(2):
            env.step(action)
        env.reset(mask=mask(0))
        ends = [env.step(action).truncated.tolist() for action in actions(4)]
        assert [row[0] for row in ends] == [False, False, False, True]
        assert [row[1] for row in ends] == [False, True, False, False]


@pytest.mark.parametrize("kind", ["native", "torch"])
def test_observations_kept_by_the_caller_do_not_change(kind):
    env = KINDS[kind](500)
    first = env.start(ALL, SEEDS, SEEDS)
    kept = first.clone()
    env.step(PUSH)
    env.start(mask(0), SEEDS[::-1].copy(), SEEDS)
    assert torch.equal(first, kept)


@pytest.mark.parametrize("kwargs", [{}, {"sutton_barto_reward": True}, {"max_episode_steps": 9}])
def test_every_row_is_the_single_environment_bit_for_bit(kwargs):
    env = CartPoleGroupEnv(CartPoleVectorEnv(4, **kwargs), env_id="CartPole-v1")
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


def test_the_environment_that_was_given_shows_where_its_rows_are():
    raw = CartPoleVectorEnv(4)
    env = CartPoleGroupEnv(raw, env_id="CartPole-v1")
    assert torch.equal(env.reset(mask=mask(0, 2)), KINDS["native"](500).reset(mask=mask(0, 2)))
    env.pause(ALL)
    env.reset(seed=0)  # held rows go on
    for action in actions(3):
        obs, reward, *_ = env.step(action)
        assert reward.tolist() == [1.0] * 4
        assert np.array_equal(raw.state.T.astype(np.float32), obs.numpy())
