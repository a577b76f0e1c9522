"""Training with the MLP kernel is training layer by layer: the same rollouts, and the same parameters after 20 updates."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from small_updates import ACT, OBS, build, make_rollout

import groupwise as gw
from groupwise.data.rollout import RolloutBuffer
from groupwise.data.spaces import obs_spec
from groupwise.errors import ConfigError
from groupwise.policies.actor_critic import ActorCritic

UPDATES = 20
NETWORKS = {
    "tanh": {},
    "relu": {"activation": "relu", "hidden_sizes": (33, 7)},
    "a shared trunk": {"trunk": "shared", "hidden_sizes": (20, 5)},
    "scaled observations": {"normalize_obs": True, "hidden_sizes": (17,)},
}
SETTINGS = {
    "one minibatch": {},
    "several": {"num_epochs": 3, "minibatch_size": 40, "max_grad_norm": 0.5},
    "micro-batches": {"minibatch_size": 40, "micro_batch_size": 7},
}


def trained(kind, network, settings, kernel):
    torch.manual_seed(1)
    cfg = gw.PolicyCfg(**network, mlp_kernel=kernel)
    policy = ActorCritic(OBS, ACT, cfg, actor_only=kind == "grpo")
    algorithm = build(kind, policy=policy, optimizer={"name": "adam"}, learning_rate=1e-3, **settings)
    for seed in range(UPDATES):
        algorithm.update(make_rollout(policy, seed))
    return policy


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_parameters_after_many_updates_are_the_references(kind, network, settings):
    fast, reference = (trained(kind, NETWORKS[network], SETTINGS[settings], kernel) for kernel in ("auto", "torch"))
    for one, other in zip(fast.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


FROZEN = {
    "a layer": lambda policy: policy.actor.hidden[0],
    "a bias": lambda policy: policy.actor.hidden[0].bias,
    "the critic": lambda policy: policy.critic,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("part", FROZEN)
def test_frozen_parameters_stay_and_the_others_learn(part, when):
    ends = []
    for kernel in ("auto", "torch"):
        torch.manual_seed(1)
        policy = ActorCritic(OBS, ACT, gw.PolicyCfg(mlp_kernel=kernel))
        if when == "before":
            FROZEN[part](policy).requires_grad_(False)
        algorithm = build("ppo", policy=policy)
        FROZEN[part](policy).requires_grad_(False)
        begin = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
        algorithm.update(make_rollout(policy))
        for name, parameter in policy.named_parameters():
            assert torch.equal(parameter, begin[name]) is not parameter.requires_grad, name
        ends.append(torch.cat([parameter.detach().flatten() for parameter in policy.parameters()]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda policy: policy.double().float(),
        lambda policy: policy.critic.double().float(),
        lambda policy: policy.load_state_dict({k: v.clone() for k, v in policy.state_dict().items()}, assign=True),
        lambda policy: setattr(policy.actor.hidden[1].bias, "data", torch.ones(64)),
        lambda policy: setattr(policy.actor, "head", torch.nn.Linear(64, 3)),
    ],
    ids=["the policy converted", "a part converted", "assigned", "a parameter's data", "a layer"],
)
def test_other_parameters_than_the_algorithms_are_refused(change):
    """They would never be trained."""
    policy = ActorCritic(OBS, ACT, gw.PolicyCfg())
    algorithm, rollout = build("ppo", policy=policy), make_rollout(policy)
    change(policy)
    with pytest.raises(ConfigError, match="after the algorithm was built; fix: do it before"):
        algorithm.update(rollout)


def test_parameters_unfrozen_later_are_refused():
    policy = ActorCritic(OBS, ACT, gw.PolicyCfg())
    policy.actor.requires_grad_(False)
    algorithm = build("ppo", policy=policy)
    policy.requires_grad_(True)
    with pytest.raises(ConfigError, match="unfrozen after the algorithm was built"):
        algorithm.update(make_rollout(policy))


def test_changes_in_place_between_updates_are_seen():
    ends = []
    for kernel in ("auto", "torch"):
        torch.manual_seed(1)
        policy = ActorCritic(OBS, ACT, gw.PolicyCfg(mlp_kernel=kernel))
        algorithm = build("ppo", policy=policy)
        for seed in range(3):
            algorithm.update(make_rollout(policy, seed))
            policy.load_state_dict({name: value + 0.01 for name, value in policy.state_dict().items()})
        ends.append(torch.cat([parameter.detach().flatten() for parameter in policy.parameters()]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-5)


def test_the_deviation_of_a_gaussian_learns_beside_the_networks():
    """Its gradient is its own, theirs the vector's; with more than one micro-batch both add up."""
    ends = []
    for kernel in ("auto", "torch"):
        torch.manual_seed(1)
        space = gym.spaces.Box(-1, 1, (2,), np.float32)
        policy = ActorCritic(OBS, space, gw.PolicyCfg(mlp_kernel=kernel))
        algorithm = build("ppo", policy=policy, micro_batch_size=7, ent_coef=0.1)
        buffer = RolloutBuffer(4, 10, obs_spec=obs_spec(OBS), action_spec=policy.action_spec, value=True)
        generator, rollout = torch.Generator().manual_seed(0), buffer.start_rollout()
        rollout["obs"].copy_(torch.rand(4, 11, 3, generator=generator))
        rollout["action"].copy_(torch.randn(4, 11, 2, generator=generator))
        rollout["reward"].copy_(torch.rand(4, 11, generator=generator))
        for key in ("valid", "loss_mask"):
            rollout[key][:, :10] = True
        for key in ("episode_id", "group_id"):
            rollout[key][:, :10] = torch.arange(4).unsqueeze(1)
        rollout["truncated"][:, 9] = True
        algorithm.update(rollout)
        assert policy.log_std.detach().abs().min() > 1e-3
        ends.append(torch.cat([parameter.detach().flatten() for parameter in policy.parameters()]))
    torch.testing.assert_close(*ends, rtol=0, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_run_has_the_same_returns(tmp_path, algorithm):
    runs = [
        gw.train(
            "CartPole-v1",
            algorithm,
            policy=gw.PolicyCfg(mlp_kernel=kernel),
            total_steps=2000,
            seed=3,
            run_dir=tmp_path / kernel,
            logging={"progress": "none"},
            evaluation={"episodes": 2, "interval": 10**6},
        )
        for kernel in ("auto", "torch")
    ]
    one, other = (run.summary for run in runs)
    assert one["iterations"] == other["iterations"]
    for key in ("training_return_mean", "return_mean"):
        assert one[key] == pytest.approx(other[key], rel=1e-4)
