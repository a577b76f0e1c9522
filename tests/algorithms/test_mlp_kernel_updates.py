"""Training with the MLP kernel is training layer by layer: the same rollouts, and the same parameters after 20 updates."""

import pytest
import torch
from small_updates import ACT, OBS, build, make_rollout

import groupwise as gw
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
