"""Acting in NumPy is ``policy.act`` to rounding, from the same draws."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from groupwise.config.policy import PolicyCfg
from groupwise.policies.actor_critic import MLP, ActorCritic
from groupwise.policies.heads import Categorical, DiagGaussian
from groupwise.speed.control import NumPyActor, numpy_actor

OBS = Box(-9, 9, (4,), np.float32)
BOX = Box(-1, 1, (2,), np.float32)
SPACES = {"discrete": Discrete(3, start=2), "box": BOX}
NETWORKS = {
    "tanh": {},
    "relu": {"activation": "relu", "hidden_sizes": (33, 7)},
    "no hidden layer": {"hidden_sizes": ()},
    "a shared trunk": {"trunk": "shared", "hidden_sizes": (20, 5)},
    "scaled observations": {"normalize_obs": True, "hidden_sizes": (17,)},
}


def make(space=SPACES["discrete"], obs=OBS, actor_only=False, **cfg):
    torch.manual_seed(0)
    policy = ActorCritic(obs, space, PolicyCfg(**cfg), actor_only=actor_only)
    for parameter in policy.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return policy


@pytest.mark.parametrize("actor_only", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("space", SPACES)
def test_actions_log_probs_and_values_are_the_references(space, network, actor_only):
    policy = make(SPACES[space], actor_only=actor_only, **NETWORKS[network])
    if policy.obs_normalizer is not None:
        policy.obs_normalizer.update(3 * torch.randn(50, 4) + 1, torch.ones(50, dtype=torch.bool))
    act = numpy_actor(policy)
    assert isinstance(act, NumPyActor)
    for rows in (1, 8, 32, 33):
        for deterministic in (False, True):
            obs = torch.randn(rows, 4)
            draws = [torch.Generator().manual_seed(5) for _ in range(2)]
            found, expected = (way(obs, deterministic, g) for way, g in zip((act, policy.act), draws, strict=True))
            torch.testing.assert_close(found, expected)
            assert torch.equal(*(g.get_state() for g in draws))


def test_parameters_that_change_in_place_are_seen():
    policy, obs = make(), torch.randn(5, 4)
    act = numpy_actor(policy)
    with torch.no_grad():
        policy.critic.head.bias += 1
    torch.testing.assert_close(act(obs).value, policy.act(obs).value)


class Doubled(MLP):
    def forward(self, x):
        return 2 * super().forward(x)


class DoubledLinear(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Own(ActorCritic):
    def act(self, *args, **more):
        return super().act(*args, **more)


OTHERS = {
    "another activation": lambda: make(activation="silu"),
    "an image": lambda: make(obs=Box(0, 255, (1, 12, 12), np.uint8)),
    "doubles": lambda: make().double(),
    "several choices": lambda: make(MultiDiscrete([2, 3])),
    "squashed": lambda: make(BOX, squash_output=True),
    "a subclass": lambda: Own(OBS, Discrete(2)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_policies_act_themselves(case):
    policy = OTHERS[case]()
    assert numpy_actor(policy) == policy.act


CHANGES = {
    "a network derived from ours": lambda policy: setattr(policy, "actor", Doubled(4, PolicyCfg(), 3)),
    "a layer derived from torch's": lambda policy: setattr(policy.actor, "head", DoubledLinear(64, 3)),
    "a parametrised layer": lambda policy: torch.nn.utils.parametrizations.weight_norm(policy.critic.hidden[1]),
    "no bias": lambda policy: setattr(policy.actor, "head", torch.nn.Linear(64, 3, bias=False)),
    "a hook": lambda policy: policy.actor.register_forward_hook(lambda module, inputs, output: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_policies_that_were_changed_act_themselves(change):
    policy = make()
    CHANGES[change](policy)
    assert numpy_actor(policy) == policy.act


@pytest.mark.parametrize(("space", "family"), [(Discrete(2), Categorical), (BOX, DiagGaussian)])
def test_a_head_that_draws_otherwise_is_asked(space, family):
    class OwnHead(family):
        def sample(self, params, generator=None):
            return torch.ones_like(super().sample(params, generator))

    policy = make(space)
    policy.head.__class__ = OwnHead
    assert (numpy_actor(policy)(torch.randn(20, 4)).action == 1).all()


def test_a_policy_that_diverged_acts_without_warnings():
    policy = make(BOX)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(3e38)
    assert not numpy_actor(policy)(torch.ones(3, 4)).action.isfinite().all()


def test_a_choice_of_probability_zero_is_never_drawn():
    policy = make(Discrete(3), hidden_sizes=())
    with torch.no_grad():
        policy.actor.head.weight.zero_()
        policy.actor.head.bias.copy_(torch.tensor([0.0, -torch.inf, 1000.0 - 999.5]))
    act, generator = numpy_actor(policy), torch.Generator().manual_seed(0)
    acted = [act(torch.zeros(30, 4), generator=generator) for _ in range(40)]
    assert {int(i) for action, *_ in acted for i in action} == {0, 2}
    assert all(log_prob.isfinite().all() for _, log_prob, *_ in acted)
