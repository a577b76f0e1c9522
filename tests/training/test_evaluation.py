import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st
from plain_envs import Plain

import groupwise as gw
from groupwise.config.run import EnvCfg
from groupwise.envs.make import make_env
from groupwise.errors import ConfigError, DataError
from groupwise.policies.actor_critic import ActorCritic
from groupwise.seeding import derive_seed
from groupwise.training.evaluation import EvaluationResult, evaluate_policy


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("num_envs", [1, 3, 7, 10, 16])
def test_result_does_not_depend_on_the_number_of_environments(num_envs, deterministic, parts):
    policy = parts.policy()
    want = evaluate_policy(policy, parts.env(10), episodes=10, seed=5, deterministic=deterministic)
    have = evaluate_policy(policy, parts.env(num_envs), episodes=10, seed=5, deterministic=deterministic)
    assert have == want


@pytest.mark.parametrize("vectorization", ["entry_point", "sync"])
def test_result_does_not_depend_on_the_number_of_cartpoles(vectorization):
    torch.manual_seed(0)
    envs = [make_env(EnvCfg(num_envs=n, vectorization=vectorization), grouped=True) for n in (9, 4, 12)]
    policy = ActorCritic(envs[0].observation_space, envs[0].action_space, actor_only=True)
    results = [evaluate_policy(policy, env, episodes=9, seed=2, deterministic=False) for env in envs]
    for env in envs:
        env.close()
    assert results[0] == results[1] == results[2]
    assert len(set(results[0].returns)) > 3


@given(episodes=st.integers(1, 12), num_envs=st.integers(1, 5), seed=st.integers(0, 3))
def test_exactly_the_episodes_of_the_seeds_are_played(episodes, num_envs, seed, parts):
    result = evaluate_policy(parts.policy(), parts.env(num_envs), episodes=episodes, seed=seed)
    starts = [derive_seed(seed, "eval", i) for i in range(episodes)]
    # long episodes are counted as often as short ones: an episode lasts start % 7 + 1 steps
    assert result.lengths == tuple(start % 7 + 1 for start in starts)
    assert result.episodes == episodes


def test_greedy_and_sampled_differ(parts):
    policy = parts.policy()
    sampled = evaluate_policy(policy, parts.env(8), episodes=8, seed=0, deterministic=False)
    greedy = evaluate_policy(policy, parts.env(8), episodes=8, seed=0)
    again = evaluate_policy(policy, parts.env(8), episodes=8, seed=1, deterministic=False)
    assert len({sampled.returns, greedy.returns, again.returns}) == 3


def test_global_random_streams_and_the_policy_mode_are_left_alone(parts):
    policy = parts.policy().train()
    before = torch.get_rng_state()
    evaluate_policy(policy, parts.env(2), episodes=3, seed=0, deterministic=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert policy.training


def test_endless_episodes_are_cut_and_counted(parts):
    result = evaluate_policy(parts.policy(), parts.env(9), episodes=9, seed=0, max_steps=2)
    whole = evaluate_policy(parts.policy(), parts.env(9), episodes=9, seed=0)
    longer = sum(length > 2 for length in whole.lengths)
    assert max(result.lengths) == 2
    assert (result.cut_episodes, whole.cut_episodes) == (longer, 0)
    assert result.line().endswith(f" episodes=9 cut_episodes={longer}")
    assert result.report()["cut_episodes"] == result.metrics()["eval/cut_episodes"] == longer
    assert "cut" not in whole.line() + " ".join([*whole.report(), *whole.metrics()])


def test_return_that_is_not_finite_names_its_episode(parts, monkeypatch):
    env = parts.env(2)
    step = env.step
    monkeypatch.setattr(env, "step", lambda action: step(action)._replace(reward=torch.tensor([0.0, math.nan])))
    with pytest.raises(DataError, match="episode 1 is not finite"):
        evaluate_policy(parts.policy(), env, episodes=2, seed=0)


def test_statistics_by_hand():
    # returns 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, deviation sqrt(14 / 3) = 2.160247
    # Student's t with 3 degrees of freedom at 97.5 %: 3.182446; half width 3.182446 * 2.160247 / 2 = 3.437434
    result = EvaluationResult((1.0, 2.0, 3.0, 6.0), (4, 4, 5, 7))
    assert result.return_mean == 3.0
    assert result.length_mean == 5.0
    assert result.return_std == pytest.approx(2.160247, abs=1e-6)
    assert result.ci95 == pytest.approx((-0.437434, 6.437434), abs=1e-5)
    assert repr(result) == "EvaluationResult(return_mean=3 ci95=[-0.437435, 6.43743] episodes=4)"


def test_one_episode_gives_numbers_but_no_interval():
    result = EvaluationResult((7.0,), (3,))
    assert result.ci95 is None
    assert repr(result) == "EvaluationResult(return_mean=7 ci95=none episodes=1)"
    assert result.metrics() == {
        "eval/return_mean": 7.0,
        "eval/return_std": 0.0,
        "eval/length_mean": 3.0,
        "eval/episodes": 1.0,
    }


class Tires(Plain):
    """Each of its episodes is a step longer than the one before; it cannot be copied."""

    length = None

    def __init__(self):
        self.episodes, self.thing = 0, (number for number in ())

    def reset(self, **options):
        self.episodes += 1
        return super().reset(**options)

    def step(self, action):
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, self.steps >= self.episodes, truncated, info


@pytest.mark.filterwarnings("ignore::groupwise.errors.GroupStartWarning")
def test_where_starts_need_fresh_environments_evaluations_have_them_too(tmp_path):
    quiet = {"logging": {"progress": "none"}, "evaluation": {"episodes": 2}}
    cfg = gw.GRPOCfg(num_steps=8, group_size=2)
    run = gw.train(Tires, cfg, num_envs=2, max_episode_steps=9, total_iterations=1, run_dir=tmp_path / "run", **quiet)
    assert run.summary["start_mode"] == "fresh, verified"
    first = gw.evaluate(run, 2).length_mean
    assert gw.evaluate(run, 300).length_mean == first < 3
    assert gw.evaluate(gw.Run.load(run.path, env=Tires), 300).length_mean == first


def test_an_environment_that_is_registered_as_a_batch_alone_trains_without_evaluations(tmp_path):
    gymnasium.register("Batch-v0", vector_entry_point=CartPoleVectorEnv)
    try:
        env = gw.EnvCfg(id="Batch-v0", num_envs=2, max_episode_steps=9, vectorization="entry_point")
        ppo, quiet = gw.PPOCfg(num_steps=8), {"logging": {"progress": "none"}}
        for number, given in enumerate((env, gymnasium.make_vec("Batch-v0", num_envs=2))):
            run = gw.train(given, ppo, total_iterations=1, run_dir=tmp_path / str(number), **quiet)
            assert run.summary["env_steps"] == 16
    finally:
        del gymnasium.registry["Batch-v0"]


class Coloured(Plain):
    """Shows other observations than its vectorised version, which takes an argument of its own."""

    observation_space = gymnasium.spaces.Box(-9, 9, (3,), np.float32)


def stacked(num_envs, size=1):
    return SyncVectorEnv([Plain] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


@pytest.mark.parametrize("single", [Coloured, Plain])
def test_a_policy_is_not_evaluated_on_other_spaces_than_its_own(single, tmp_path, monkeypatch, caplog):
    spec = gymnasium.envs.registration.EnvSpec("Stacks-v0", entry_point=single, vector_entry_point=stacked)
    monkeypatch.setitem(gymnasium.registry, "Stacks-v0", spec)
    kwargs = {} if single is Coloured else {"size": 2}
    env = gw.EnvCfg(id="Stacks-v0", num_envs=2, kwargs=kwargs, vectorization="entry_point")
    ready = gymnasium.make_vec("Stacks-v0", num_envs=2, **kwargs)
    ppo, quiet = gw.PPOCfg(num_steps=8), {"logging": {"progress": "none"}, "total_iterations": 1}
    for number, made in enumerate((env, ready)):
        folder = tmp_path / str(number)
        run = gw.train(made, ppo, run_dir=folder, **quiet)
        assert "return_mean" not in run.summary
        assert caplog.messages[-1].startswith("no evaluation: Stacks-v0 cannot be made a second time")
        with pytest.raises(
            ConfigError, match=r"(allows no evaluation|a second time) .*; fix: leave evaluation\.interval and"
        ):
            gw.train(made, ppo, run_dir=tmp_path / "other", evaluation={"interval": 8}, **quiet)
    with pytest.raises(
        ConfigError, match=r"^env\.vectorization='entry_point' allows no evaluation here: .* a loop of your own"
    ):
        gw.evaluate(tmp_path / "0")
