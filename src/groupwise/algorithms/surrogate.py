"""The policy objective that ``ObjectiveCfg`` describes, per element: ratio, trust region, KL to the reference."""

import torch
from torch import Tensor

from groupwise.algorithms.configs import ObjectiveCfg
from groupwise.data.minibatch import Unit
from groupwise.functional import kl, objective
from groupwise.policies.base import Batch, Evaluation, Policy


def finest_unit(cfg: ObjectiveCfg) -> Unit:
    """What a minibatch must keep whole: an episode, where the ratio or the aggregation counts episodes."""
    by_step = cfg.ratio == "token" and cfg.aggregation == "token_mean"
    return "transition" if by_step else "episode"


def policy_ratio(cfg: ObjectiveCfg, log_prob: Tensor, batch: Batch, num_episodes: int) -> Tensor:
    """Ratio of new to old probability of each element, at the level that ``cfg.ratio`` names."""
    old = batch["old_log_prob"]
    if cfg.ratio == "token":
        return objective.token_ratio(log_prob, old)
    levels = {
        "sequence": objective.sequence_ratio,
        "sequence_token": objective.sequence_token_ratio,
        "sequence_product": objective.sequence_product_ratio,
    }
    return levels[cfg.ratio](log_prob, old, batch["loss_mask"], batch["episode_id"], num_episodes)


def policy_loss(cfg: ObjectiveCfg, ratio: Tensor, advantage: Tensor) -> Tensor:
    """Loss of each element under the trust region that ``cfg.trust_region`` names."""
    match cfg.trust_region:
        case "clip":
            return objective.clip_loss(ratio, advantage, cfg.clip_low, cfg.clip_high)
        case "dual_clip":
            return objective.dual_clip_loss(ratio, advantage, cfg.clip_low, cfg.clip_high, cfg.dual_clip)
        case "none":
            return objective.unclipped_loss(ratio, advantage)


def reference_kl(cfg: ObjectiveCfg, policy: Policy, evaluation: Evaluation, batch: Batch) -> Tensor:
    """KL of the policy to the reference at each element, by the estimator that ``cfg.kl_estimator`` names."""
    if cfg.kl_estimator == "exact":
        assert evaluation.dist is not None
        return policy.kl(evaluation.dist, batch["ref_dist"])
    estimators = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}
    return estimators[cfg.kl_estimator](evaluation.log_prob, batch["ref_log_prob"])


@torch.no_grad()
def diagnostics(cfg: ObjectiveCfg, ratio: Tensor, log_prob: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Approximate KL from the old policy, and 1.0 where the ratio stands outside the clip range, of each element."""
    outside = (ratio < 1 - cfg.clip_low) | (ratio > 1 + cfg.clip_high)
    return kl.k3(batch["old_log_prob"], log_prob), outside.to(ratio.dtype)
