import copy
import gc
import weakref
from itertools import chain

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.algorithms.optim import Trained
from groupwise.config.policy import PolicyCfg
from groupwise.errors import ConfigError
from groupwise.policies import mlp_kernel
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.discrete_heads import Categorical
from groupwise.policies.gaussian_heads import DiagGaussian
from groupwise.policies.mlp_kernel import ActingNetworks
from groupwise.policies.networks import MLP, ObsEncoder

WIDTH = st.integers(1, 20)
SIZES = st.lists(WIDTH, max_size=3).map(tuple)
BATCH = st.lists(st.integers(0, 6), max_size=2)
ACTIVATION = st.sampled_from(mlp_kernel.ACTIVATIONS)


def network(num_inputs, hidden_sizes, num_outputs, activation):
    built = MLP(num_inputs, PolicyCfg(hidden_sizes=hidden_sizes, activation=activation), num_outputs)
    for parameter in built.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return built


@settings(max_examples=60, deadline=None)
@given(
    batch=BATCH,
    num_inputs=WIDTH,
    trunk_sizes=st.none() | st.lists(WIDTH, min_size=1, max_size=2).map(tuple),
    sizes=st.lists(SIZES, min_size=1, max_size=2),
    activation=ACTIVATION,
    rows=st.sampled_from([0, 4, 1000]),
)
def test_networks_of_a_vector_are_the_layers(batch, num_inputs, trunk_sizes, sizes, activation, rows):
    """In value and gradient, of networks that begin at the input or behind a common trunk."""
    torch.manual_seed(0)
    trunk = network(num_inputs, trunk_sizes, None, activation) if trunk_sizes else None
    heads = [network(trunk_sizes[-1] if trunk_sizes else num_inputs, size, 3, activation) for size in sizes]
    trained = Trained(chain.from_iterable(mlp.parameters() for mlp in [*([trunk] if trunk else []), *heads]))
    x = torch.randn(*batch, num_inputs)

    expected = [head(trunk(x) if trunk else x) for head in heads]
    towards = [torch.randn_like(output) for output in expected]
    torch.autograd.backward(expected, towards)
    trained.gather_grad()
    reference = trained.tensors[0].grad.clone()

    trained.zero_grad()
    layers = [head.layers for head in heads]
    networks = mlp_kernel.VectorNetworks(trained.tensors[0], trunk.layers if trunk else [], layers)
    found = networks(x)
    with torch.no_grad():
        prepared = mlp_kernel.ActingNetworks(trunk.layers if trunk else [], layers, numpy_rows=rows)(x)
    for output, without, of_layers in zip(found, prepared, expected, strict=True):
        torch.testing.assert_close(output, of_layers)
        torch.testing.assert_close(without, of_layers.detach())
    torch.autograd.backward(found, towards)
    assert all(parameter.grad is None for parameter in trained.parameters)
    torch.testing.assert_close(trained.tensors[0].grad, reference, rtol=1e-4, atol=1e-5)


@pytest.fixture
def networks():
    """A small network as a function of its vector."""
    mlp = network(4, (8,), 2, "tanh")
    return mlp_kernel.VectorNetworks(Trained(mlp.parameters()).tensors[0], [], [mlp.layers])


def test_gradients_of_several_passes_add_up(networks):
    x = torch.randn(6, 4)
    networks(x)[0].sum().backward()
    whole = networks.vector.grad.clone()
    networks.vector.grad = None
    for part in x.split(2):
        networks(part)[0].sum().backward()
    torch.testing.assert_close(networks.vector.grad, whole)
    assert whole.abs().max() > 0


def test_a_gradient_is_not_overwritten_by_a_later_pass(networks):
    x = torch.randn(6, 4)
    (first,) = torch.autograd.grad(networks(x)[0].sum(), networks.vector)
    kept = first.clone()
    torch.autograd.grad(networks(2 * x)[0].sum(), networks.vector)
    assert torch.equal(first, kept)


def test_a_pass_leaves_nothing_behind_for_the_collector(networks):
    """A cycle through the graph would hold all activations until Python looks for cycles."""
    gc.collect()
    gc.disable()
    try:
        seen = []
        (output,) = networks(torch.randn(6, 4))
        weakref.finalize(output, seen.append, "freed")
        output.sum().backward()
        del output
        assert seen
    finally:
        gc.enable()


def test_a_vector_that_changed_before_the_backward_pass_is_refused(networks):
    (output,) = networks(torch.randn(6, 4))
    with torch.no_grad():
        networks.vector.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_second_derivative_is_refused(networks):
    (output,) = networks(torch.randn(3, 4))
    with pytest.raises(ConfigError, match="mlp_kernel='torch'"):
        torch.autograd.grad(output.sum(), networks.vector, create_graph=True)


SPACES = {
    "discrete": Discrete(3, start=2),
    "box": Box(-1, 1, (2,), np.float32),
    "multi_discrete": MultiDiscrete([2, 3]),
    "multi_binary": MultiBinary(3),
}
POLICIES = {
    "tanh": {},
    "relu": {"activation": "relu", "hidden_sizes": (33, 7)},
    "no hidden layer": {"hidden_sizes": ()},
    "a shared trunk": {"trunk": "shared", "hidden_sizes": (20, 5)},
    "scaled observations": {"normalize_obs": True, "hidden_sizes": (17,)},
}


@pytest.mark.parametrize("rows", [1, 8, 32, 33, 200])
@pytest.mark.parametrize("actor_only", [False, True])
@pytest.mark.parametrize("network", POLICIES)
@pytest.mark.parametrize("space", SPACES)
def test_prepared_acting_is_acting(space, network, actor_only, rows):
    torch.manual_seed(0)
    obs_space = Box(-9, 9, (4,), np.float32)
    policy = ActorCritic(obs_space, SPACES[space], PolicyCfg(**POLICIES[network]), actor_only=actor_only)
    for parameter in policy.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    act, obs = policy.acting(), torch.randn(rows, 4)
    assert policy.has_kernel
    assert act != policy.act
    for deterministic in (False, True):
        draws = [torch.Generator().manual_seed(5) for _ in range(2)]
        found, expected = (way(obs, deterministic, g) for way, g in zip((act, policy.act), draws, strict=True))
        torch.testing.assert_close(found, expected)
        assert found.log_prob.dtype == torch.float32
        assert torch.equal(*(g.get_state() for g in draws))


def test_squashed_actions_are_drawn_in_the_latent():
    torch.manual_seed(0)
    box = Box(-1, 1, (2,), np.float32)
    policy = ActorCritic(box, box, PolicyCfg(bounded_action="squash"))
    obs = torch.randn(5, 2)
    draws = (torch.Generator().manual_seed(5) for _ in range(2))
    found, expected = (way(obs, generator=g) for way, g in zip((policy.acting(), policy.act), draws, strict=True))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("way", ["switched off", "another activation", "a custom actor", "an image", "doubles"])
def test_what_the_kernel_does_not_know_acts_by_itself(way):
    more = {
        "another activation": {"activation": "silu"},
        "switched off": {"mlp_kernel": "torch"},
        "an image": {"cnn": "small"},
    }
    space = Box(0, 255, (1, 12, 12), np.uint8) if way == "an image" else Box(-1, 1, (4,), np.float32)
    actor = torch.nn.Linear(4, 2) if way == "a custom actor" else None
    policy = ActorCritic(space, Discrete(2), PolicyCfg(**more.get(way, {})), actor=actor)
    if way == "doubles":
        policy = policy.double()
    assert policy.acting() == policy.act
    assert policy.evaluating() == policy.evaluating(torch.nn.Parameter(torch.zeros(1))) == policy.evaluate
    assert not policy.has_kernel


class Doubled(MLP):
    def forward(self, x):
        return 2 * super().forward(x)


class DoubledLinear(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


OTHERS = {
    "a network derived from ours": lambda policy: setattr(policy, "actor", Doubled(4, PolicyCfg(), 2)),
    "a layer derived from torch's": lambda policy: setattr(policy.actor, "head", DoubledLinear(64, 2)),
    "a parametrised layer": lambda policy: torch.nn.utils.parametrizations.weight_norm(policy.critic.hidden[1]),
    "no bias": lambda policy: setattr(policy.actor, "head", torch.nn.Linear(64, 2, bias=False)),
    "a layer of both networks": lambda policy: setattr(policy.critic, "hidden", policy.actor.hidden),
}


@pytest.mark.parametrize("way", OTHERS)
def test_networks_put_in_another_ones_place_compute_by_themselves(way):
    policy = ActorCritic(Box(-1, 1, (4,), np.float32), Discrete(2))
    OTHERS[way](policy)
    assert not policy.has_kernel
    assert policy.acting() == policy.act
    assert policy.evaluating() == policy.evaluate


def test_a_layer_put_in_another_ones_place_computes():
    policy, obs = ActorCritic(Box(-1, 1, (4,), np.float32), Discrete(2)), torch.randn(40, 4)
    policy.critic.head = torch.nn.Linear(64, 1)
    assert policy.has_kernel
    torch.testing.assert_close(policy.acting()(obs).value, policy.act(obs).value)


def test_what_a_subclass_does_otherwise_is_done():
    class Own(ActorCritic):
        def act(self, *args, **more):
            return super().act(*args, **more)

        def evaluate(self, batch):
            return super().evaluate(batch)

    policy = Own(Box(-1, 1, (4,), np.float32), Discrete(2))
    assert policy.acting() == policy.act
    assert policy.evaluating() == policy.evaluate


def test_who_looks_on_sees_what_is_computed():
    policy, seen = ActorCritic(Box(-1, 1, (4,), np.float32), Discrete(2)), []
    hook = policy.actor.register_forward_hook(lambda module, inputs, output: seen.append(output))
    assert not policy.has_kernel
    policy.acting()(torch.randn(3, 4))
    policy.evaluating()({"obs": torch.randn(3, 4), "action": torch.zeros(3, dtype=torch.int64)})
    assert len(seen) == 2
    hook.remove()
    assert policy.has_kernel


@pytest.mark.parametrize(
    ("space", "family"), [(Discrete(2), Categorical), (Box(-1, 1, (2,), np.float32), DiagGaussian)]
)
def test_a_head_that_draws_otherwise_is_asked(space, family):
    class Own(family):
        def sample(self, params, generator=None):
            return torch.ones_like(super().sample(params, generator))

    policy = ActorCritic(Box(-1, 1, (4,), np.float32), space)
    policy.head.__class__ = Own
    assert (policy.acting()(torch.randn(20, 4)).action == 1).all()


def test_a_policy_that_diverged_acts_without_warnings():
    policy = ActorCritic(Box(-1, 1, (4,), np.float32), Box(-1, 1, (2,), np.float32))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(3e38)
    acted = policy.acting()(torch.ones(3, 4))
    assert not acted.action.isfinite().all()


def test_drawing_from_large_logits_stays_finite():
    """The exponential of 1000 is not a number that float32 holds."""
    head = ActorCritic(Box(-1, 1, (1,), np.float32), Discrete(2)).head
    params = torch.tensor([[1000.0, 999.0]]).repeat(40, 1)
    action, log_prob = head.draw(params, torch.Generator().manual_seed(0))
    torch.testing.assert_close(log_prob, head.log_prob(params, action))
    assert log_prob.isfinite().all()


def test_a_choice_of_probability_zero_is_never_drawn():
    policy = ActorCritic(Box(-1, 1, (1,), np.float32), Discrete(3))
    params = torch.tensor([[0.0, -torch.inf, 0.5]]).repeat(60, 1)
    generator = torch.Generator().manual_seed(0)
    drawn = [policy.head.draw(params, generator) for _ in range(20)]
    assert {int(i) for action, _ in drawn for i in action} == {0, 2}
    assert all(log_prob.isfinite().all() for _, log_prob in drawn)


def test_a_copy_computes_with_its_own_weights():
    space = Box(-1, 1, (4,), np.float32)
    policy, obs = ActorCritic(space, Discrete(2)), torch.randn(3, 4)
    twin, before = copy.deepcopy(policy), policy.acting()(obs).value
    with torch.no_grad():
        twin.critic.head.bias += 1
    torch.testing.assert_close(twin.acting()(obs).value, before + 1)
    torch.testing.assert_close(policy.acting()(obs).value, before)


@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize("network", POLICIES)
@pytest.mark.parametrize("space", ["discrete", "box", "matrix"])
def test_acting_in_few_environments_gives_the_bits_of_the_general_way(space, network, rows):
    torch.manual_seed(1)
    spaces = {"discrete": Discrete(4), "box": Box(-1, 1, (3,), np.float32), "matrix": Box(-1, 1, (2, 2), np.float32)}
    policy = ActorCritic(Box(-9, 9, (4,), np.float32), spaces[space], PolicyCfg(**POLICIES[network]))
    for parameter in policy.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    if policy.obs_normalizer is not None:
        policy.obs_normalizer.absorb(3 + 2 * torch.randn(50, 4), torch.ones(50, dtype=torch.bool))
    obs = 20 * torch.randn(rows, 4)
    networks, draws = ActingNetworks(*policy._kernel_layers()), [torch.Generator().manual_seed(7) for _ in range(2)]
    found = policy.acting()(obs, generator=draws[0])
    with torch.no_grad():
        outputs, value = networks(policy.encoder(policy._normalized(obs)))
        action, log_prob = policy.head.draw(policy._with_log_std(outputs), draws[1])
    assert torch.equal(found.action, action)
    assert torch.equal(found.log_prob, log_prob)
    assert torch.equal(found.value, value[:, 0])
    assert found.action.shape == (rows, *policy.action_spec.shape)


def test_an_encoder_of_ones_own_is_asked_also_in_few_environments():
    torch.manual_seed(1)
    policy = ActorCritic(Box(-9, 9, (4,), np.float32), Discrete(2))

    class Blind(ObsEncoder):
        def forward(self, obs):
            return torch.zeros_like(super().forward(obs))

    policy.encoder = Blind(policy.observation_space, policy.cfg)
    act = policy.acting()
    assert torch.equal(act(torch.ones(3, 4)).value, act(torch.zeros(3, 4)).value)
