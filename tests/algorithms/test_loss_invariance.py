"""No split of the data changes an update, whatever the objective."""

from functools import cache, partial

import pytest
import torch
from objective_updates import EVERY, make_policy, make_rollout, parameters, same, updated
from two_ranks import on_two_ranks

from groupwise.algorithms.ppo import PPO
from groupwise.config.algorithm import ObjectiveCfg, PPOCfg


@cache
def alone(name):
    return updated(EVERY[name])


@pytest.mark.parametrize("name", EVERY)
def test_micro_batches_never_change_the_update(name):
    whole = updated(EVERY[name], minibatch_size=25, num_epochs=2)
    same(updated(EVERY[name], minibatch_size=25, num_epochs=2, micro_batch_size=9), whole)


@pytest.mark.parametrize("name", EVERY)
def test_the_order_of_rows_never_changes_the_update(name):
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    same(updated(EVERY[name], make_rollout(make_policy())[order]), alone(name))


@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_are_one_on_the_union(name):
    first, second = on_two_ranks(partial(updated, EVERY[name]), make_rollout(make_policy()), make_policy)
    assert torch.equal(first[0], second[0])
    same(first, alone(name))


@pytest.mark.parametrize("name", EVERY)
def test_a_policy_in_float64_learns_the_same(name):
    rollout = make_rollout(make_policy())
    rollout["obs"] = rollout["obs"].double()
    found, _ = updated(EVERY[name], rollout, make_policy().double())
    torch.testing.assert_close(found.float(), alone(name)[0], atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_the_random_choice_of_clip_cov_follows_the_steps_alone(seed):
    policy = make_policy()
    rollout = make_rollout(policy)
    torch.manual_seed(seed)
    rollout["reward"] = torch.where(rollout["valid"], torch.rand(rollout.shape), 0.0)
    run = partial(updated, EVERY["clip_cov"], credit={"baseline": "none", "scale": "none", "normalize": "batch"})
    expected, _ = run(rollout)
    renumbered = rollout.clone()
    renumbered["group_id"] = torch.where(rollout["valid"], 1 - rollout["group_id"], -1)
    ranks = on_two_ranks(lambda *args: run(args[0], policy=args[1], engine=args[2]), rollout, make_policy)
    for other, _ in (run(rollout[torch.randperm(8)]), run(renumbered), *ranks):
        torch.testing.assert_close(other, expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"clip"}))
def test_every_choice_makes_a_difference(name):
    assert (alone(name)[0] - alone("clip")[0]).abs().max() > 1e-5


@pytest.mark.parametrize("name", ["sapo", "vespo", "clip_cov", "token_truncate", "off_policy"])
def test_ppo_has_the_same_objectives(name):
    def run(objective, **cfg):
        torch.manual_seed(0)
        objective = ObjectiveCfg(**objective)
        settings = {"num_epochs": 3, "minibatch_size": 10_000, "learning_rate": 0.03, "normalize_advantage": "batch"}
        algorithm = PPO(PPOCfg(objective=objective, **settings | cfg), make_policy(False))
        algorithm.update(make_rollout(algorithm.policy))
        return parameters(algorithm)

    whole = run(EVERY[name])
    torch.testing.assert_close(run(EVERY[name], micro_batch_size=7), whole, atol=1e-5, rtol=1e-4)
    assert (whole - run({})).abs().max() > 1e-5
