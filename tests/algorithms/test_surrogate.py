"""Every choice of the objective through the real update: what it does, and that no split of the data changes it."""

import copy
import threading

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from groupwise.algorithms.configs import GRPOCfg, ObjectiveCfg, OptimizerCfg, PPOCfg
from groupwise.algorithms.grpo import GRPO
from groupwise.algorithms.objective_configs import EntropyCfg
from groupwise.algorithms.ppo import PPO
from groupwise.algorithms.surrogate import Counts, finest_unit, policy_loss, policy_ratio, reference_kl
from groupwise.data.rollout import RolloutBuffer
from groupwise.data.spaces import obs_spec
from groupwise.engines.base import Engine
from groupwise.errors import ConfigError, DataError
from groupwise.policies.actor_critic import ActorCritic
from groupwise.policies.base import Evaluation
from groupwise.policies.configs import PolicyCfg

OBS = gym.spaces.Box(-1, 1, (3,), np.float32)
ACT = gym.spaces.Discrete(3)
ROWS, STEPS = 8, 12

COVARIANCE = {"fraction": 0.2, "low": 0.0, "high": 9.0}
MISMATCH = {"old_log_prob": "recomputed"}
REGIONS = {
    "clip": {},
    "clip_higher": {"clip_high": 0.28},
    "dual_clip": {"trust_region": "dual_clip", "dual_clip": 1.3},
    "two_sided": {"trust_region": "two_sided", "two_sided": 1.3},
    "cispo_trl": {"trust_region": "cispo"},
    "cispo_verl": {"trust_region": "cispo", "cispo": {"low": 0.8, "high": 1.2}},
    "cispo_open": {"trust_region": "cispo", "cispo": {"high": None}},
    "sapo": {"trust_region": "sapo"},
    "gmpo": {"trust_region": "gmpo", "aggregation": "seq_mean_token_mean"},
    "vespo": {"trust_region": "vespo", "ratio": "sequence_product"},
    "clip_cov": {"trust_region": "clip_cov", "covariance": COVARIANCE},
    "kl_cov": {"trust_region": "kl_cov", "covariance": COVARIANCE | {"penalty": 0.5}},
    "dppo_tv": {"trust_region": "dppo", "dppo": {"low": 0.05, "high": 0.05}},
    "dppo_kl": {"trust_region": "dppo", "dppo": {"divergence": "kl", "low": 0.005, "high": 0.005, "pull": 0.1}},
    "reinforce": {"trust_region": "reinforce"},
    "none": {"trust_region": "none"},
}
OTHERS = {
    "turn": {"ratio": "turn"},
    "gspo": {"ratio": "sequence", "aggregation": "seq_mean_token_mean"},
    "gspo_token": {"ratio": "sequence_token"},
    "luspo": {"ratio": "sequence", "aggregation": "seq_mean_token_sum"},
    "constant": {"aggregation": "constant", "max_length": 12},
    "sum_norm": {"aggregation": "seq_mean_token_sum_norm", "max_length": 120},
    "top_entropy": {"top_entropy": 0.3},
    "token_truncate": MISMATCH | {"correction": {"weight": "token_truncate", "high": 1.5}},
    "token_mask": MISMATCH | {"correction": {"weight": "token_mask", "low": 0.7, "high": 1.5}},
    "sequence_truncate": MISMATCH | {"correction": {"weight": "sequence_truncate", "high": 1.5}},
    "sequence_mask": MISMATCH | {"correction": {"weight": "sequence_mask", "high": 2.0}},
    "off_policy": {"correction": {"off_policy_limit": 0.02}},
    "everything": MISMATCH
    | {"trust_region": "clip_cov", "covariance": COVARIANCE, "top_entropy": 0.5, "ratio": "sequence_token"}
    | {"correction": {"weight": "token_mask", "off_policy_limit": 0.02}},
    "k1": {"kl_estimator": "k1"},
    "k2": {"kl_estimator": "k2"},
    "k3+": {"kl_estimator": "k3+"},
    "abs": {"kl_estimator": "abs"},
    "exact": {"kl_estimator": "exact"},
    "kl_ratio": {"kl_weight": "ratio"},
    "kl_clamp": {"kl_clamp": 1e-4},
    "adaptive_entropy": {"entropy": {"control": "adaptive", "target": 1.0, "step": 0.05}},
}
EVERY = REGIONS | OTHERS


def make_policy(actor_only=True):
    torch.manual_seed(0)
    policy = ActorCritic(OBS, ACT, PolicyCfg(hidden_sizes=(8,)), actor_only=actor_only)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)  # fresh policies are nearly uniform
    return policy


def make_rollout(policy, mismatch=0.4):
    """One episode of 5 to 12 steps a row in groups of 4, turns of 2 steps, and a sampler that is a little off."""
    g = torch.Generator().manual_seed(0)
    buffer = RolloutBuffer(
        ROWS, STEPS, obs_spec=obs_spec(OBS), action_spec=policy.action_spec, value=not policy.actor_only
    )
    rollout = buffer.start_rollout()
    rollout["obs"].copy_(torch.rand(ROWS, STEPS + 1, 3, generator=g) * 2 - 1)
    done = policy.act(rollout["obs"].reshape(-1, 3), generator=g)
    rollout["action"].copy_(done.action.reshape(ROWS, -1))
    noise = mismatch * torch.randn(ROWS, STEPS + 1, generator=g)
    rollout["sample_log_prob"].copy_(done.log_prob.reshape(ROWS, -1) - noise)
    for row in range(ROWS):
        length = 5 + row
        rollout["reward"][row, :length] = torch.rand(length, generator=g)
        rollout["valid"][row, :length] = rollout["loss_mask"][row, :length] = True
        rollout["group_id"][row, :length] = row // 4
        rollout["episode_id"][row, :length] = row
        rollout["step"][row, :length] = torch.arange(length)
        rollout["terminated"][row, length - 1] = True
    buffer.add(rollout)
    rollout["turn_id"] = rollout["step"] // 2
    return rollout


def build(objective, policy=None, engine=None, **cfg):
    fixed = {"num_epochs": 4, "minibatch_size": 10_000, "learning_rate": 0.03, "max_grad_norm": None, "kl_coef": 0.1}
    fixed |= {"optimizer": OptimizerCfg(eps=1e-3)}  # a larger eps, so that rounding stays rounding
    return GRPO(GRPOCfg(objective=ObjectiveCfg(**objective), **fixed | cfg), policy or make_policy(), engine)


def parameters(algorithm):
    return torch.cat([p.detach().flatten() for p in algorithm.policy.parameters()])


def updated(objective, rollout=None, policy=None, engine=None, **cfg):
    algorithm = build(objective, policy, engine, **cfg)
    metrics = algorithm.update(make_rollout(algorithm.policy) if rollout is None else rollout)
    return parameters(algorithm), metrics


def same(one, other):
    torch.testing.assert_close(one[0], other[0], atol=2e-6, rtol=1e-5)
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        torch.testing.assert_close(other[1][name], value, atol=1e-5, rtol=1e-4, msg=name)


# ------------------------------------------------------------------------------------------------------ invariance


@pytest.mark.parametrize("name", EVERY)
def test_micro_batches_never_change_the_update(name):
    whole = updated(EVERY[name], minibatch_size=25, num_epochs=2)
    same(updated(EVERY[name], minibatch_size=25, num_epochs=2, micro_batch_size=4), whole)


@pytest.mark.parametrize("name", EVERY)
def test_the_order_of_rows_never_changes_the_update(name):
    rollout = make_rollout(make_policy())
    order = torch.tensor([5, 2, 7, 0, 3, 6, 1, 4])
    same(updated(EVERY[name], rollout[order]), updated(EVERY[name], rollout))


class TwoThreads(Engine):
    """One of two ranks that live in threads and add up what they hand over."""

    world_size = 2

    def __init__(self, rank, meeting, table):
        self.rank, self.meeting, self.table = rank, meeting, table

    def sum(self, tensor):
        self.table[self.rank] = tensor.detach().clone()
        self.meeting.wait(20)
        total = self.table[0] + self.table[1]
        self.meeting.wait(20)
        return total

    def sum_gradients(self, parameters):
        for parameter in parameters:
            parameter.grad.copy_(self.sum(parameter.grad))


def updated_on_two_ranks(objective, rollout):
    table, meeting, out = [None, None], threading.Barrier(2), [None, None]
    policies = [make_policy(), make_policy()]

    def work(rank):
        torch.set_num_threads(1)
        part = rollout[4 * rank : 4 * rank + 4].clone()
        for key in ("group_id", "episode_id"):
            part[key] -= torch.where(part[key] >= 0, rank * (1 if key == "group_id" else 4), 0)
        try:
            out[rank] = updated(objective, part, policies[rank], TwoThreads(rank, meeting, table))
        finally:
            meeting.abort() if out[rank] is None else None

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return out


@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_are_one_on_the_union(name):
    rollout = make_rollout(make_policy())
    first, second = updated_on_two_ranks(EVERY[name], rollout)
    assert torch.equal(first[0], second[0])
    alone = updated(EVERY[name], rollout)
    same(first, alone)


@pytest.mark.parametrize("name", sorted(set(EVERY) - {"clip"}))
def test_every_choice_makes_a_difference(name):
    plain, _ = updated({})
    assert (updated(EVERY[name])[0] - plain).abs().max() > 1e-5


# ---------------------------------------------------------------------------------------------------- at the start


@pytest.mark.parametrize("name", EVERY)
def test_the_first_minibatch_has_ratio_one_and_nothing_is_clipped(name):
    policy = make_policy()
    rollout = make_rollout(policy, mismatch=0.0)
    _, metrics = updated(EVERY[name], rollout, policy, num_epochs=1)
    assert metrics["train/clip_fraction"] == 0
    assert abs(metrics["train/approx_kl"]) < 1e-7


def made_up_batch(seed, name):
    g = torch.Generator().manual_seed(seed)
    log_prob = -torch.rand(4, 5, generator=g) * 3
    mask = torch.rand(4, 5, generator=g) < 0.8
    episode = torch.arange(4)[:, None].expand(4, 5).contiguous()
    advantage = torch.randn(4, 1 if name in ("gmpo", "gspo") else 5, generator=g).expand(4, 5).contiguous()
    batch = {"old_log_prob": log_prob.clone(), "sample_log_prob": log_prob.clone(), "loss_mask": mask}
    batch |= {"advantage": advantage, "episode_id": episode, "turn": episode * 3 + torch.arange(5) // 2}
    return log_prob, batch | {"held": torch.rand(4, 5, generator=g) < 0.5}


@settings(max_examples=10)
@given(seed=st.integers(0, 999))
@pytest.mark.parametrize("name", [*REGIONS, "gspo_token"])
def test_at_ratio_one_the_gradient_is_minus_the_advantage(name, seed):
    """Of the summed losses of an episode; element by element but for the ratio of whole episodes."""
    cfg = ObjectiveCfg(**EVERY[name])
    log_prob, batch = made_up_batch(seed, name)
    log_prob.requires_grad_()
    counts = Counts(4, 12)
    ratio = policy_ratio(cfg, log_prob, batch, counts)
    assert torch.equal(ratio, torch.ones(4, 5))
    loss = policy_loss(cfg, ratio, log_prob, batch, counts)
    loss[batch["loss_mask"]].sum().backward()
    expected = torch.where(batch["loss_mask"], -batch["advantage"], 0.0)
    torch.testing.assert_close(log_prob.grad, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "towards_gain"),
    [(n, "flat") for n in ("clip", "clip_higher", "dual_clip", "two_sided", "dppo_tv")]
    + [(n, "goes on") for n in ("none", "cispo_trl", "cispo_verl", "reinforce")],
)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_far_beyond_the_region_only_policy_gradients_go_on(name, towards_gain, advantage):
    cfg = ObjectiveCfg(**EVERY[name])
    batch = {"old_log_prob": torch.tensor([-2.0]), "sample_log_prob": torch.tensor([-2.0])}
    batch |= {
        "advantage": torch.tensor([advantage]),
        "loss_mask": torch.tensor([True]),
        "episode_id": torch.tensor([0]),
    }
    log_prob = torch.tensor([-2.0 + advantage]).requires_grad_()
    policy_loss(cfg, policy_ratio(cfg, log_prob, batch, Counts(1)), log_prob, batch, Counts(1)).sum().backward()
    if towards_gain == "flat":
        assert log_prob.grad.item() == 0
    else:
        assert -advantage * log_prob.grad.item() > 0.3


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", ["clip", "clip_higher", "two_sided", "dual_clip", "sapo", "dppo_tv", "none"])
def test_the_way_back_is_always_open(name, advantage):
    """A step that went against its advantage, by a little, has a gradient that brings it back."""
    cfg = ObjectiveCfg(**EVERY[name])
    batch = {"old_log_prob": torch.tensor([-2.0]), "sample_log_prob": torch.tensor([-2.0])}
    batch |= {
        "advantage": torch.tensor([advantage]),
        "loss_mask": torch.tensor([True]),
        "episode_id": torch.tensor([0]),
    }
    log_prob = torch.tensor([-2.0 - 0.25 * advantage]).requires_grad_()
    policy_loss(cfg, policy_ratio(cfg, log_prob, batch, Counts(1)), log_prob, batch, Counts(1)).sum().backward()
    assert -advantage * log_prob.grad.item() > 0.5


WIDE = {
    "dual_clip": {"trust_region": "dual_clip", "dual_clip": 1e6},
    "two_sided": {"trust_region": "two_sided", "two_sided": 1e6},
    "clip_cov": {"trust_region": "clip_cov", "covariance": {"low": 50.0, "high": 60.0}},
    "off_policy": {"correction": {"off_policy_limit": 50.0}},
}
UNCLIPPED = {
    "clip": {"clip_low": 50.0, "clip_high": 50.0},
    "cispo": {"trust_region": "cispo", "cispo": {"high": None}},
    "sapo": {"trust_region": "sapo", "sapo": {"positive": 1e-3, "negative": 1e-3}},
    "kl_cov": {"trust_region": "kl_cov", "covariance": {"penalty": 0.0}},
    "dppo": {"trust_region": "dppo", "dppo": {"low": 2.0, "high": 2.0, "max_ratio": None}},
}


@pytest.mark.parametrize("name", WIDE)
def test_with_wide_bounds_it_is_the_clip(name):
    torch.testing.assert_close(updated(WIDE[name])[0], updated({})[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", UNCLIPPED)
def test_with_wide_bounds_it_is_the_unclipped_gradient(name):
    expected = updated({"trust_region": "none"})[0]
    torch.testing.assert_close(updated(UNCLIPPED[name])[0], expected, atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------------------------------- what is counted, and kept


@pytest.mark.parametrize(
    ("name", "unit"),
    [(n, "transition") for n in ("clip", "cispo_trl", "clip_cov", "top_entropy", "token_mask", "sequence_mask", "sum_norm")]
    + [(n, "episode") for n in ("gmpo", "vespo", "turn", "gspo", "off_policy", "constant")],
)  # fmt: skip
def test_what_looks_at_episodes_keeps_them_whole(name, unit):
    assert finest_unit(ObjectiveCfg(**EVERY[name])) == unit


def factors(objective, rollout=None, policy=None, **cfg):
    """Factor of each step's policy loss (1 where there is none), flat over the steps that count."""
    algorithm = build(objective, policy, **cfg)
    seen = []
    weigh = algorithm._weigh
    algorithm._weigh = lambda shuffled, slices: seen.append(shuffled) or weigh(shuffled, slices)
    algorithm.update(make_rollout(algorithm.policy) if rollout is None else rollout)
    return seen[0]


def test_the_highest_entropies_alone_have_a_policy_loss():
    data = factors({"top_entropy": 0.3})
    policy = make_policy()
    entropy = policy.evaluate({"obs": data["obs"], "action": data["action"]}).entropy.detach()
    # of 5 + 6 + ... + 12 = 68 steps the quantile 0.7 stands at place 46.9: 21 steps are above
    assert data["policy_factor"].sum() == 21
    assert entropy[data["policy_factor"] == 1].min() > entropy[data["policy_factor"] == 0].max()


def test_clip_cov_leaves_out_a_random_share_that_changes_with_the_update():
    data = factors({"trust_region": "clip_cov", "covariance": {"fraction": 0.1, "low": 0.0, "high": 9.0}})
    out = data["policy_factor"] == 0
    assert out.sum() == 6  # of 68 steps
    centred = (data["advantage"] - data["advantage"].mean()) * (data["old_log_prob"] - data["old_log_prob"].mean())
    assert (centred[out] > 0).all()
    algorithm = build({"trust_region": "clip_cov", "covariance": COVARIANCE})
    rollout = make_rollout(algorithm.policy)
    data = algorithm.training_data(rollout[:, :-1])
    drawn = []
    for iteration in (0, 0, 1):
        algorithm.iteration = iteration
        more = algorithm.objective_data(
            rollout[:, :-1], data, torch.randn(ROWS, STEPS, generator=torch.Generator().manual_seed(1)), 8
        )
        drawn.append(more["policy_factor"])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_correction_weighs_by_the_mismatch_at_the_updates_start():
    objective = MISMATCH | {"correction": {"weight": "token_truncate", "high": 1.5}}
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
    nothing = MISMATCH | {"correction": {"weight": "token_mask", "low": 1e6, "high": 1e7}}
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
    with pytest.raises(DataError, match=r"needs turn_id.*mend: ratio='token'"):
        updated({"ratio": "turn"}, rollout)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("objective", "value", "gradient"),
    [
        # d = log_prob - ref_log_prob = .2, -.5; log r = .1, -.3. k3: e^-d + d - 1 = .018731, .148721, its gradient 1 - e^-d
        ({}, [0.018731, 0.148721], [0.181269, -0.648721]),
        # times r = 1.105171, .740818; the gradient is r (k3' + k3)
        ({"kl_weight": "ratio"}, [0.020701, 0.110175], [0.221034, -0.370409]),
        ({"kl_clamp": 0.1}, [0.018731, 0.1], [0.181269, 0.0]),
        ({"kl_clamp": 0.3, "kl_estimator": "k1"}, [0.2, -0.3], [1.0, 0.0]),
    ],
)
def test_the_kl_is_weighed_and_clamped_by_hand(objective, value, gradient):
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = {"ref_log_prob": torch.tensor([-1.2, -1.5]), "old_log_prob": torch.tensor([-1.1, -1.7])}
    out = reference_kl(ObjectiveCfg(**objective), make_policy(), Evaluation(log_prob, log_prob), batch)
    torch.testing.assert_close(out, torch.tensor(value), rtol=0, atol=2e-6)
    out.sum().backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor(gradient), rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"trust_region": "two_sided", "two_sided": 1.1}, "must exceed 1 \\+ clip_high = 1.2"),
        ({"trust_region": "gmpo", "ratio": "sequence"}, "gmpo averages.*mend: ratio='token'"),
        ({"trust_region": "vespo"}, "whole episodes; got ratio='token', mend: ratio='sequence_product'"),
        ({"correction": {"weight": "token_mask"}}, "mend: old_log_prob='recomputed'"),
        ({"kl_estimator": "exact", "kl_weight": "ratio"}, "mend: kl_weight='none'"),
        ({"cispo": {"low": 2.0, "high": 1.0}}, "expected low < high"),
        ({"covariance": {"low": 2.0, "high": 1.0}}, "expected low < high"),
        (MISMATCH | {"correction": {"weight": "token_mask", "low": 4.0}}, "expected low < high"),
        (MISMATCH | {"correction": {"weight": "token_truncate", "low": 0.5}}, "low=0.5 is for masks"),
        ({"entropy": {"min_coef": 2.0}}, "mend: swap them"),
        ({"top_entropy": 0.0}, "greater than 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(objective, message):
    with pytest.raises(ValidationError, match=message):
        ObjectiveCfg(**objective)


def test_what_the_policy_cannot_do_is_refused_before_the_first_rollout():
    torch.manual_seed(0)
    box = gym.spaces.Box(-1, 1, (2,), np.float32)
    policy = ActorCritic(OBS, box, PolicyCfg(hidden_sizes=(8,)), actor_only=True)
    with pytest.raises(ConfigError, match="densities; mend: 'clip'"):
        build({"trust_region": "dppo"}, policy)
    build({"trust_region": "vespo", "ratio": "sequence_product"}, policy)
    with pytest.raises(ConfigError, match=r"seq_mean_token_sum_norm.*max_length"):
        build({"aggregation": "seq_mean_token_sum_norm"})


# ----------------------------------------------------------------------------------------------------------- entropy

ADAPTIVE = {"control": "adaptive", "target": 0.5, "step": 0.1, "max_coef": 0.25}


def test_the_entropy_of_every_optimiser_step_moves_the_weight():
    # 68 steps in 4 minibatches, 2 epochs: 8 times up from 0, entropy ln 3 at most
    _, metrics = updated({"entropy": ADAPTIVE | {"target": 9.0, "step": 0.01}}, minibatch_size=17, num_epochs=2)
    assert metrics["train/ent_coef"].item() == pytest.approx(0.08)
    _, metrics = updated({"entropy": ADAPTIVE | {"target": -9.0, "step": 0.01}}, ent_coef=0.2, num_epochs=3)
    assert metrics["train/ent_coef"].item() == pytest.approx(0.17)


def test_the_bonus_keeps_the_entropy_up():
    low = updated({}, num_epochs=30)[1]["train/entropy"]
    held = updated({"entropy": ADAPTIVE | {"target": 1.05, "max_coef": 1.0}}, num_epochs=30)[1]["train/entropy"]
    assert held > low + 0.01


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_the_weight_goes_on_where_it_was(kind):
    actor_only = kind == "grpo"
    cls, cfg_cls = (GRPO, GRPOCfg) if actor_only else (PPO, PPOCfg)
    objective = ObjectiveCfg(entropy=EntropyCfg(control="adaptive", target=1.0, step=0.013))
    cfg = cfg_cls(num_epochs=3, minibatch_size=30, learning_rate=0.05, ent_coef=0.01, objective=objective)
    one = cls(cfg, make_policy(actor_only))
    rollout = make_rollout(one.policy)
    one.update(rollout)
    two = cls(cfg, copy.deepcopy(one.policy))
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    metrics = [algorithm.update(rollout) for algorithm in (one, two)]
    assert torch.equal(parameters(one), parameters(two))
    assert torch.equal(metrics[0]["train/ent_coef"], metrics[1]["train/ent_coef"])
    assert one.state_dict()["entropy"] == two.state_dict()["entropy"]


def test_adapting_needs_an_algorithm_that_measures_the_entropy():
    class Silent(GRPO):
        metric_names = ("loss",)

    objective = ObjectiveCfg(entropy=EntropyCfg(control="adaptive"))
    with pytest.raises(ConfigError, match="Silent does not measure; mend"):
        Silent(GRPOCfg(objective=objective), make_policy())


# -------------------------------------------------------------------------------------------------------------- PPO


@pytest.mark.parametrize("name", ["sapo", "vespo", "clip_cov", "token_truncate", "off_policy", "top_entropy"])
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
