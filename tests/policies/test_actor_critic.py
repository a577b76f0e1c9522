import copy
import math

import numpy as np
import pytest
import shapes
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from tensordict import TensorDict
from torch import nn

from groupwise.config.policy import PolicyCfg
from groupwise.data.rollout import Nested, allocate
from groupwise.data.spaces import obs_spec, obs_to_tensor
from groupwise.engines import Engine
from groupwise.errors import ConfigError, DataError
from groupwise.policies.actor_critic import ActorCritic

BOX = spaces.Box(-10, 10, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (8, 8, 3), np.uint8)
DISCRETE = spaces.Discrete(4, start=1)
OBSERVATIONS = {
    "box": BOX,
    "image": IMAGE,
    "discrete": spaces.Discrete(3),
    "multi_discrete": spaces.MultiDiscrete([2, 3]),
    "multi_binary": spaces.MultiBinary(3),
    "dict": spaces.Dict({"x": BOX, "i": IMAGE, "t": spaces.Tuple((spaces.Discrete(2), BOX))}),
    "tuple": spaces.Tuple((spaces.Discrete(2), BOX)),
}
ACTIONS = {
    "discrete": DISCRETE,
    "multi_discrete": spaces.MultiDiscrete([[2, 3]], start=[[0, 5]]),
    "multi_binary": spaces.MultiBinary(3),
    "box": spaces.Box(-1, 2, (2, 2), np.float64),
}
SMALL = PolicyCfg(hidden_sizes=(16,))
SETTINGS = {
    "plain": SMALL,
    "shared": SMALL.model_copy(update={"trunk": "shared"}),
    "normalised": SMALL.model_copy(update={"normalize_obs": True, "normalize_reward": True}),
    "squash": SMALL.model_copy(update={"squash_output": True}),
}


def batch_of(space, n, seed=0) -> Nested:
    space.seed(seed)
    samples = [space.sample() for _ in range(n)]
    return obs_to_tensor(space, concatenate(space, samples, create_empty_array(space, n)), batched=True)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def rollout_of(space, n=4, steps=5):
    storage = allocate(obs_spec(space), n, steps + 1)
    for t in range(steps + 1):
        storage[:, t] = batch_of(space, n, seed=t)
    flags = {key: torch.zeros(n, steps + 1, dtype=torch.bool) for key in ("terminated", "truncated")}
    valid = torch.ones(n, steps + 1, dtype=torch.bool)
    valid[:, -1] = False
    reward = torch.randn(n, steps + 1, generator=seeded())
    return TensorDict({"obs": storage, "reward": reward, "valid": valid, **flags}, [n, steps + 1])


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("obs", OBSERVATIONS)
def test_ratio_is_one_before_the_first_step(obs, action, setting):
    space = OBSERVATIONS[obs]
    policy = ActorCritic(space, ACTIONS[action], SETTINGS[setting])
    policy.update_normalizers(rollout_of(space), Engine())
    batch = batch_of(space, 6)
    acted = policy.act(batch, generator=seeded())
    scored = policy.evaluate({"obs": batch, "action": acted.action})
    torch.testing.assert_close(scored.log_prob, acted.log_prob, atol=1e-6, rtol=1e-6)
    assert torch.equal(scored.value, acted.value)
    torch.testing.assert_close(policy.value(batch), acted.value)
    assert scored.log_prob.shape == scored.entropy.shape == scored.value.shape == (6,)
    assert tuple(acted.action.shape) == (6, *policy.action_spec.shape)
    assert acted.action.dtype == policy.action_spec.dtype
    torch.testing.assert_close(policy.kl(scored.dist, scored.dist), torch.zeros(6))
    assert not acted.log_prob.requires_grad
    assert not acted.value.requires_grad
    (scored.log_prob.sum() + scored.entropy.sum() + scored.value.sum()).backward()
    assert all(p.grad is not None for p in policy.parameters())


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("obs", OBSERVATIONS)
@pytest.mark.parametrize("deterministic", [True, False])
def test_predict_gives_actions_of_the_space(obs, action, deterministic):
    space, action_space = OBSERVATIONS[obs], ACTIONS[action]
    policy = ActorCritic(space, action_space, SMALL)
    space.seed(0)
    one = space.sample()
    single = policy.predict(one, deterministic)
    assert action_space.contains(single)
    assert isinstance(single, int) == (action == "discrete")
    batch = concatenate(space, [one, one], create_empty_array(space, 2))
    several = policy.predict(batch, deterministic)
    assert batch_space(action_space, 2).contains(several)
    assert several.dtype == action_space.dtype
    if deterministic:
        np.testing.assert_allclose(several, [single, single], atol=1e-6)


def test_predict_clips_where_training_keeps_the_sample():
    policy = ActorCritic(BOX, spaces.Box(-0.1, 0.1, (50,)), SMALL)
    acted = policy.act(batch_of(BOX, 4), generator=seeded())
    assert acted.action.abs().max() > 0.1
    assert policy.env_action(acted.action).abs().max() <= np.float32(0.1)


@pytest.mark.parametrize("setting", ["plain", "shared"])
def test_actor_only_has_no_critic(setting):
    with_critic = ActorCritic(IMAGE, DISCRETE, SETTINGS[setting])
    policy = ActorCritic(IMAGE, DISCRETE, SETTINGS[setting], actor_only=True)
    assert policy.actor_only
    assert not [name for name, _ in policy.named_parameters() if "critic" in name]
    assert len(list(policy.parameters())) < len(list(with_critic.parameters()))
    batch = batch_of(IMAGE, 2)
    acted = policy.act(batch)
    assert acted.value is None
    assert policy.evaluate({"obs": batch, "action": acted.action}).value is None
    with pytest.raises(TypeError, match="no critic"):
        policy.value(batch)


@pytest.mark.parametrize("space", [BOX, IMAGE])
def test_trunk_is_shared_or_separate(space):
    def touched(setting, which):
        policy = ActorCritic(space, DISCRETE, SETTINGS[setting])
        batch = batch_of(space, 3)
        scored = policy.evaluate({"obs": batch, "action": torch.zeros(3, dtype=torch.int64)})
        (scored.log_prob if which == "actor" else scored.value).sum().backward()
        return {name for name, p in policy.named_parameters() if p.grad is not None}

    assert not touched("plain", "actor") & touched("plain", "critic")
    both = touched("shared", "actor") & touched("shared", "critic")
    assert any(name.startswith("trunk") for name in both)
    assert (space is BOX) or any(name.startswith("encoder") for name in both)


def test_first_policy_is_nearly_uniform_and_gaussians_start_at_log_std_init():
    policy = ActorCritic(BOX, spaces.Discrete(4))
    batch = batch_of(BOX, 8)
    entropy = policy.evaluate({"obs": batch, "action": torch.zeros(8, dtype=torch.int64)}).entropy
    torch.testing.assert_close(entropy, torch.full((8,), math.log(4)), atol=1e-3, rtol=0)
    gaussian = ActorCritic(BOX, ACTIONS["box"], PolicyCfg(log_std_init=-0.5))
    assert gaussian.log_std.tolist() == [-0.5] * 4
    assert policy.log_std is None


def test_clone_shares_nothing():
    policy = ActorCritic(BOX, ACTIONS["box"], SETTINGS["normalised"])
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    clone = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in clone.parameters():
            parameter += 1
    clone.update_normalizers(rollout_of(BOX), Engine())
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    assert not any(p.requires_grad for p in policy.make_reference().parameters())
    assert all(p.requires_grad for p in policy.parameters())


@pytest.mark.parametrize("obs", OBSERVATIONS)
def test_state_dict_round_trip(obs):
    space = OBSERVATIONS[obs]
    a, b = (ActorCritic(space, ACTIONS["box"], SETTINGS["normalised"]) for _ in range(2))
    a.update_normalizers(rollout_of(space), Engine())
    b.load_state_dict(a.state_dict())
    batch = batch_of(space, 5)
    acted = (policy.act(batch, generator=seeded())[:3] for policy in (a, b))
    for ours, theirs in zip(*acted, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(a.normalize_reward(torch.ones(2)), b.normalize_reward(torch.ones(2)))


def test_normalisers_change_in_update_normalizers_only():
    policy = ActorCritic(BOX, DISCRETE, SETTINGS["normalised"])
    rollout = rollout_of(BOX)
    start = {name: tensor.clone() for name, tensor in policy.named_buffers()}
    acted = policy.act(rollout["obs"][:, 0])
    policy.evaluate({"obs": rollout["obs"][:, 0], "action": acted.action})
    policy.normalize_reward(rollout["reward"])
    policy.predict(np.zeros(3))
    assert all(torch.equal(tensor, start[name]) for name, tensor in policy.named_buffers())
    policy.update_normalizers(rollout, Engine())
    valid = rollout["obs"][:, :-1].reshape(-1, 3).double()
    torch.testing.assert_close(policy.obs_normalizer.statistics[0].mean, valid.mean(0))
    torch.testing.assert_close(policy.obs_normalizer.statistics[0].var, valid.var(0, unbiased=False))
    assert not torch.equal(policy.normalize_reward(rollout["reward"]), rollout["reward"])


def test_custom_networks_map_the_encoders_features():
    space = spaces.Dict({"n": spaces.Discrete(2), "x": BOX})
    actor, critic = nn.Linear(5, 4), nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.9), nn.Linear(7, 1))
    policy = ActorCritic(space, DISCRETE, SETTINGS["shared"], actor=actor, critic=critic)
    batch = TensorDict({"n": torch.tensor([1]), "x": torch.tensor([[1.0, 2.0, 3.0]])}, [1])
    features = torch.tensor([[0.0, 1.0, 1.0, 2.0, 3.0]])
    scored = policy.evaluate({"obs": batch, "action": torch.tensor([2])})
    torch.testing.assert_close(scored.dist, actor(features))
    torch.testing.assert_close(scored.value, critic(features).squeeze(-1))
    assert torch.equal(scored.value, policy.value(batch)), "dropout is on"


@pytest.mark.parametrize("setting", ["plain", "shared"])
def test_custom_actor_beside_the_default_critic(setting):
    policy = ActorCritic(BOX, DISCRETE, SETTINGS[setting], actor=nn.Linear(3, 4))
    assert policy.act(batch_of(BOX, 2)).value.shape == (2,)


def test_custom_gaussian_actor_may_give_its_own_deviations():
    space = spaces.Box(-1, 1, (2,))
    assert ActorCritic(BOX, space, actor=nn.Linear(3, 2)).log_std.shape == (2,)
    policy = ActorCritic(BOX, space, actor=nn.Linear(3, 4))
    assert policy.log_std is None
    assert policy.act(batch_of(BOX, 5)).action.shape == (5, 2)


@pytest.mark.parametrize(
    ("networks", "message"),
    [
        ({"actor": nn.Linear(3, 5)}, r"the actor maps features \[2, 3\] to \[2, 5\], expected \[B, 4\]"),
        ({"critic": nn.Linear(3, 2)}, r"the critic maps features \[2, 3\] to \[2, 2\], expected \[B, 1\]"),
        ({"critic": nn.Linear(3, 1), "actor_only": True}, "fix: drop one"),
        ({"critic": False}, "critic = False: expected a Module; fix: leave it out, or actor_only=True"),
    ],
)
def test_unfit_custom_network(networks, message, monkeypatch):
    monkeypatch.setattr(shapes, "CHECKED_CALLS", 0)  # checks of types, which users do not have, come first
    with pytest.raises(ConfigError, match=message):
        ActorCritic(BOX, DISCRETE, **networks)


def test_predict_refuses_what_is_not_finite():
    space = spaces.Dict({"n": spaces.Discrete(2), "x": BOX})
    policy = ActorCritic(space, DISCRETE)
    with pytest.raises(DataError, match=r"obs\.x\[1\] is nan, expected a finite number"):
        policy.predict({"n": 0, "x": np.array([0, np.nan, 0])})


@pytest.mark.parametrize("shape", [(2,), (1, 2), (1, 1, 3), ()])
def test_predict_names_the_expected_shape(shape):
    with pytest.raises(DataError, match=r"expected \[3\] for one observation or \[B, 3\] for a batch"):
        ActorCritic(BOX, DISCRETE).predict(np.zeros(shape))


@pytest.mark.parametrize("space", [BOX, spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Discrete(3)])
def test_a_policy_in_float64_acts_on_what_environments_return(space):
    space.seed(0)
    obs, policy = space.sample(), ActorCritic(space, spaces.Discrete(2))
    with torch.no_grad():
        value = policy.value(obs_to_tensor(space, np.asarray(obs)[None], batched=True))
        policy.double()
        precise = policy.value(obs_to_tensor(space, np.asarray(obs)[None], batched=True))
    assert precise.dtype == torch.float64
    torch.testing.assert_close(precise.float(), value)
    assert policy.predict(obs) in (0, 1)
