"""One small update under any objective, and the objectives that are tried."""

import small_updates
import torch
from small_updates import acted, parameters

from groupwise.algorithms.grpo import GRPO
from groupwise.config.algorithm import GRPOCfg, ObjectiveCfg

ROWS, STEPS = 8, 12

CLIP_COV = {"name": "clip_cov", "fraction": 0.2, "low": 0.0, "high": 9.0}
MISMATCH = {"old_log_prob": "recomputed"}
REGIONS = {
    "clip": {},
    "clip_higher": {"trust_region": {"clip_high": 0.28}},
    "dual_clip": {"trust_region": {"name": "dual_clip", "bound": 1.3}},
    "two_sided": {"trust_region": {"name": "two_sided", "delta": 1.3}},
    "cispo_trl": {"trust_region": "cispo"},
    "cispo_verl": {"trust_region": {"name": "cispo", "low": 0.8, "high": 1.2}},
    "cispo_open": {"trust_region": {"name": "cispo", "high": None}},
    "sapo": {"trust_region": "sapo"},
    "gmpo": {"trust_region": "gmpo", "aggregation": "seq_mean_token_mean"},
    "vespo": {"trust_region": "vespo", "ratio": "sequence_product"},
    "clip_cov": {"trust_region": CLIP_COV},
    "kl_cov": {"trust_region": {"name": "kl_cov", "fraction": 0.2, "penalty": 0.5}},
    "dppo_tv": {"trust_region": {"name": "dppo", "low": 0.05, "high": 0.05}},
    "dppo_kl": {"trust_region": {"name": "dppo", "divergence": "kl", "low": 0.005, "high": 0.005, "pull": 0.1}},
    "reinforce": {"trust_region": "reinforce"},
    "none": {"trust_region": "none"},
}
OTHERS = {
    "turn": {"ratio": "turn"},
    "gspo": {"ratio": "sequence", "aggregation": "seq_mean_token_mean"},
    "gspo_token": {"ratio": "sequence_token"},
    "luspo": {"ratio": "sequence", "aggregation": "seq_mean_token_sum"},
    "constant": {"aggregation": {"name": "constant", "max_length": 12}},
    "sum_norm": {"aggregation": {"name": "seq_mean_token_sum_norm", "max_length": 120}},
    "top_entropy": {"top_entropy_quantile": 0.3},
    "token_truncate": MISMATCH | {"importance_sampling_correction": {"name": "tis", "high": 1.5}},
    "token_mask": MISMATCH | {"importance_sampling_correction": {"name": "mis", "low": 0.7, "high": 1.5}},
    "sequence_truncate": MISMATCH
    | {"importance_sampling_correction": {"name": "tis", "level": "sequence", "high": 1.5}},
    "sequence_mask": MISMATCH | {"importance_sampling_correction": {"name": "mis", "level": "sequence", "high": 2.0}},
    "off_policy": {"importance_sampling_correction": {"name": "off_policy_mask", "off_policy_mask_threshold": 0.02}},
    "everything": MISMATCH
    | {"trust_region": CLIP_COV, "top_entropy_quantile": 0.5, "ratio": "sequence_token"}
    | {"importance_sampling_correction": {"name": "mis", "off_policy_mask_threshold": 0.02}},
    "k1": {"kl_estimator": "k1"},
    "k2": {"kl_estimator": "k2"},
    "k3+": {"kl_estimator": "k3+"},
    "abs": {"kl_estimator": "abs"},
    "exact": {"kl_estimator": "exact"},
    "k3_unbiased": {"kl_estimator": "k3_unbiased"},
}
EVERY = REGIONS | OTHERS


def make_policy(actor_only=True):
    policy = small_updates.make_policy(actor_only)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5)  # fresh policies are nearly uniform
    return policy


def make_rollout(policy, mismatch=0.4, seed=0):
    """One episode of 5 to 12 steps a row in groups of 4, turns of 2 steps, and a sampler that is a little off."""
    g = torch.Generator().manual_seed(seed)
    buffer, rollout = acted(policy, ROWS, STEPS, g)
    rollout["sample_log_prob"] -= mismatch * torch.randn(ROWS, STEPS + 1, generator=g)
    fill_episodes(rollout, g)
    buffer.add(rollout)
    return rollout


def fill_episodes(rollout, generator):
    """One episode of 5 to 12 steps a row, in groups of 4, with turns of two steps."""
    rollout["turn_id"] = torch.zeros_like(rollout["step"])
    for row in range(ROWS):
        length = 5 + row
        rollout["reward"][row, :length] = torch.rand(length, generator=generator)
        rollout["valid"][row, :length] = rollout["loss_mask"][row, :length] = True
        rollout["group_id"][row, :length] = row // 4
        rollout["episode_id"][row, :length] = row
        rollout["step"][row, :length] = torch.arange(length)
        rollout["turn_id"][row, :length] = torch.arange(length) // 2
        rollout["terminated"][row, length - 1] = True


def build(objective, policy=None, engine=None, **cfg):
    """GRPO with ``objective``: fields of ``ObjectiveCfg``, and any others of ``GRPOCfg``."""
    cfg |= {name: value for name, value in objective.items() if name not in ObjectiveCfg.model_fields}
    objective = {name: value for name, value in objective.items() if name in ObjectiveCfg.model_fields}
    fixed = {"num_epochs": 4, "minibatch_size": 10_000, "learning_rate": 0.03, "max_grad_norm": None, "kl_coef": 0.1}
    fixed |= {"optimizer": {"eps": 1e-3}}  # a larger eps, so that rounding stays rounding
    algorithm = GRPO(GRPOCfg(objective=ObjectiveCfg(**objective), **fixed | cfg), policy or make_policy(), engine)
    if algorithm.reference is not None:
        move(algorithm.reference)
    return algorithm


def move(reference):
    """Move the reference off the policy: where both agree, the gradient of ``abs`` is the sign of a rounding error."""
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g).to(parameter), alpha=0.05)


def updated(objective, rollout=None, policy=None, engine=None, **cfg):
    algorithm = build(objective, policy, engine, **cfg)
    metrics = algorithm.update(make_rollout(algorithm.policy) if rollout is None else rollout)
    return parameters(algorithm), metrics


def same(one, other):
    torch.testing.assert_close(one[0], other[0], atol=2e-6, rtol=1e-5)
    assert one[1].keys() == other[1].keys()
    for name, value in one[1].items():
        torch.testing.assert_close(other[1][name], value, atol=1e-5, rtol=1e-4, msg=name)
