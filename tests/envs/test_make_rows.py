import functools
from contextlib import closing

import gymnasium
import pytest
import torch

from groupwise.config import resolve
from groupwise.config.run import EnvCfg
from groupwise.envs.make import make_env, makes_rows
from groupwise.envs.torch_env import TorchCartPole
from groupwise.errors import EnvError
from groupwise.policies.actor_critic import ActorCritic
from groupwise.report.video import NoPictureError, rendering_env
from groupwise.training.build import EnvEvaluator, UserObjects, separate_env


@pytest.mark.parametrize(
    "maker",
    [
        TorchCartPole,
        functools.partial(TorchCartPole, max_episode_steps=9),
        lambda num_envs: TorchCartPole(num_envs),
        lambda num_envs, device: TorchCartPole(num_envs, device=device),
    ],
)
@pytest.mark.parametrize("grouped", [True, False])
def test_a_callable_that_asks_for_rows_makes_them(maker, grouped):
    env = make_env(EnvCfg(num_envs=5), env=maker, grouped=grouped)
    assert (type(env), env.num_envs) == (TorchCartPole, 5)
    assert make_env(EnvCfg(num_envs=5), env=maker, grouped=grouped, num_envs=3).num_envs == 3


def test_settings_reach_the_callable():
    env = make_env(EnvCfg(num_envs=5, max_episode_steps=7), env=TorchCartPole)
    assert env.max_episode_steps == 7
    env = make_env(EnvCfg(num_envs=5, kwargs={"max_episode_steps": 8}), env=TorchCartPole)
    assert env.max_episode_steps == 8
    assert make_env(EnvCfg(), env=TorchCartPole, device="cpu").device == torch.device("cpu")


def test_other_callables_make_one_environment():
    assert makes_rows(TorchCartPole)
    assert not makes_rows(lambda render_mode=None: gymnasium.make("CartPole-v1"))
    assert not makes_rows(gymnasium.Env)
    assert not makes_rows(None)
    assert not makes_rows(dict)  # says nothing of its parameters


def test_a_ready_one_is_taken_as_it_is():
    env = TorchCartPole(5)
    assert make_env(EnvCfg(num_envs=8), env=env) is env
    assert make_env(EnvCfg(num_envs=8), env=env, grouped=True, num_envs=5) is env
    with pytest.raises(EnvError, match="TorchCartPole has 5 rows, but num_envs is 4"):
        make_env(EnvCfg(), env=env, num_envs=4)
    with pytest.raises(EnvError, match="max_episode_steps is 9, but that of TorchCartPole is 500"):
        make_env(EnvCfg(max_episode_steps=9), env=env)


def test_evaluation_makes_rows_of_its_own_that_can_start_one_by_one_and_not_from_ready_ones():
    cfg, source = separate_env(EnvCfg(num_envs=3), TorchCartPole)
    assert make_env(cfg, env=source, grouped=True, num_envs=7).num_envs == 7
    assert separate_env(EnvCfg(), TorchCartPole(3)) is None
    for asked in ("auto", "entry_point", "sync", "async", "torch"):
        cfg, _ = separate_env(EnvCfg(vectorization=asked), None)
        assert cfg.vectorization == ("auto" if asked == "entry_point" else asked)


@pytest.mark.parametrize(("asked", "rows"), [("sync", 5), ("async", 2)])
def test_evaluation_has_a_row_for_each_episode_and_no_more_processes_than_training(asked, rows):
    cfg = resolve("CartPole-v1", env={"vectorization": asked, "num_envs": 2}, evaluation={"episodes": 5})
    policy = ActorCritic(TorchCartPole(1).observation_space, TorchCartPole(1).action_space)
    with closing(EnvEvaluator(cfg, UserObjects(), policy, seed=0)) as evaluator:
        assert evaluator.env.num_envs == rows


def test_a_task_in_torch_has_the_picture_of_its_original_and_other_batches_have_none():
    with pytest.raises(NoPictureError, match="a batched environment"):
        rendering_env(EnvCfg(), TorchCartPole)
    env = rendering_env(EnvCfg(vectorization="torch"), None)
    assert (env.spec.id, env.render_mode) == ("CartPole-v1", "rgb_array")
    env.close()


def test_cartpole_in_torch_is_made_like_its_original_and_follows_settings():
    original = gymnasium.make("CartPole-v1")
    env = make_env(EnvCfg(id="CartPole-v1", num_envs=3, vectorization="torch"), grouped=True)
    assert (env.num_envs, env.max_episode_steps) == (3, original.spec.max_episode_steps)
    assert (env.observation_space, env.action_space) == (original.observation_space, original.action_space)
    assert type(make_env(EnvCfg(vectorization="torch"), env=TorchCartPole)) is TorchCartPole
    cfg = EnvCfg(id="CartPole-v1", vectorization="torch", num_envs=5, max_episode_steps=7)
    env = make_env(cfg, num_envs=2, device="meta")
    assert (type(env), env.num_envs, env.max_episode_steps) == (TorchCartPole, 2, 7)
    assert env.device == torch.device("meta")
    cfg, source = separate_env(cfg, None)
    assert type(make_env(cfg, env=source, grouped=True, num_envs=7)) is TorchCartPole


@pytest.mark.parametrize(
    ("cfg", "env", "message"),
    [
        ({"id": "LunarLander-v3", "vectorization": "torch"}, None, "only CartPole-v1"),
        ({"vectorization": "torch", "kwargs": {"g": 1}}, None, r"env\.kwargs"),
        ({"vectorization": "torch"}, lambda: gymnasium.make("CartPole-v1"), "'torch'"),
        ({"max_episode_steps": 9}, lambda num_envs: TorchCartPole(num_envs), "max_episode_steps is 9"),
        ({}, lambda num_envs: gymnasium.make("Pendulum-v1").env, "expected a GroupEnv"),
        ({}, lambda num_envs: TorchCartPole(3), "has 3 rows, but num_envs is 8"),
    ],
)
def test_what_a_callable_cannot_meet_is_refused(cfg, env, message):
    with pytest.raises(EnvError, match=message):
        make_env(EnvCfg(**cfg), env=env)
