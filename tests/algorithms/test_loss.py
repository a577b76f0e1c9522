"""What an objective counts, keeps and refuses."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from objective_updates import (
    CLIP_COV,
    EVERY,
    MISMATCH,
    ROWS,
    STEPS,
    build,
    make_policy,
    make_rollout,
    parameters,
    updated,
)
from small_updates import OBS

from groupwise.algorithms.losses import (
    LOSSES,
    Counts,
    UpdateStart,
    finest_item,
    multiplied,
    objective_data,
    policy_loss,
    reference_kl,
)
from groupwise.config.algorithm import ObjectiveCfg
from groupwise.config.policy import PolicyCfg
from groupwise.errors import ConfigError, DataError
from groupwise.functional.reduce import local
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.base import Evaluation


@pytest.mark.parametrize(
    ("name", "unit"),
    [(n, "transition") for n in ("clip", "cispo_trl", "clip_cov", "token_mask", "sequence_mask", "sum_norm")]
    + [(n, "episode") for n in ("gmpo", "vespo", "turn", "gspo", "off_policy", "constant")],
)  # fmt: skip
def test_what_looks_at_episodes_keeps_them_whole(name, unit):
    assert finest_item(ObjectiveCfg(**EVERY[name])) == unit


@pytest.mark.parametrize(("region", "unit"), [("clip", "transition"), ("gmpo", "episode")])
def test_a_loss_of_whole_episodes_keeps_them_whole_under_any_aggregation(region, unit):
    assert finest_item(ObjectiveCfg(trust_region=region, aggregation="token_mean")) == unit


def factors(objective, rollout=None, policy=None, **cfg):
    """Factor of each step's policy loss (1 where there is none), flat over the steps that count."""
    algorithm = build(objective, policy, **cfg)
    seen = []
    algorithm.prepare = lambda elements, minibatch, count: seen.append(elements) or elements
    algorithm.update(make_rollout(algorithm.policy) if rollout is None else rollout)
    return seen[0]


def test_the_highest_entropies_alone_have_a_policy_loss():
    data = factors({"top_entropy_quantile": 0.3})
    policy = make_policy()
    entropy = policy.evaluate({"obs": data["obs"], "action": data["action"]}).entropy.detach()
    # of 5 + 6 + ... + 12 = 68 steps the quantile 0.7 stands at place 46.9: 21 steps are above
    assert data["policy_factor"].sum() == 21
    assert entropy[data["policy_factor"] == 1].min() > entropy[data["policy_factor"] == 0].max()


def test_clip_cov_leaves_out_a_random_share_that_changes_with_the_update():
    data = factors({"trust_region": CLIP_COV | {"fraction": 0.1}})
    out = data["chosen"]
    assert out.sum() == 6  # of 68 steps
    centred = (data["advantage"] - data["advantage"].mean()) * (data["old_log_prob"] - data["old_log_prob"].mean())
    assert (centred[out] > 0).all()
    algorithm = build({"trust_region": CLIP_COV})
    rollout = make_rollout(algorithm.policy)
    data = algorithm.policy_inputs(rollout[:, :-1])
    drawn = []
    for iteration in (0, 0, 1):
        algorithm.iteration = iteration
        more = algorithm.loss_inputs(
            rollout[:, :-1], data, torch.randn(ROWS, STEPS, generator=torch.Generator().manual_seed(1)), 8
        )
        drawn.append(more["chosen"])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("size", [(), (2,)])
def test_clip_cov_tells_steps_of_one_probability_apart_by_their_actions(size):
    advantage, mask = torch.tensor([[1.0] * 16, [-1.0] * 16]), torch.ones(2, 16).bool()
    action = torch.arange(32 * math.prod(size)).view(2, 16, *size)
    batch = {"action": action, "step": torch.zeros(2, 16).long(), "sample_log_prob": torch.zeros(2, 16)}
    old = torch.tensor([[-1.0] * 16, [-3.0] * 16])
    start = UpdateStart(batch, advantage, mask, old, 2, 7, local)
    assert LOSSES["clip_cov"].select(start, fraction=0.25, low=0.0, high=9.0).sum() == 8


def test_correction_weighs_by_the_mismatch_at_the_updates_start():
    objective = MISMATCH | {"importance_sampling_correction": {"name": "tis", "high": 1.5}}
    policy = make_policy()
    rollout = make_rollout(policy)
    data = factors(objective, rollout, policy)
    start = make_policy().evaluate({"obs": data["obs"], "action": data["action"]}).log_prob.detach()
    torch.testing.assert_close(data["old_log_prob"], start)
    sampled = rollout["sample_log_prob"][:, :-1][rollout["loss_mask"][:, :-1]]
    torch.testing.assert_close(data["policy_factor"], (start - sampled).exp().clamp(max=1.5))
    assert 0 < (data["policy_factor"] == 1.5).sum() < 30


def test_the_kl_has_its_own_way_through_factors_of_zero():
    # a mask that nothing passes leaves the pull to the reference alone
    nothing = MISMATCH | {"importance_sampling_correction": {"name": "mis", "low": 1e6, "high": 1e7}}
    policy = make_policy()
    start = parameters(build({}, make_policy()))
    alone, metrics = updated(nothing, policy=policy, kl_coef=0.0)
    assert torch.equal(alone, start)
    assert metrics["train/policy_loss"] == 0
    algorithm = build(nothing)
    with torch.no_grad():
        for p in algorithm.policy.parameters():
            p.mul_(2)
    algorithm.update(make_rollout(algorithm.policy))
    assert (parameters(algorithm) - 2 * start).abs().max() > 1e-3


def test_turns_are_those_of_the_rollout():
    rollout = make_rollout(make_policy())
    single = rollout.clone()
    single["turn_id"] = single["step"].clone()
    whole = rollout.clone()
    whole["turn_id"] = torch.zeros_like(whole["step"])
    turns = {name: updated({"ratio": "turn"}, r)[0] for name, r in [("two", rollout), ("one", single), ("all", whole)]}
    torch.testing.assert_close(turns["one"], updated({}, rollout)[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(turns["all"], updated({"ratio": "sequence"}, rollout)[0], atol=1e-6, rtol=1e-5)
    assert (turns["two"] - turns["one"]).abs().max() > 1e-5
    del rollout["turn_id"]
    with pytest.raises(DataError, match=r"needs turn_id.*fix: ratio='token'"):
        updated({"ratio": "turn"}, rollout)


def test_each_turn_of_each_episode_has_an_id():
    # outside are a step of no turn, one of no episode, and one of neither
    episode, turn = torch.tensor([[0, 0, 0, 1], [1, 1, -1, -1]]), torch.tensor([[0, -1, 1, 0], [0, 2, 0, -1]])
    start = start_of(torch.zeros(2, 4), {"episode_id": episode, "turn_id": turn})
    data = objective_data(ObjectiveCfg(ratio="turn"), start, pytest.fail, pytest.fail)
    assert data["turn"].tolist() == [[1, -1, 2, 3], [3, 4, -1, -1]]


def start_of(old_log_prob, batch):
    """An update's start, whose steps all count."""
    ones = torch.ones_like(old_log_prob)
    return UpdateStart(batch, ones, ones.bool(), old_log_prob, 2, 0, local)


@pytest.mark.parametrize(
    ("objective", "kept"),
    [
        ({}, False),
        ({"trust_region": "dppo"}, True),
        ({"importance_sampling_correction": "off_policy_mask"}, True),
        (
            {"importance_sampling_correction": {"name": "off_policy_mask", "off_policy_mask_threshold": None}},
            False,
        ),
    ],
)
def test_the_samplers_log_probabilities_are_kept_where_the_loss_reads_them(objective, kept):
    cfg, start = ObjectiveCfg(old_log_prob="recomputed", **objective), start_of(torch.tensor([[-1.0, -2.0]]), {})
    now = torch.tensor([[-1.5, -2.5]])
    data = objective_data(cfg, start, lambda: Evaluation(now, now), lambda: False)
    assert torch.equal(data["old_log_prob"], now)
    assert ("sample_log_prob" in data) == kept
    if kept:
        assert torch.equal(data["sample_log_prob"], start.old_log_prob)


@pytest.mark.parametrize(
    ("objective", "scored"),
    [
        ({}, False),
        ({"importance_sampling_correction": "off_policy_mask"}, False),
        ({"importance_sampling_correction": "tis"}, True),
        ({"trust_region": "kl_cov"}, True),
        ({"trust_region": CLIP_COV}, True),
    ],
)
def test_what_reads_the_start_of_a_single_step_has_it_scored(objective, scored):
    cfg = ObjectiveCfg(old_log_prob="recomputed", **objective)
    batch = {"sample_log_prob": torch.tensor([[-1.0, -2.0]]), "step": torch.tensor([[0, 1]])}
    start = start_of(batch["sample_log_prob"], batch | {"action": torch.tensor([[0, 1]])})
    now = torch.tensor([[-1.5, -2.5]])
    data = objective_data(cfg, start, lambda: Evaluation(now, now), lambda: True)
    assert ("old_log_prob" in data) == scored
    if scored:
        assert torch.equal(data["old_log_prob"], now)


def test_factors_of_the_policy_loss_are_multiplied():
    one = multiplied({}, torch.tensor([2.0, 0.0]))
    assert multiplied(one, torch.tensor([3.0, 5.0]))["policy_factor"].tolist() == [6.0, 0.0]


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # d = log_prob - ref_log_prob = .2, -.5; log r = .1, -.3. k3: e^-d + d - 1 = .018731, .148721, its gradient 1 - e^-d
        ("k3", [0.018731, 0.148721], [0.181269, -0.648721]),
        # times r = 1.105171, .740818; the gradient is r (k3' + k3)
        ("k3_unbiased", [0.020701, 0.110175], [0.221034, -0.370409]),
        ("k1", [0.2, -0.5], [1.0, 1.0]),
    ],
)
def test_the_kl_by_hand(estimator, value, gradient):
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = {"ref_log_prob": torch.tensor([-1.2, -1.5]), "old_log_prob": torch.tensor([-1.1, -1.7])}
    out = reference_kl(estimator, make_policy(), Evaluation(log_prob, log_prob), batch)
    torch.testing.assert_close(out, torch.tensor(value), rtol=0, atol=2e-6)
    out.sum().backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor(gradient), rtol=0, atol=2e-6)


def test_the_exact_kl_is_that_of_the_policy_to_the_reference():
    # p = (1/2, 1/2, 0), q = (3/4, 1/4, 0): .5 log(2/3) + .5 log 2; the other way round it would be 0.130812
    p, q = torch.tensor([[0.5, 0.5, 1e-30]]).log(), torch.tensor([[0.75, 0.25, 1e-30]]).log()
    nothing = torch.zeros(1)
    out = reference_kl("exact", make_policy(), Evaluation(nothing, nothing, dist=p), {"ref_dist": q})
    torch.testing.assert_close(out, torch.tensor([0.143841]), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"trust_region": {"name": "two_sided", "delta": 1.1}}, "must exceed 1 \\+ clip_high = 1.2"),
        (
            {"trust_region": "gmpo", "ratio": "sequence"},
            "trust_region='gmpo' excludes ratio='sequence'; fix: ratio='token'",
        ),
        ({"trust_region": "vespo"}, "excludes ratio='token'; fix: ratio='sequence_product'"),
        ({"importance_sampling_correction": "mis"}, "fix: old_log_prob='recomputed'"),
        ({"trust_region": {"name": "cispo", "low": 2.0, "high": 1.0}}, "expected low < high"),
        ({"trust_region": {"name": "cispo", "low": 1.0, "high": 1.0}}, "expected low < high"),
        ({"trust_region": CLIP_COV | {"low": 2.0, "high": 1.0}}, "expected low < high"),
        (MISMATCH | {"importance_sampling_correction": {"name": "mis", "low": 4.0}}, "expected low < high"),
        (
            MISMATCH | {"importance_sampling_correction": {"name": "tis", "low": 0.5}},
            "importance_sampling_correction: unknown key 'low'",
        ),
        ({"top_entropy_quantile": 0.0}, "greater than 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(objective, message):
    with pytest.raises(ConfigError, match=message):
        build(objective)


@pytest.mark.parametrize(
    "region",
    [
        {"name": "cispo", "low": 0.8, "high": None},
        {"name": "cispo", "low": None, "high": 0.5},
        {"name": "two_sided", "clip_high": {"start": 0.2, "end": 0.4}, "delta": 1.5},
    ],
)
def test_settings_that_do_not_contradict_each_other_are_taken(region):
    build({"trust_region": region})


@pytest.mark.parametrize("clip_high", [{"start": 0.2, "end": 0.4}, {"start": 0.4, "end": 0.2}])
def test_the_bound_must_exceed_the_clip_at_all_times(clip_high):
    with pytest.raises(ConfigError, match=r"must exceed 1 \+ clip_high = 1.4"):
        build({"trust_region": {"name": "two_sided", "clip_high": clip_high, "delta": 1.3}})


def test_what_the_policy_cannot_do_is_refused_before_the_first_rollout():
    torch.manual_seed(0)
    box = gym.spaces.Box(-1, 1, (2,), np.float32)
    policy = ActorCritic(OBS, box, PolicyCfg(hidden_sizes=(8,)), actor_only=True)
    with pytest.raises(ConfigError, match="densities; fix: 'clip'"):
        build({"trust_region": "dppo"}, policy)
    build({"trust_region": "vespo", "ratio": "sequence_product"}, policy)
    with pytest.raises(ConfigError, match=r"seq_mean_token_sum_norm.*max_length"):
        build({"aggregation": "seq_mean_token_sum_norm"})


@pytest.mark.parametrize(
    ("region", "below", "above"),
    [
        ({"name": "clip", "clip_low": 0.4, "clip_high": 0.4}, [False, False], [True, True]),
        ({"name": "gmpo", "clip_low": 0.4, "clip_high": 0.4}, [True, False], [False, True]),  # at 0.670 and 1.492
        ({"name": "reinforce"}, [True, True], [True, True]),  # at 0.8 and 1.2
    ],
)
def test_steps_count_as_clipped_where_the_trust_region_clips(region, below, above):
    ratio, ones = torch.tensor([0.65, 0.69, 1.45, 1.52]), torch.ones(4)
    batch = {"old_log_prob": torch.zeros(4), "advantage": ones, "loss_mask": ones.bool(), "episode_id": torch.arange(4)}
    _, (_, clipped, low, high) = policy_loss(ObjectiveCfg(trust_region=region), ratio.log(), batch, Counts(4))
    assert low.bool().tolist() == [*below, False, False]
    assert high.bool().tolist() == [False, False, *above]
    assert torch.equal(clipped, low + high)
