"""``GRPO`` through Stable-Baselines3: groups, their starts, and what of them is trained on."""

import gymnasium
import numpy as np
import pytest
import torch
from sb3_corridor import SMALL, Corridor, ShortPendulum, Starts, Watch, corridor, parameters
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

from groupwise.algorithms import grpo
from groupwise.contrib.sb3 import GRPO
from groupwise.errors import ConfigError


@pytest.fixture
def taken(monkeypatch):
    """Rollouts that updates were made of."""
    rollouts, update = [], grpo.GRPO.update
    spy = lambda self, rollout: rollouts.append(rollout.clone()) or update(self, rollout)  # noqa: E731
    monkeypatch.setattr(grpo.GRPO, "update", spy)
    return rollouts


@pytest.mark.parametrize("num_envs", [1, 5])
def test_members_begin_alike_in_training_unless_sharing_is_off(num_envs):
    starts, own = Starts(), Starts()
    corridor(env=make_vec_env(Corridor, n_envs=num_envs), group_size=3).learn(150, starts)
    groups = [{starts.seen[a] for a in starts.seen if a // 3 == g} for g in {a // 3 for a in starts.seen}]
    assert len(groups) > 5
    assert len(starts.seen) > 2.5 * len(groups)
    assert all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) == len(groups)
    corridor(shared_starts="off").learn(100, own)
    assert len(set(own.seen.values())) == len(own.seen) > 10


@pytest.mark.parametrize(("choice", "trials"), [("verify", 1), ("trust", 0), ("off", 0)])
def test_the_start_is_tried_out_once_for_each_environment(monkeypatch, choice, trials):
    tried = []
    monkeypatch.setattr("groupwise.contrib.sb3.verify_shared_start", lambda env, seed: tried.append(env))
    model = corridor(shared_starts=choice).learn(20)
    model.learn(20)
    assert len(tried) == trials
    model.set_env(make_vec_env(Corridor, n_envs=2))
    model.learn(20)
    assert len(tried) == 2 * trials


def test_another_choice_of_starts_takes_effect_when_training_goes_on():
    model = corridor(shared_starts="off").learn(60)
    model.shared_starts = "verify"
    model.learn(20, reset_num_timesteps=False)
    assert (model.rollout_buffer.starts, model._verified) == ("shared", model.get_env())
    model.shared_starts = "off"
    model.learn(20, reset_num_timesteps=False)
    assert model.rollout_buffer.starts == "own"


def test_another_size_of_groups_takes_effect_when_training_goes_on(taken):
    model = corridor(group_size=3).learn(60)
    model.group_size = 2
    model.learn(60, reset_num_timesteps=False)
    last = taken[-1]
    group, episode = last["group_id"][0, :-1], last["episode_id"][0, :-1]
    assert {episode[group == number].unique().numel() for number in group.unique()} == {2}


def test_only_whole_groups_are_trained_on_and_nothing_is_lost(taken):
    model = corridor(group_size=3).learn(200)
    steps = 0
    for rollout in taken:
        group, episode = rollout["group_id"][0, :-1], rollout["episode_id"][0, :-1]
        done = (rollout["terminated"] | rollout["truncated"])[0, :-1]
        for number in group.unique():
            assert episode[group == number].unique().numel() == 3
            assert done[group == number].sum() == 3
        steps += len(group)
    waiting = sum(len(steps) for steps in model.rollout_buffer._episodes.values())
    assert steps + waiting == model.num_timesteps


def test_a_rollout_waits_for_the_groups_it_began_and_the_last_one_for_nothing():
    watch = Watch()
    model = corridor(n_steps=2, group_size=4).learn(60, watch)
    rollouts = watch.events.count("rollout_end")
    assert watch.events == ["training_start", *["rollout_start", "rollout_end"] * rollouts, "training_end"]
    assert model.core.iteration >= rollouts - 1  # only the last one may have been short of a group
    assert corridor(n_steps=10, group_size=2).learn(40).num_timesteps <= 40 + 10 * 2


def test_nothing_learned_is_said():
    endless = gymnasium.make("Pendulum-v1").unwrapped
    model = GRPO("MlpPolicy", endless, **SMALL)
    before = parameters(model)
    with pytest.warns(UserWarning, match=r"no group of 4 episodes was finished in 48 steps; fix: .* step limit"):
        model.learn(48)
    np.testing.assert_array_equal(parameters(model), before)


@pytest.mark.parametrize("normalized", [False, True])
def test_old_probabilities_are_those_that_were_sampled_from(monkeypatch, normalized):
    env = make_vec_env(ShortPendulum, n_envs=2)
    model = corridor(env=VecNormalize(env) if normalized else env, group_size=3, learning_rate=0.01)
    ratios, update = [], model.core.update

    def spy(rollout):
        with torch.no_grad():
            log_prob = model.core.policy.evaluate({k: rollout[k][0, :-1] for k in ("obs", "action")}).log_prob
        ratios.append((log_prob - rollout["sample_log_prob"][0, :-1]).exp())
        return update(rollout)

    monkeypatch.setattr(model.core, "update", spy)
    model.learn(200)
    # all of the first rollout was drawn by the very policy that is now trained, though the normaliser moved meanwhile
    torch.testing.assert_close(ratios[0], torch.ones_like(ratios[0]))
    # later ones hold episodes that were begun under the policy before
    assert len(ratios) > 1
    assert any((ratio - 1).abs().max() > 1e-3 for ratio in ratios[1:])


def test_rewards_and_ends_come_as_the_vector_environment_gives_them(taken):
    env = VecNormalize(make_vec_env(ShortPendulum, n_envs=2), clip_reward=0.5)
    watch = Watch()
    corridor(env=env, group_size=2).learn(80, watch)
    given = np.concatenate(watch.rewards)
    assert np.abs(given).max() <= 0.5
    rollout = taken[0]
    assert np.isin(rollout["reward"][0, :-1].numpy(), given).all()
    assert not rollout["terminated"][0, :-1].any()  # the pendulum's time limit truncates
    assert rollout["truncated"][0, :-1].sum() == rollout["episode_id"].max() + 1


def test_least_squares_refuse_rewards_whose_unit_changes():
    env = make_vec_env(Corridor, n_envs=2)
    with pytest.raises(
        ConfigError, match=r"keeps sums of earlier ones; fix: VecNormalize\(\.\.\., norm_reward=False\)"
    ):
        corridor(env=VecNormalize(env), group_size=2, credit="lstd").learn(40)
    corridor(env=VecNormalize(env, norm_reward=False), group_size=2, credit="lstd").learn(40)
    forgets = {
        "returns": "return_to_go",
        "baseline": {"name": "lstd", "decay": 0},
        "scale": "none",
        "normalize": "batch",
    }
    corridor(env=VecNormalize(env), group_size=2, credit=forgets).learn(40)
