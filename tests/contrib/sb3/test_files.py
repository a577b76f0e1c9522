"""``GRPO`` through Stable-Baselines3: learning again, seeds, files, parameters in and out."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from sb3_corridor import Corridor, Starts, corridor, parameters
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecNormalize

import groupwise as gw
from groupwise.contrib.sb3 import GRPO


def test_learning_again_goes_on_where_it_was():
    first = parameters(corridor().learn(32))
    twice = corridor().learn(32)
    np.testing.assert_array_equal(parameters(twice), first)
    twice.learn(32, reset_num_timesteps=False)
    assert twice.num_timesteps >= 64
    assert (parameters(twice) != first).any()


def test_using_the_environment_in_between_starts_afresh_and_afterwards_it_resets_as_ever():
    model, starts = corridor(), Starts()
    model.learn(32)
    env, number = model.get_env(), model.rollout_buffer.next_group
    evaluate_policy(model, env, 2)
    model.learn(32, starts, reset_num_timesteps=False)
    assert min(starts.seen) == number * 4
    assert model.num_timesteps >= 64
    env.seed(5)
    np.testing.assert_array_equal(env.reset(), [Corridor().reset(seed=seed)[0] for seed in (5, 6)])


def test_equal_seeds_train_equally_and_others_otherwise():
    def run(seed: int) -> list:
        model = corridor(env=VecNormalize(make_vec_env(Corridor, n_envs=2)), seed=seed).learn(120)
        vec, actions = model.get_env(), []
        obs = vec.reset()
        for _ in range(20):
            actions.append(model.predict(obs)[0].tolist())
            obs = vec.step(np.array(actions[-1]))[0]
        return [actions, parameters(model).tolist()]

    assert run(0) == run(0) != run(1)
    assert corridor(seed=None)._start_seed != corridor(seed=None)._start_seed


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_save_and_load(tmp_path, kl_coef):
    objective = gw.ObjectiveCfg(trust_region={"clip_low": 0.1})
    model = corridor(kl_coef=kl_coef, credit="rloo", objective=objective).learn(60)
    obs = np.stack([model.observation_space.sample() for _ in range(10)])
    model.save(tmp_path / "model.zip")
    env = make_vec_env(Corridor, n_envs=2)
    loaded = GRPO.load(tmp_path / "model.zip", env=env, device="cpu")
    np.testing.assert_array_equal(parameters(loaded), parameters(model))
    if kl_coef:
        references = [one.reference_policy.parameters_to_vector() for one in (loaded, model)]
        np.testing.assert_array_equal(*references)
        assert (references[0] != parameters(loaded)).any()
    assert str(loaded.policy.optimizer.state_dict()) == str(model.policy.optimizer.state_dict())
    for deterministic in (True, False):
        actions = []
        for one in (model, loaded):
            torch.manual_seed(0)
            actions.append(one.predict(obs, deterministic=deterministic)[0])
        np.testing.assert_array_equal(*actions)
    assert loaded.core.cfg == model.core.cfg
    assert (loaded.num_timesteps, loaded.core.iteration) == (model.num_timesteps, model.core.iteration)
    steps, next_group = model.num_timesteps, model._next_group
    starts = Starts()
    loaded.learn(60, starts, reset_num_timesteps=False)
    assert loaded.num_timesteps >= steps + 60
    assert min(starts.seen) >= next_group * 4  # fresh starts
    assert (parameters(loaded) != parameters(model)).any()


def test_what_the_update_remembers_is_saved_and_goes_on_equally(tmp_path):
    model = corridor().learn(60)
    model.save(tmp_path / "model")
    trained = []
    for _ in range(2):
        loaded = GRPO.load(tmp_path / "model", env=make_vec_env(Corridor, n_envs=2))
        trained.append(parameters(loaded.learn(60, reset_num_timesteps=False)))
    np.testing.assert_array_equal(*trained)


def test_load_takes_other_settings_and_another_number_of_environments(tmp_path):
    model = corridor().learn(40)
    model.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model", env=make_vec_env(Corridor, n_envs=3), n_epochs=1, learning_rate=1e-5)
    assert (loaded.n_envs, loaded.n_epochs, loaded.policy.optimizer.param_groups[0]["eps"]) == (3, 1, 1e-5)
    loaded.learn(40)
    assert loaded.policy.optimizer.param_groups[0]["lr"] == 1e-5
    assert GRPO.load(tmp_path / "model").predict(np.zeros(2, np.float32))[0].shape == ()
    own = GRPO.load(tmp_path / "model", custom_objects={"learning_rate": 2e-5, "lr_schedule": lambda _: 2e-5})
    assert own.learning_rate == 2e-5


@pytest.mark.parametrize(("saved", "given"), [(0.0, 0.1), (0.1, 0.0), (0.1, 0.2)])
def test_load_turns_the_reference_on_and_off(tmp_path, saved, given):
    model = corridor(kl_coef=saved).learn(60)
    model.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model", env=make_vec_env(Corridor, n_envs=2), kl_coef=given)
    assert (loaded.kl_coef, loaded.core.cfg.kl_coef, loaded.core.iteration) == (given, given, model.core.iteration)
    if given:
        expected = model.reference_policy.parameters_to_vector() if saved else parameters(model)
        np.testing.assert_array_equal(loaded.reference_policy.parameters_to_vector(), expected)
    loaded.learn(60)
    loaded.save(tmp_path / "again")
    assert ("reference_policy" in GRPO.load(tmp_path / "again").get_parameters()) == (given > 0)
    loaded.kl_coef = saved
    if saved and not given:
        np.testing.assert_array_equal(loaded.reference_policy.parameters_to_vector(), parameters(loaded))
    loaded.save(tmp_path / "again")
    assert ("reference_policy" in GRPO.load(tmp_path / "again").get_parameters()) == (saved > 0)


def test_parameters_in_and_out():
    model = corridor(kl_coef=0.1).learn(40)
    original = deepcopy(model.get_parameters())
    assert set(original) == {"policy", "policy.optimizer", "reference_policy"}
    with pytest.raises(ValueError, match="do not match"):
        model.set_parameters({"policy": original["policy"]})
    model.learn(40)
    model.set_parameters(original)
    for key, value in model.get_parameters()["policy"].items():
        assert torch.equal(value, original["policy"][key])
    model.learn(40)


def test_set_env():
    model = corridor().learn(40)
    other = make_vec_env(Corridor, n_envs=2)
    model.set_env(other)
    model.learn(40, reset_num_timesteps=False)
    assert model.get_env() is other
    assert model.num_timesteps >= 80
    model.set_env(other, force_reset=False)
    buffer = model.rollout_buffer
    model.learn(40, reset_num_timesteps=False)
    assert model.rollout_buffer is buffer
    with pytest.raises(AssertionError):
        model.set_env(make_vec_env(Corridor, n_envs=3))
