"""Decisions of several units: a probability ratio for each, advantages for all of them together."""

from functools import partial

import gymnasium as gym
import numpy as np
import objective_updates
import pytest
import torch
from objective_updates import EVERY, ROWS, STEPS, fill_episodes, parameters, same
from small_updates import OBS
from two_ranks import on_two_ranks

from groupwise.algorithms.base import BaseAlgorithm
from groupwise.algorithms.grpo import GRPO
from groupwise.algorithms.ppo import PPO
from groupwise.config.algorithm import GRPOCfg, ObjectiveCfg, PPOCfg
from groupwise.config.policy import PolicyCfg
from groupwise.data.rollout import RolloutBuffer
from groupwise.data.spaces import obs_spec
from groupwise.embodied.vla import ChunkActorCritic
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.base import Evaluation

C, A = 3, 2
CHUNKS = gym.spaces.Box(-1, 1, (C, A), np.float32)
NOT_FOR_DENSITIES = ("dppo_tv", "dppo_kl")
UNITS = {name: objective for name, objective in EVERY.items() if name not in NOT_FOR_DENSITIES}


class OneUnit(ActorCritic):
    """Decisions of one unit each."""

    scored_by = "token"

    def act(self, obs, deterministic=False, generator=None):
        action = super().act(obs, deterministic, generator)
        return action._replace(log_prob=action.log_prob.unsqueeze(-1))

    def evaluate(self, batch):
        log_prob, entropy, value, dist = super().evaluate(batch)
        return Evaluation(log_prob[:, None], entropy[:, None], value, dist[:, None])

    def unit_mask(self, batch):
        return torch.ones_like(batch["loss_mask"]).unsqueeze(-1)


def of_one_unit(actor_only=True):
    """A policy, and a rollout of it."""
    policy = objective_updates.make_policy(actor_only)
    rollout = objective_updates.make_rollout(objective_updates.make_policy(actor_only))
    rollout["sample_log_prob"] = rollout["sample_log_prob"].unsqueeze(-1)
    policy.__class__ = OneUnit
    return policy, rollout


def chunk_policy(actor_only=True):
    torch.manual_seed(0)
    policy = ChunkActorCritic(OBS, CHUNKS, PolicyCfg(hidden_sizes=(8,)), actor_only=actor_only)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return policy


def chunk_rollout(policy, mismatch=0.3):
    """One episode of 5 to 12 decisions a row in groups of 4; the last decision executes 1, 2 or all 3 actions."""
    g = torch.Generator().manual_seed(0)
    spec = policy.action_spec
    sizes = {"num_units": C, "chunked": True, "value": not policy.actor_only}
    buffer = RolloutBuffer(ROWS, STEPS, obs_spec=obs_spec(OBS), action_spec=spec, **sizes)
    rollout = buffer.start_rollout()
    rollout["obs"].copy_(torch.rand(ROWS, STEPS + 1, 3, generator=g) * 2 - 1)
    done = policy.act(rollout["obs"].reshape(-1, 3), generator=g)
    rollout["action"].copy_(done.action.reshape(ROWS, STEPS + 1, C, A))
    noise = mismatch * torch.randn(ROWS, STEPS + 1, C, generator=g)
    rollout["sample_log_prob"].copy_(done.log_prob.reshape(ROWS, STEPS + 1, C) - noise)
    if not policy.actor_only:
        rollout["value"].copy_(done.value.reshape(ROWS, STEPS + 1))
        rollout["next_value"][:, :-1] = rollout["value"][:, 1:]
    fill_episodes(rollout, g)
    rollout["executed"][:, :-1] = rollout["valid"][:, :-1] * C
    row, last = rollout["terminated"].nonzero().T
    rollout["executed"][row, last] = row % C + 1
    buffer.add(rollout)
    return rollout


def updated(objective, rollout=None, policy=None, engine=None, **cfg):
    policy = policy or chunk_policy()
    algorithm = objective_updates.build(objective, policy, engine, **cfg)
    metrics = algorithm.update(chunk_rollout(chunk_policy()) if rollout is None else rollout)
    return parameters(algorithm), metrics


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_decisions_of_one_unit_are_transitions_bit_for_bit(name):
    cfg = {"minibatch_size": 25, "num_epochs": 2, "micro_batch_size": 9}
    policy, rollout = of_one_unit()
    equal(objective_updates.updated(EVERY[name], rollout, policy, **cfg), objective_updates.updated(EVERY[name], **cfg))


def equal(found, expected):
    assert torch.equal(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    assert all(found[1][key] == value for key, value in expected[1].items())


@pytest.mark.parametrize("normalize_advantage", ["none", "batch", "minibatch"])
def test_ppo_on_decisions_of_one_unit_is_ppo_bit_for_bit(normalize_advantage):
    def run(policy, rollout):
        cfg = PPOCfg(minibatch_size=25, num_epochs=2, normalize_advantage=normalize_advantage, clip_range_vf=0.2)
        algorithm = PPO(cfg, policy)
        return parameters(algorithm), algorithm.update(rollout)

    plain = objective_updates.make_rollout(objective_updates.make_policy(False))
    equal(run(*of_one_unit(False)), run(objective_updates.make_policy(False), plain))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["clip", "clip_cov", "everything", "gmpo", "gspo", "sequence_mask", "sum_norm", "top_entropy"]
)
def test_micro_batches_never_change_the_update(name):
    whole = updated(UNITS[name], minibatch_size=25, num_epochs=2)
    same(updated(UNITS[name], minibatch_size=25, num_epochs=2, micro_batch_size=9), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNITS)
def test_two_ranks_are_one_on_the_union(name):
    first, second = on_two_ranks(partial(updated, UNITS[name]), chunk_rollout(chunk_policy()), chunk_policy)
    assert torch.equal(first[0], second[0])
    same(first, updated(UNITS[name]))


@pytest.mark.parametrize("objective", [{}, {"ratio": "sequence"}, {"ratio": "sequence_product"}])
def test_the_ratio_is_one_at_the_start_and_minibatches_count_decisions(objective):
    rollout = chunk_rollout(chunk_policy(), mismatch=0)
    cfg = {"num_epochs": 1, "minibatch_size": None, "max_grad_norm": None}
    algorithm = GRPO(GRPOCfg(objective=ObjectiveCfg(**objective), **cfg), chunk_policy())
    metrics = algorithm.update(rollout)
    assert metrics["train/clip_fraction"] == 0
    assert abs(metrics["train/approx_kl"]) < 1e-10
    quarter = int(rollout["loss_mask"].sum()) // 4
    metrics = GRPO(GRPOCfg(num_epochs=1, minibatch_size=quarter), chunk_policy()).update(rollout)
    assert metrics["train/optimizer_steps"] == 4


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_what_was_not_executed_changes_nothing(kind):
    """Neither its log-probability when sampled nor the action itself."""

    def run(rollout):
        policy = chunk_policy(actor_only=kind == "grpo")
        cfg = {"num_epochs": 3, "minibatch_size": 20, "ent_coef": 0.1, "clip_coef": 0.1}
        algorithm = GRPO(GRPOCfg(kl_coef=0.1, **cfg), policy) if kind == "grpo" else PPO(PPOCfg(**cfg), policy)
        metrics = algorithm.update(rollout)
        return parameters(algorithm), metrics

    rollout = chunk_rollout(chunk_policy(actor_only=kind == "grpo"))
    other = rollout.clone()
    skipped = torch.arange(C) >= other["executed"].unsqueeze(-1)
    other["sample_log_prob"][skipped] += 3.0
    other["action"][skipped] += 0.7
    same(run(other), run(rollout))
    changed = rollout.clone()
    changed["action"][0, 0, 0] += 0.7
    assert (run(changed)[0] - run(rollout)[0]).abs().max() > 1e-4


def test_actions_that_are_never_executed_get_no_gradient():
    rollout = chunk_rollout(chunk_policy())
    rollout["executed"].clamp_(max=1)
    policy = chunk_policy()
    before = policy.log_std.detach().clone()
    GRPO(GRPOCfg(num_epochs=2, minibatch_size=20, ent_coef=0.1), policy).update(rollout)
    moved = (policy.log_std.detach() - before).reshape(C, A) != 0
    assert moved.tolist() == [[True, True], [False, False], [False, False]]


def test_weights_are_those_of_units():
    """Two decisions with 3 and 1 executed actions: each of the 4 units weighs a quarter, by hand."""
    policy = chunk_policy()
    rollout = chunk_rollout(policy, mismatch=0)[:2, :2].clone()
    for key in ("valid", "loss_mask"):
        rollout[key][:] = torch.tensor([True, False])
    rollout["episode_id"][:, 0] = torch.tensor([0, 1])
    rollout["executed"][:, 0] = torch.tensor([3, 1])
    rollout["reward"][:, 0] = torch.tensor([1.0, 0.0])
    credit = {"group_key": "group", "returns": "outcome", "baseline": "mean", "scale": "none"}
    algorithm = GRPO(GRPOCfg(credit=credit, num_epochs=1, minibatch_size=None, learning_rate=1e-9), policy)
    metrics = algorithm.update(rollout)
    # advantages +1/2 and -1/2, ratio 1: the loss is -(3 * 1/2 - 1 * 1/2) / 4
    assert float(metrics["train/policy_loss"]) == pytest.approx(-0.25)


def test_the_kl_of_a_decision_in_its_reward_is_the_sum_over_its_executed_units():
    """By hand: k1 is log p - log p_ref, and the reference lacks a shift of the standard deviations."""
    rollout = chunk_rollout(chunk_policy(), mismatch=0)
    credit = {"kl_placement": "reward", "group_key": "group", "returns": "outcome", "baseline": "mean", "scale": "none"}
    algorithm = GRPO(GRPOCfg(kl_coef=1.0, kl_estimator="k1", credit=credit), chunk_policy())
    with torch.no_grad():
        algorithm.policy.log_std += 0.1
    seen = []
    algorithm.optimize = lambda data, num_episodes, also: seen.append(data) or {}
    algorithm.update(rollout)
    policies = algorithm.policy, algorithm.reference
    scores = []
    for row in range(4):
        steps = slice(0, 5 + row)
        batch = {"obs": rollout["obs"][row, steps], "action": rollout["action"][row, steps]}
        new, old = (policy.evaluate(batch).log_prob.detach() for policy in policies)
        executed = torch.arange(C) < rollout["executed"][row, steps, None]
        scores.append(rollout["reward"][row, steps].sum() - (new - old)[executed].sum())
    scores = torch.stack(scores)
    torch.testing.assert_close(seen[0]["advantage"][:4, 0, 0], scores - scores.mean())


def test_the_log_probability_of_a_chunk_is_the_sum_over_its_independent_dimensions():
    policy = chunk_policy()
    obs = torch.rand(5, 3)
    action = policy.act(obs, generator=torch.Generator().manual_seed(1))
    assert action.log_prob.shape == (5, C)
    assert action.action.shape == (5, C, A)
    joint = ActorCritic(OBS, CHUNKS, policy.cfg, actor_only=True)
    joint.load_state_dict(policy.state_dict())
    scores = joint.evaluate({"obs": obs, "action": action.action})
    torch.testing.assert_close(action.log_prob.sum(dim=1), scores.log_prob)
    mine = policy.evaluate({"obs": obs, "action": action.action})
    torch.testing.assert_close(mine.log_prob, action.log_prob)
    torch.testing.assert_close(mine.entropy.sum(dim=1), scores.entropy)
    mean, log_std = mine.dist.chunk(2, dim=-1)
    single = torch.distributions.Normal(mean, log_std.exp())
    torch.testing.assert_close(single.log_prob(action.action).sum(dim=-1), mine.log_prob)


def test_smaller_micro_batches_are_counted_in_decisions(monkeypatch, caplog):
    algorithm = objective_updates.build({}, chunk_policy())
    rollout, backward, sizes = chunk_rollout(chunk_policy()), BaseAlgorithm.backward, []

    def limited(self, batch):
        sizes.append(len(batch["loss_mask"]))
        if len(sizes) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return backward(self, batch)

    monkeypatch.setattr(BaseAlgorithm, "backward", limited)
    algorithm.update(rollout)
    assert f"fix: algorithm.micro_batch_size={-(-sizes[0] // 2)}" in caplog.messages[0]
