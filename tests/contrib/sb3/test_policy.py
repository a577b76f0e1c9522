"""Stable-Baselines3 policies without a critic."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import make_proba_distribution
from stable_baselines3.common.torch_layers import CombinedExtractor, NatureCNN
from torch import nn

from groupwise.contrib.sb3 import ActorPolicy, CnnActorPolicy, MultiInputActorPolicy, ScoredActor
from groupwise.errors import ConfigError, UnsupportedSpaceError

VECTOR = spaces.Box(-1, 1, (5,), np.float32)
IMAGE = spaces.Box(0, 255, (3, 36, 36), np.uint8)
ACTIONS = {
    "discrete": spaces.Discrete(4),
    "multi_discrete": spaces.MultiDiscrete([2, 5, 3]),
    "multi_binary": spaces.MultiBinary(6),
    "box": spaces.Box(-2, 2, (3,), np.float32),
    "matrix": spaces.Box(-2, 2, (2, 2), np.float32),
}


def make(action: str = "discrete", **kwargs) -> ActorPolicy:
    torch.manual_seed(0)
    return ActorPolicy(VECTOR, ACTIONS[action], lambda _: 1e-3, **kwargs)


def some_obs(count: int = 7) -> torch.Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(1))


def shaken(policy: ActorPolicy) -> ActorPolicy:
    """A policy whose actions are not all alike."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return policy


@pytest.mark.parametrize("action", ["discrete", "multi_discrete", "multi_binary", "box"])
def test_scores_are_those_of_the_distributions_of_stable_baselines(action: str):
    policy, obs = shaken(make(action)), some_obs()
    distribution = make_proba_distribution(ACTIONS[action])
    params = policy.action_params(obs)
    if action == "box":
        distribution.proba_distribution(params[:, :3], policy.log_std)
    else:
        distribution.proba_distribution(params)
    actions, log_prob = policy(obs)
    taken = actions.float() if action == "multi_binary" else actions
    torch.testing.assert_close(log_prob, distribution.log_prob(taken))
    score, entropy = policy.head.score(policy.action_params(obs), actions)
    torch.testing.assert_close(score, log_prob)
    torch.testing.assert_close(entropy, distribution.entropy())
    torch.testing.assert_close(policy(obs, deterministic=True)[0].long(), distribution.mode().long())


@pytest.mark.parametrize("action", ACTIONS)
def test_no_parameter_serves_a_critic(action: str):
    policy = make(action)
    names = {name.split(".")[0] for name, _ in policy.named_parameters()}
    assert names == {"policy_net", "action_net"} | ({"log_std"} if action in ("box", "matrix") else set())
    actions, _ = policy(some_obs())
    policy.head.log_prob(policy.action_params(some_obs()), actions).sum().backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())
    trained = [id(p) for group in policy.optimizer.param_groups for p in group["params"]]
    assert trained == [id(p) for p in policy.parameters()]


@pytest.mark.parametrize("action", ACTIONS)
def test_predict_gives_actions_of_the_space(action: str):
    policy, space = shaken(make(action)), ACTIONS[action]
    one = some_obs(1)[0].numpy()
    for deterministic in (True, False):
        assert space.contains(policy.predict(one, deterministic=deterministic)[0])
        batch, state = policy.predict(some_obs(9).numpy(), deterministic=deterministic)
        assert batch.shape == (9, *space.shape)
        assert state is None
        assert all(space.contains(single) for single in batch)
    first, second = (policy.predict(some_obs(9).numpy(), deterministic=True)[0] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    draws = [policy.predict(some_obs(9).numpy())[0] for _ in range(8)]
    assert any((draw != draws[0]).any() for draw in draws)


def test_box_actions_are_clipped_for_the_environment_and_scored_as_they_were_drawn():
    policy, obs = make("box", log_std_init=2.0), some_obs(200)
    actions, log_prob = policy(obs)
    beyond = (actions.abs() > 2).any(dim=1)
    assert beyond.any()
    clipped = policy.head.log_prob(policy.action_params(obs), actions.clamp(-2, 2))
    assert (clipped - log_prob)[beyond].abs().min() > 0
    assert np.abs(policy.predict(obs.numpy())[0]).max() == 2


def test_weights_begin_as_in_stable_baselines():
    policy = make()
    torch.testing.assert_close(policy.policy_net[0].weight.T @ policy.policy_net[0].weight, 2 * torch.eye(5))
    torch.testing.assert_close(policy.action_net.weight @ policy.action_net.weight.T, 1e-4 * torch.eye(4))
    assert not any(p.any() for name, p in policy.named_parameters() if name.endswith("bias"))
    plain = make(ortho_init=False)
    assert any(p.any() for name, p in plain.named_parameters() if name.endswith("bias"))


def test_layers_of_a_critic_and_other_spaces_are_refused():
    for net_arch in ({"pi": [64], "vf": [64]}, {}):
        with pytest.raises(ConfigError, match=r"net_arch=.* without a critic"):
            make(net_arch=net_arch)
    with pytest.raises(ConfigError, match="squash_output=True: actions are clipped here"):
        make(squash_output=True)
    with pytest.raises(UnsupportedSpaceError, match="supported: Discrete"):
        ActorPolicy(VECTOR, spaces.Box(0, 9, (2,), np.int64), lambda _: 1e-3)


def test_images_and_dictionaries_have_extractors_of_their_own():
    cnn = CnnActorPolicy(IMAGE, ACTIONS["discrete"], lambda _: 1e-3, features_extractor_kwargs={"features_dim": 16})
    assert isinstance(cnn.features_extractor, NatureCNN)
    assert cnn.action_net.in_features == 16
    assert cnn.predict(IMAGE.sample())[0].shape == ()
    both = spaces.Dict({"vec": VECTOR, "img": IMAGE})
    multi = MultiInputActorPolicy(both, ACTIONS["box"], lambda _: 1e-3, net_arch=[8])
    assert isinstance(multi.features_extractor, CombinedExtractor)
    assert multi.predict(both.sample())[0].shape == (3,)


@pytest.mark.parametrize("cls", [ActorPolicy, MultiInputActorPolicy])
def test_policy_saves_and_loads_by_itself(tmp_path, cls):
    space = VECTOR if cls is ActorPolicy else spaces.Dict({"vec": VECTOR})
    policy = cls(space, ACTIONS["box"], lambda _: 1e-3, net_arch=[9], log_std_init=-1.0, activation_fn=nn.ReLU)
    policy.save(tmp_path / "policy.pt")
    loaded = cls.load(tmp_path / "policy.pt")
    obs = space.sample()
    np.testing.assert_array_equal(*(one.predict(obs, deterministic=True)[0] for one in (loaded, policy)))
    assert loaded.log_std.tolist() == [-1.0] * 3


def test_optimizer_is_the_users():
    adam, rms = make().optimizer, make(optimizer_class=torch.optim.RMSprop, optimizer_kwargs={"alpha": 0.9}).optimizer
    assert (type(adam), adam.param_groups[0]["eps"], adam.param_groups[0]["lr"]) == (torch.optim.Adam, 1e-5, 1e-3)
    assert (type(rms), rms.param_groups[0]["alpha"]) == (torch.optim.RMSprop, 0.9)


@pytest.mark.parametrize("action", ["discrete", "matrix"])
def test_the_library_sees_the_same_policy(action: str):
    policy = shaken(make(action))
    scored = ScoredActor(policy)
    action_, log_prob, value = scored.act(some_obs(), generator=torch.Generator().manual_seed(3))[:3]
    assert value is None
    again = scored.act(some_obs(), generator=torch.Generator().manual_seed(3)).action
    torch.testing.assert_close(action_, again)
    evaluation = scored.evaluate({"obs": some_obs(), "action": action_})
    torch.testing.assert_close(evaluation.log_prob, log_prob)
    torch.testing.assert_close(evaluation.entropy, policy.head.entropy(policy.action_params(some_obs())))
    assert scored.kl(evaluation.dist, evaluation.dist).abs().max() == 0
    other = make(action).action_params(some_obs())
    assert scored.kl(evaluation.dist, other).min() > 0
    greedy = scored.act(some_obs(), deterministic=True).action
    np.testing.assert_array_equal(greedy, policy(some_obs(), deterministic=True)[0].detach())
