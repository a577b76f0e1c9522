"""``preset=`` and ``clip_range=`` of the Stable-Baselines3 class."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.wrappers import FlattenObservation
from sb3_corridor import Corridor, corridor, parameters
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import LinearSchedule

import groupwise as gw
from groupwise.algorithms.losses import clip_range as clip_range_of
from groupwise.config import resolve
from groupwise.contrib.sb3 import GRPO, NormalizedExtractor

TUNED = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "LunarLander-v3", "MountainCarContinuous-v0")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing Box2D warns, and crashes where that is an error
@pytest.mark.parametrize("env_id", TUNED)
def test_auto_takes_the_settings_that_train_takes(env_id: str):
    cfg = resolve(env_id, "grpo")
    model = GRPO("MlpPolicy", make_vec_env(env_id, n_envs=4), preset="auto", device="cpu")
    ours, theirs = model.core.cfg, cfg.algorithm
    for name in ("num_epochs", "minibatch_size", "gamma", "group_size", "credit", "objective", "ent_coef"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert model.n_steps * 4 == theirs.num_steps * cfg.env.num_envs
    falls = theirs.schedule.name == "linear"
    assert [model.lr_schedule(left) for left in (1.0, 0.5)] == pytest.approx(
        [theirs.learning_rate, theirs.learning_rate * (0.5 if falls else 1.0)]
    )
    assert isinstance(model.policy.features_extractor, NormalizedExtractor) is cfg.policy.normalize_obs


def test_given_arguments_come_before_the_preset_even_if_they_are_defaults():
    model = GRPO("MlpPolicy", "CartPole-v1", preset="auto", gamma=0.99, credit="rloo", learning_rate=1e-4)
    assert (model.gamma, model.lr_schedule(0.3)) == (0.99, 1e-4)
    assert model.core.cfg.credit.baseline.name == "leave_one_out"
    assert model.n_steps == 8 * 32  # one environment in place of eight


def test_the_name_of_a_preset_sets_credit_and_objective():
    model = GRPO("MlpPolicy", "CartPole-v1", preset="dapo")
    assert model.core.cfg.objective.trust_region.clip_high == 0.28
    assert (model.gamma, model.n_steps) == (0.99, 1024)


def test_the_settings_of_a_preset_are_arguments_and_those_without_a_counterpart_are_named():
    with pytest.warns(
        UserWarning, match="the preset of vla also sets collection, which GRPO in Stable-Baselines3 does not"
    ):
        model = GRPO("MlpPolicy", "CartPole-v1", preset="vla", ent_coef=0.1)
    assert (model.group_size, model.core.cfg.group_size) == (8, 8)
    assert (model.ent_coef, model.core.cfg.ent_coef) == (0.1, 0.1)
    assert model.core.cfg.collection.dynamic_sampling is None
    assert GRPO("MlpPolicy", "CartPole-v1", preset="rloo").kl_estimator == "k1"
    assert GRPO("MlpPolicy", "CartPole-v1", preset="rloo", kl_estimator="k2").core.cfg.kl_estimator == "k2"


def test_statistics_of_observations_are_learned_and_saved(tmp_path):
    model = corridor(policy_kwargs={"features_extractor_class": NormalizedExtractor}, n_steps=64).learn(256)
    statistics = model.policy.features_extractor.normalizer.statistics[0]
    assert statistics.count > 100
    assert statistics.mean[1] > 1  # the second number counts the steps of the episode
    model.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model")
    obs = np.array([[0.3, 5.0], [0.1, 0.0]], np.float32)
    features = model.policy.features_extractor(torch.as_tensor(obs))
    assert features[0, 1] > 0 > features[1, 1]
    assert torch.equal(loaded.policy.features_extractor(torch.as_tensor(obs)), features)


@pytest.mark.parametrize(
    ("clip_range", "first"), [(0.1, 0.1), (LinearSchedule(0.4, 0.2, 1.0), 0.4), (lambda left: left / 2, 0.5)]
)
def test_the_clip_range_is_a_number_or_a_function_of_the_progress(tmp_path, clip_range, first):
    model = corridor(clip_range=clip_range)
    seen, update = [], model.core.update
    model.core.update = lambda rollout: (
        seen.append(clip_range_of(model.core.cfg.objective.trust_region)),
        update(rollout),
    )[1]
    model.learn(64)
    assert seen[0] == pytest.approx((first, first))
    assert len(seen) == 2
    assert seen[1][0] < first if callable(clip_range) else seen[1][0] == first
    model.core.update = update
    model.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model", env=make_vec_env(Corridor, n_envs=2))
    assert clip_range_of(loaded.core.cfg.objective.trust_region) == pytest.approx((first, first))


def test_a_clip_range_is_that_of_the_objective():
    ours = corridor(clip_range=0.05).learn(96)
    theirs = corridor(objective={"trust_region": {"clip_low": 0.05, "clip_high": 0.05}}).learn(96)
    assert (parameters(ours) == parameters(theirs)).all()


@pytest.mark.parametrize("env", [lambda: "Blackjack-v1", lambda: make_vec_env("Blackjack-v1", n_envs=2)])
def test_tuple_observations_name_the_wrapper_that_flattens_them(env):
    with pytest.raises(gw.errors.UnsupportedSpaceError, match=r"fix: gymnasium\.wrappers\.FlattenObservation\(env\)"):
        GRPO("MlpPolicy", env())
    model = GRPO("MlpPolicy", FlattenObservation(gymnasium.make("Blackjack-v1")), n_steps=32).learn(64)
    assert model.num_timesteps >= 64
