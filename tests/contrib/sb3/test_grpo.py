"""``GRPO`` wherever a Stable-Baselines3 algorithm fits: spaces, vector environments, policies."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sb3_corridor import SMALL, Corridor, ShortPendulum, corridor, parameters
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.envs import (
    BitFlippingEnv,
    FakeImageEnv,
    IdentityEnv,
    IdentityEnvBox,
    IdentityEnvMultiBinary,
    IdentityEnvMultiDiscrete,
    SimpleMultiObsEnv,
)
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnvWrapper, VecFrameStack

import groupwise as gw
from groupwise.contrib.sb3 import GRPO, ActorPolicy, SharedStart

SMALL_IMAGES = SMALL | {"policy_kwargs": {"features_extractor_kwargs": {"features_dim": 8}}}


@pytest.mark.parametrize(
    ("make", "num_envs"),
    [
        (lambda: IdentityEnv(3, ep_length=5), 1),
        (lambda: IdentityEnvBox(ep_length=5), 3),
        (lambda: IdentityEnvMultiBinary(2, ep_length=5), 1),
        (lambda: IdentityEnvMultiDiscrete(3, ep_length=5), 3),
        (lambda: Corridor(spaces.Box(-1, 1, (2, 2), np.float32)), 1),
        (ShortPendulum, 3),
    ],
    ids=["Discrete", "Box", "MultiBinary", "MultiDiscrete", "Box of two dimensions", "Pendulum"],
)
def test_action_spaces(make, num_envs):
    model = GRPO("MlpPolicy", make_vec_env(make, n_envs=num_envs), **SMALL)
    before = parameters(model)
    assert model.learn(200) is model
    assert (parameters(model) != before).any()
    assert evaluate_policy(model, make_vec_env(make), 2)[1] >= 0


@pytest.mark.parametrize("space", [spaces.Discrete(2, start=5), spaces.MultiDiscrete([2, 2], start=[3, -1])])
def test_actions_are_numbered_from_the_start_of_the_space(space):
    model = GRPO("MlpPolicy", Corridor(space), **SMALL).learn(60)  # the corridor refuses what is not of its space
    for deterministic in (True, False):
        assert space.contains(model.predict(np.zeros(2, np.float32), deterministic=deterministic)[0])


def test_an_environment_may_write_into_its_arrays():
    class Reuses(VecEnvWrapper):
        def reset(self):
            self.obs = self.venv.reset()
            return self.obs

        def step_wait(self):
            obs, *rest = self.venv.step_wait()
            self.obs[:] = obs
            return (self.obs, *rest)

    plain = parameters(corridor(env=DummyVecEnv([Corridor] * 2)).learn(100))
    np.testing.assert_array_equal(parameters(corridor(env=Reuses(DummyVecEnv([Corridor] * 2))).learn(100)), plain)


def test_images_are_transposed_and_stacked(tmp_path):
    env = VecFrameStack(make_vec_env(lambda: FakeImageEnv(3, 36, 36), n_envs=2), 2)
    model = GRPO("CnnPolicy", env, **SMALL_IMAGES).learn(100)
    assert model.observation_space.shape == (2, 36, 36)  # channels first
    obs = env.reset()
    model.save(tmp_path / "cnn")
    loaded = GRPO.load(tmp_path / "cnn", env=env)
    np.testing.assert_array_equal(loaded.predict(obs, deterministic=True)[0], model.predict(obs, deterministic=True)[0])
    loaded.learn(50)


@pytest.mark.parametrize("make", [lambda: BitFlippingEnv(4), lambda: BitFlippingEnv(4, continuous=True)])
def test_dictionaries_of_observations(make):
    model = GRPO("MultiInputPolicy", make_vec_env(make, n_envs=2), **SMALL)
    before = parameters(model)
    model.learn(100)
    assert (parameters(model) != before).any()
    with pytest.raises(ValueError, match="MultiInputPolicy"):
        GRPO("MlpPolicy", make_vec_env(make))


@pytest.mark.parametrize("credit", ["knn", "lstd"])
def test_states_are_compared_whatever_the_space(credit):
    """Numbers of a Discrete space one-hot, entries of a dictionary side by side."""
    made = [("MlpPolicy", lambda: IdentityEnv(3, ep_length=5)), ("MultiInputPolicy", lambda: BitFlippingEnv(4))]
    for policy, make in made:
        model = GRPO(policy, make_vec_env(make, n_envs=2), credit=credit, **SMALL)
        before = parameters(model)
        model.learn(100)
        assert (parameters(model) != before).any()
    with pytest.raises(gw.errors.DataError, match=r"needs vectors .*fix: .*baseline='mean'"):
        GRPO("CnnPolicy", make_vec_env(lambda: FakeImageEnv(3, 36, 36), n_envs=2), credit=credit, **SMALL_IMAGES).learn(
            50
        )


def test_starts_of_their_own_for_an_environment_that_cannot_share_them():
    env = make_vec_env(SimpleMultiObsEnv, n_envs=2)
    with pytest.raises(gw.errors.GroupStartError, match="shared_starts='off'"):
        GRPO("MultiInputPolicy", env, **SMALL).learn(10)
    GRPO("MultiInputPolicy", env, shared_starts="off", group_size=2, **SMALL).learn(300)


def test_sub_processes_train_like_one_process():
    apart, here = (
        make_vec_env("CartPole-v1", n_envs=2, **kwargs)
        for kwargs in ({"vec_env_cls": SubprocVecEnv, "wrapper_class": SharedStart}, {})
    )
    trained = [parameters(GRPO("MlpPolicy", env, **SMALL).learn(150)) for env in (apart, here)]
    apart.close()
    np.testing.assert_array_equal(*trained)


@pytest.mark.parametrize(
    ("make", "error", "reason"),
    [
        (lambda: GRPO("NoPolicy", "CartPole-v1"), ValueError, "NoPolicy unknown"),
        (lambda: GRPO(ActorCriticPolicy, "CartPole-v1"), ValueError, "is not a policy without a critic"),
        (lambda: GRPO("MlpPolicy", Corridor(spaces.Dict(a=spaces.Discrete(2)))), AssertionError, "only supports"),
        (lambda: GRPO("MlpPolicy", None, _init_setup_model=False).learn(10), gw.errors.EnvError, r"model\.set_env"),
    ],
)
def test_what_does_not_fit_is_refused(make, error, reason):
    with pytest.raises(error, match=reason):
        make()


def test_a_policy_of_ones_own():
    class Extractor(BaseFeaturesExtractor):
        def __init__(self, observation_space, width: int = 3):
            super().__init__(observation_space, width)
            self.norm = torch.nn.BatchNorm1d(2)
            self.linear = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Dropout(0.5))

        def forward(self, observations):
            return self.linear(self.norm(observations))

    own = type("Own", (ActorPolicy,), {})
    model = GRPO(own, make_vec_env(Corridor), **SMALL | {"policy_kwargs": {"features_extractor_class": Extractor}})
    norm = model.policy.features_extractor.norm
    model.learn(60)
    assert norm.bias.any()  # it began at zero
    assert not norm.running_mean.any()  # trained in evaluation mode, as it acted
    obs = np.ones(2, np.float32)
    assert len({int(model.predict(obs, deterministic=True)[0]) for _ in range(10)}) == 1


@pytest.mark.learn
def test_it_learns_cartpole():
    model = GRPO("MlpPolicy", "CartPole-v1", gamma=1.0, seed=0).learn(60_000)
    assert evaluate_policy(model, make_vec_env("CartPole-v1", seed=1), 20)[0] >= 400
