"""Credit that needs more than the rollout: the policy's probabilities, the reference, what earlier rollouts scored."""

import copy

import gymnasium as gym
import objective_updates
import pytest
import torch
from small_updates import OBS

from groupwise.algorithms.grpo import GRPO
from groupwise.config.algorithm import CreditCfg, GRPOCfg
from groupwise.config.policy import PolicyCfg
from groupwise.policies.actor_critic import ActorCritic


class Watched(GRPO):
    """Keeps the advantages that the objective was given."""

    def loss_inputs(self, batch, data, advantage, num_episodes, evaluation=None):
        self.advantage = advantage.clone()
        return super().loss_inputs(batch, data, advantage, num_episodes, evaluation)


class TwiceScored(Watched):
    """Lets the objective score the policy anew."""

    def loss_inputs(self, batch, data, advantage, num_episodes, evaluation=None):
        return super().loss_inputs(batch, data, advantage, num_episodes)


def build(space=None, moved=0.0, kind=Watched, normalize_reward=False, **cfg):
    torch.manual_seed(0)
    network = PolicyCfg(hidden_sizes=(8,), normalize_reward=normalize_reward)
    policy = ActorCritic(OBS, space or gym.spaces.Discrete(3), network, actor_only=True)
    settings = {"num_epochs": 1, "minibatch_size": 10_000, "gamma": 1.0}
    algorithm = kind(GRPOCfg(**settings | cfg), policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(moved * torch.randn_like(parameter))
    return algorithm


def make_rollout(policy, seed=0):
    return objective_updates.make_rollout(policy, mismatch=0.0, seed=seed)


def episodes(rollout):
    """Row and steps of each episode."""
    return [(row, slice(0, 5 + row)) for row in range(8)]


def log_ratio(algorithm, rollout, row, span):
    batch = {key: rollout[key][row, span] for key in ("obs", "action")}
    with torch.no_grad():
        return algorithm.policy.evaluate(batch).log_prob - algorithm.reference.evaluate(batch).log_prob


def updated(algorithm, rollout):
    """The advantages of one update and its metrics; the policy stays as it was for the test to ask."""
    before = copy.deepcopy(algorithm.policy.state_dict())
    metrics = algorithm.update(rollout)
    algorithm.policy.load_state_dict(before)
    return algorithm.advantage, metrics


def test_kl_in_the_reward_is_taken_off_each_steps_reward():
    credit = CreditCfg(scale="none", kl_placement="reward")
    algorithm = build(moved=0.3, kl_coef=0.5, credit=credit, kl_estimator="k1")
    rollout = make_rollout(algorithm.policy)
    advantage, metrics = updated(algorithm, rollout)
    outcome = [float((rollout["reward"][e] - 0.5 * log_ratio(algorithm, rollout, *e)).sum()) for e in episodes(rollout)]
    plain = [float(rollout["reward"][e].sum()) for e in episodes(rollout)]
    assert max(abs(a - b) for a, b in zip(outcome, plain, strict=True)) > 0.1
    for i, e in enumerate(episodes(rollout)):
        mean = sum(outcome[4 * (i // 4) : 4 * (i // 4) + 4]) / 4
        torch.testing.assert_close(advantage[e], torch.full_like(advantage[e], outcome[i] - mean), atol=1e-5, rtol=1e-4)
    assert metrics["train/loss"] == metrics["train/policy_loss"]
    assert metrics["train/kl"] != 0


def test_kl_in_the_advantage_is_the_episodes_mean_less_each_steps():
    credit = CreditCfg(scale="none", kl_placement="advantage")
    algorithm = build(moved=0.3, kl_coef=0.5, credit=credit)
    rollout = make_rollout(algorithm.policy)
    advantage, metrics = updated(algorithm, rollout)
    plain, _ = updated(build(moved=0.3, credit=CreditCfg(scale="none")), rollout)
    for e in episodes(rollout):
        gap = -log_ratio(algorithm, rollout, *e)
        k3 = gap.exp() - gap - 1
        torch.testing.assert_close(advantage[e] - plain[e], 0.5 * (k3.mean() - k3), atol=1e-5, rtol=1e-4)
    assert (advantage - plain).abs().max() > 1e-3
    assert metrics["train/loss"] == metrics["train/policy_loss"]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "exact"])
@pytest.mark.parametrize("placement", ["reward", "advantage"])
def test_every_estimator_has_every_place(estimator, placement):
    algorithm = build(moved=0.3, kl_coef=0.5, credit=CreditCfg(kl_placement=placement), kl_estimator=estimator)
    rollout = make_rollout(algorithm.policy)
    advantage, _ = updated(algorithm, rollout)
    plain, _ = updated(build(moved=0.3), rollout)
    assert (advantage - plain).abs().max() > 1e-3
    assert not advantage[~rollout["loss_mask"][:, :-1]].any()


def test_in_the_loss_the_kl_is_a_term_of_it():
    algorithm = build(moved=0.3, kl_coef=0.5)
    rollout = make_rollout(algorithm.policy)
    advantage, metrics = updated(algorithm, rollout)
    expected = metrics["train/policy_loss"] + 0.5 * metrics["train/kl"]
    torch.testing.assert_close(metrics["train/loss"], expected)
    assert torch.equal(advantage, updated(build(moved=0.3), rollout)[0])


@pytest.mark.parametrize("placement", ["reward", "advantage"])
def test_a_weight_ratio_is_1_where_credit_is_made(placement):
    out = []
    for estimator in ("k3", "k3_unbiased"):
        algorithm = build(moved=0.3, kl_coef=0.5, credit=CreditCfg(kl_placement=placement), kl_estimator=estimator)
        out.append(updated(algorithm, make_rollout(algorithm.policy))[0])
    assert torch.equal(*out)


@pytest.mark.parametrize("credit", [{"kl_placement": "reward"}, {"kl_placement": "advantage"}])
@pytest.mark.parametrize("micro_batch_size", [None, 5])
def test_the_policy_is_scored_once_for_credit_and_objective(monkeypatch, credit, micro_batch_size):
    ends, scored = [], []
    score = GRPO.score
    monkeypatch.setattr(GRPO, "score", lambda self, policy, data: scored.append(policy) or score(self, policy, data))
    for kind in (Watched, TwiceScored):
        algorithm = build(
            moved=0.3,
            kind=kind,
            kl_coef=0.5,
            num_epochs=3,
            credit=CreditCfg(**credit),
            objective={"old_log_prob": "recomputed"},
            micro_batch_size=micro_batch_size,
        )
        scored.clear()
        metrics = algorithm.update(make_rollout(algorithm.policy))
        ends.append((scored.count(algorithm.policy), metrics, algorithm.policy.state_dict()))
    (once, metrics, state), (twice, same_metrics, same_state) = ends
    assert (once, twice) == (1, 2)
    assert metrics == same_metrics
    assert all(torch.equal(state[name], same_state[name]) for name in state)


def test_nothing_is_scored_that_nobody_asks_for(monkeypatch):
    monkeypatch.setattr(GRPO, "score", None)
    algorithm = build()
    algorithm.update(make_rollout(algorithm.policy))


def with_parts(rollout, *parts):
    rollout["reward_parts"] = torch.stack(parts, dim=-1)
    return rollout


def test_parts_come_in_the_scale_of_the_policys_rewards():
    whole, parted = (CreditCfg(scale="none", reward=reward) for reward in ("total", "parts"))
    found = {}
    for name, credit, scaled in [("total", whole, True), ("parts", parted, True), ("raw", parted, False)]:
        algorithm = build(credit=credit, normalize_reward=scaled)
        first, second = (make_rollout(algorithm.policy, seed) for seed in (0, 1))
        for rollout in (first, second):
            with_parts(rollout, rollout["reward"] * 0.25, rollout["reward"] * 0.75)
        algorithm.update(first)
        algorithm.update(second)
        found[name] = algorithm.advantage
    torch.testing.assert_close(found["parts"], found["total"], atol=1e-5, rtol=1e-4)
    assert (found["parts"] - found["raw"]).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        ({}, 1.0),
        ({"reward": "parts"}, 0.0),
        # the second part differs in no group
        ({"reward": {"name": "parts", "weights": (0.0, 1.0, 0.0)}}, 1.0),
        ({"reward": {"name": "parts", "weights": (0.0, 1.0, 2.0)}}, 0.0),
    ],
)
def test_a_group_has_variance_where_a_part_that_counts_has(credit, expected):
    algorithm = build(credit=CreditCfg(**credit), group_size=2)
    rollout = make_rollout(algorithm.policy)
    over = (rollout["terminated"] & rollout["valid"]).float()
    rollout["reward"] = over  # every episode ends with 1 in total
    gain = over * (rollout["episode_id"] % 3)
    metrics = algorithm.update(with_parts(rollout, gain, over, -gain))
    assert metrics["rollout/zero_variance_groups"] == expected
