"""Parameters as one vector train like single ones."""

import copy

import pytest
import torch
from small_updates import build, make_policy, make_rollout

from groupwise.algorithms.base import build_optimizer
from groupwise.config.algorithm import PPOCfg
from groupwise.errors import ConfigError
from groupwise.speed.control import FlatAdam, flat_adam

FLAT = {"optimizer": flat_adam}
ADAM = {"optimizer": {"name": "adam"}, "learning_rate": 1e-2}


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
@pytest.mark.parametrize(
    "more", [{}, {"num_epochs": 3, "minibatch_size": 40, "micro_batch_size": 7, "max_grad_norm": 0.5}]
)
def test_updates_give_the_references_parameters_and_metrics(kind, more):
    reference, fast = (build(kind, fast=how, **ADAM | more) for how in ({}, FLAT))
    for seed in range(5):
        rollout = make_rollout(reference.policy, seed)
        expected, found = reference.update(rollout), fast.update(rollout)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    for one, other in zip(fast.policy.parameters(), reference.policy.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_vectors_adam_is_torchs(name):
    torch.manual_seed(0)
    settings = {"betas": (0.8, 0.99), "eps": 1e-6} | ({"weight_decay": 0.1} if name == "adamw" else {})
    algorithm = build("ppo", optimizer={"name": name, **settings}, learning_rate=0.03, fast=FLAT)
    single = copy.deepcopy(algorithm.policy)
    torchs = torch.optim.Adam(single.parameters(), lr=0.03, decoupled_weight_decay=name == "adamw", **settings)
    flat = algorithm.optimizer
    for _ in range(4):
        algorithm.optimizer.zero_grad()
        for parameter, other in zip(algorithm.policy.parameters(), single.parameters(), strict=True):
            other.grad = torch.randn_like(other)
            parameter.grad.add_(other.grad)
        algorithm.optimizer.step()
        torchs.step()
    torch.testing.assert_close(flat.vector, torch.nn.utils.parameters_to_vector(single.parameters()))


@pytest.mark.parametrize("settings", [{"name": "adam", "eps": 1e-7}, {"name": "adamw", "weight_decay": 0.1}])
def test_settings_are_those_of_torchs_adam(settings):
    cfg = PPOCfg(optimizer=settings)
    fast, torchs = (make(cfg, [torch.nn.Parameter(torch.zeros(2))]) for make in (flat_adam, build_optimizer))
    ours, theirs = ({k: v for k, v in made.param_groups[0].items() if k != "params"} for made in (fast, torchs))
    assert ours == theirs


def test_a_gradient_set_to_none_comes_back():
    algorithm = build("ppo", fast=FLAT, **ADAM)
    flat = algorithm.optimizer
    algorithm.policy.zero_grad(set_to_none=True)
    before = flat.vector.detach().clone()
    algorithm.update(make_rollout(algorithm.policy))
    assert not torch.equal(before, flat.vector)


def test_what_is_large_of_several_types_or_moved_by_another_optimiser_stays_single(monkeypatch):
    mixed = make_policy(actor_only=False)
    mixed.critic.double()
    for settings in ({"optimizer": "sgd"}, ADAM | {"policy": mixed}):
        assert not isinstance(build("ppo", fast=FLAT, **settings).optimizer, FlatAdam)
    monkeypatch.setattr("groupwise.speed.control.LIMIT", 10)
    assert not isinstance(build("ppo", fast=FLAT, **ADAM).optimizer, FlatAdam)


@pytest.mark.parametrize(
    "change",
    [
        lambda policy: policy.double().float(),
        lambda policy: policy.critic.double().float(),
        lambda policy: setattr(policy.actor.hidden[0].bias, "data", torch.ones(8)),
    ],
    ids=["the policy", "a part", "a parameter's data"],
)
def test_parameters_that_were_replaced_are_refused(change):
    """They would never be trained."""
    algorithm = build("ppo", fast=FLAT, **ADAM)
    rollout = make_rollout(algorithm.policy)
    change(algorithm.policy)
    with pytest.raises(ConfigError, match="after the algorithm was built; fix: do it before"):
        algorithm.update(rollout)


def test_loaded_weights_reach_the_vector():
    algorithm = build("ppo", fast=FLAT, **ADAM)
    flat = algorithm.optimizer
    algorithm.policy.load_state_dict({name: torch.ones_like(v) for name, v in algorithm.policy.state_dict().items()})
    assert (flat.vector == 1).all()


@pytest.mark.parametrize("first", [FLAT, {}])
def test_the_state_fits_torchs_optimiser_and_back(first):
    """So ``speed`` may change in the middle of a run."""
    one, other = build("ppo", fast=first, **ADAM), build("ppo", fast=FLAT if first == {} else {}, **ADAM)
    for seed in range(2):
        one.update(make_rollout(one.policy, seed))
    other.policy.load_state_dict(one.policy.state_dict())
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for algorithm in (one, other):
        algorithm.update(make_rollout(algorithm.policy, 2))
    for left, right in zip(one.policy.parameters(), other.policy.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6)
    fresh = build("ppo", fast=FLAT, **ADAM)
    fresh.load_state_dict(build("ppo", **ADAM).state_dict())  # before its first step torch's has none
    assert not any(value.any() for value in fresh.optimizer.state.values())


def test_the_state_of_torchs_adam_may_lack_parameters_that_had_no_gradient():
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in (2, 3, 4)]
    torchs = torch.optim.Adam(parameters, lr=0.1)
    for parameter in (parameters[0], parameters[2]):
        parameter.grad = torch.ones_like(parameter)
    torchs.step()
    flat = flat_adam(PPOCfg(optimizer={"name": "adam"}, learning_rate=0.1), parameters)
    flat.load_state_dict(torchs.state_dict())
    expected = torch.tensor([0.1] * 2 + [0.0] * 3 + [0.1] * 4)
    torch.testing.assert_close(flat.state["exp_avg"], expected)
    assert flat.state["step"] == 1
