"""The policy objective that ``ObjectiveCfg`` describes, per element: ratio, trust region, correction, KL to the reference.

What depends on the whole rollout (corrections, covariances, quantiles of the entropy) is computed once, at the update's
start, by ``objective_data``; the rest looks at single elements or at whole episodes. So no split changes the gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from groupwise.config.algorithm import ObjectiveCfg
from groupwise.data.minibatch import Unit
from groupwise.data.rollout import Nested, TensorSpec
from groupwise.errors import ConfigError, DataError
from groupwise.functional import correction, kl, objective, selection, trust_regions
from groupwise.functional.reduce import AllSum, local
from groupwise.lean_tensordict import TensorDict
from groupwise.policies.base import Batch, Evaluation, Policy


class Counts(NamedTuple):
    """How many ids there are, in the rollout of this rank."""

    episodes: int
    turns: int = 0
    """Ids in ``turn``; 0 unless the ratio is of turns."""


def check_objective(cfg: ObjectiveCfg, policy: Policy) -> None:
    """Refuse what cannot work with this policy.

    Raises:
        ConfigError: a divisor is missing, or probabilities are asked of a policy that has densities, or whole distributions
            of one that gives none.
    """
    if cfg.aggregation in ("constant", "seq_mean_token_sum_norm") and cfg.max_length is None:
        raise ConfigError(
            f"aggregation={cfg.aggregation!r} divides by objective.max_length, which is None; fix: set it to the longest episode"
        )
    if cfg.kl_estimator == "exact" and not policy.gives_distribution:
        raise ConfigError(
            f"kl_estimator='exact' compares whole distributions, and {type(policy).__name__} gives the probabilities of single "
            "tokens; fix: 'k3'"
        )
    spec = policy.action_spec
    if cfg.trust_region == "dppo" and isinstance(spec, TensorSpec) and spec.dtype.is_floating_point:
        raise ConfigError(
            "trust_region='dppo' compares probabilities, and this policy's continuous actions have densities; fix: 'clip'"
        )


def finest_unit(cfg: ObjectiveCfg) -> Unit:
    """What a minibatch must keep whole: an episode, where anything looks at episodes or counts them."""
    by_step = (
        cfg.ratio == "token"
        and cfg.trust_region != "gmpo"
        and cfg.correction.off_policy_limit is None
        and cfg.aggregation in ("token_mean", "seq_mean_token_sum_norm")
    )
    return "transition" if by_step else "episode"


def objective_data(
    cfg: ObjectiveCfg,
    batch: TensorDict,
    advantage: Float[Tensor, "row step"],
    mask: Bool[Tensor, "row step"],
    num_episodes: int,
    score: Callable[[], Evaluation],
    *,
    seed: int,
    single_pass: bool = False,
    all_sum: AllSum = local,
) -> dict[str, Nested]:
    """What the objective reads of each step besides the advantage, ``[N, T]``.

    Args:
        mask: steps that are trained on.
        score: what the policy says of every step at the update's start; called only if something needs it.
        seed: of this update's random choices, the same on every rank.
        single_pass: the update is one optimiser step. What the policy says in it is then what it said at the start, and a
            recomputed ``old_log_prob`` is left to it.

    Raises:
        DataError: ratios of turns, and the rollout has no ``turn_id``.
    """
    recomputed = cfg.old_log_prob == "recomputed"
    compares = cfg.correction.weight != "none" or cfg.trust_region in ("clip_cov", "kl_cov")
    left_out = recomputed and single_pass and not compares
    scores = score() if (recomputed and not left_out) or cfg.top_entropy < 1 else None
    sampled = batch["sample_log_prob"]
    old = scores.log_prob if recomputed and scores else sampled
    data: dict[str, Nested] = {} if left_out else {"old_log_prob": old}
    if cfg.trust_region == "dppo" or cfg.correction.off_policy_limit is not None:
        data["sample_log_prob"] = sampled
    if cfg.ratio == "turn":
        data["turn"] = _turns(batch)
    factors = []
    if cfg.correction.weight != "none":
        factors.append(_correction(cfg, old, batch, mask, num_episodes))
    if cfg.top_entropy < 1 and scores:
        factors.append(selection.highest(scores.entropy, cfg.top_entropy, mask, all_sum).to(old))
    if cfg.trust_region in ("clip_cov", "kl_cov"):
        held = _held_back(cfg, old, advantage, mask, batch, seed, all_sum)
        if cfg.trust_region == "clip_cov":
            factors.append((~held).to(old))
        else:
            data["held"] = held
    if factors:
        data["policy_factor"] = torch.stack(factors).prod(dim=0)
    return data


def policy_ratio(cfg: ObjectiveCfg, log_prob: Tensor, batch: Batch, counts: Counts) -> Tensor:
    """Ratio of new to old probability of each element, at the level that ``cfg.ratio`` names."""
    old, mask, episode = batch["old_log_prob"], batch["loss_mask"], batch["episode_id"]
    match cfg.ratio:
        case "token":
            return objective.token_ratio(log_prob, old)
        case "turn":
            return objective.sequence_ratio(log_prob, old, mask, batch["turn"], counts.turns)
        case "sequence":
            return objective.sequence_ratio(log_prob, old, mask, episode, counts.episodes)
        case "sequence_token":
            return objective.sequence_token_ratio(log_prob, old, mask, episode, counts.episodes)
        case "sequence_product":
            return objective.sequence_product_ratio(log_prob, old, mask, episode, counts.episodes)


def policy_loss(cfg: ObjectiveCfg, ratio: Tensor, log_prob: Tensor, batch: Batch, counts: Counts) -> Tensor:
    """Policy loss of each element: its trust region's, times what the correction and the selections leave of it."""
    loss = _trust_region_loss(cfg, ratio, log_prob, batch, counts)
    if "policy_factor" in batch:
        loss = loss * batch["policy_factor"]
    limit = cfg.correction.off_policy_limit
    if limit is None:
        return loss
    keeps = correction.off_policy_keeps(
        log_prob,
        batch["sample_log_prob"],
        batch["advantage"],
        batch["loss_mask"],
        batch["episode_id"],
        counts.episodes,
        limit,
    )
    return loss.masked_fill(~keeps, 0)


def reference_kl(cfg: ObjectiveCfg, policy: Policy, evaluation: Evaluation, batch: Batch) -> Tensor:
    """KL of the policy to the reference at each element, by the estimator that ``cfg.kl_estimator`` names."""
    if cfg.kl_estimator == "exact":
        assert evaluation.dist is not None
        distance = policy.kl(evaluation.dist, batch["ref_dist"])
    else:
        estimators = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "k3+": kl.k3_plus, "abs": kl.absolute}
        distance = estimators[cfg.kl_estimator](evaluation.log_prob, batch["ref_log_prob"])
    if cfg.kl_clamp is not None:
        distance = distance.clamp(-cfg.kl_clamp, cfg.kl_clamp)
    if cfg.kl_weight == "ratio":
        distance = distance * objective.token_ratio(evaluation.log_prob, batch["old_log_prob"])
    return distance


DIAGNOSTICS = ("approx_kl", "clip_fraction", "clip_fraction_low", "clip_fraction_high")
"""What ``diagnostics`` says, in its order."""


@torch.no_grad()
def diagnostics(cfg: ObjectiveCfg, ratio: Tensor, log_prob: Tensor, old_log_prob: Tensor) -> tuple[Tensor, ...]:
    """Approximate KL from the old policy, and 1.0 where the ratio stands outside the clip range, below, above, of each element."""
    low, high = (ratio < 1 - cfg.clip_low).to(ratio.dtype), (ratio > 1 + cfg.clip_high).to(ratio.dtype)
    return kl.k3(old_log_prob, log_prob), low + high, low, high


def _trust_region_loss(cfg: ObjectiveCfg, ratio: Tensor, log_prob: Tensor, batch: Batch, counts: Counts) -> Tensor:
    advantage, clip = batch["advantage"], (cfg.clip_low, cfg.clip_high)
    match cfg.trust_region:
        case "clip" | "clip_cov":
            return objective.clip_loss(ratio, advantage, *clip)
        case "dual_clip":
            return objective.dual_clip_loss(ratio, advantage, *clip, cfg.dual_clip)
        case "two_sided":
            return trust_regions.two_sided_loss(ratio, advantage, *clip, cfg.two_sided)
        case "cispo":
            return trust_regions.cispo_loss(log_prob, ratio, advantage, cfg.cispo.low, cfg.cispo.high)
        case "sapo":
            return trust_regions.sapo_loss(ratio, advantage, cfg.sapo.positive, cfg.sapo.negative)
        case "gmpo":
            where = batch["loss_mask"], batch["episode_id"], counts.episodes
            return trust_regions.gmpo_loss(log_prob, batch["old_log_prob"], advantage, *where, *clip)
        case "vespo":
            v = cfg.vespo
            positive, negative = (v.positive_power, v.positive_decay), (v.negative_power, v.negative_decay)
            return trust_regions.vespo_loss(log_prob, ratio, advantage, positive=positive, negative=negative)
        case "kl_cov":
            old, held = batch["old_log_prob"], batch["held"]
            return trust_regions.kl_cov_loss(log_prob, old, ratio, advantage, held, cfg.covariance.penalty)
        case "dppo":
            return _dppo_loss(cfg, ratio, log_prob, batch)
        case "reinforce":
            return trust_regions.reinforce_loss(log_prob, advantage)
        case "none":
            return objective.unclipped_loss(ratio, advantage)


def _dppo_loss(cfg: ObjectiveCfg, ratio: Tensor, log_prob: Tensor, batch: Batch) -> Tensor:
    numbers, advantage = cfg.dppo, batch["advantage"]
    keeps = trust_regions.dppo_keeps(
        log_prob, batch["sample_log_prob"], advantage, numbers.divergence, numbers.low, numbers.high
    )
    loss = trust_regions.dppo_loss(log_prob, ratio, advantage, keeps, numbers.max_ratio)
    if numbers.pull:
        loss = loss + numbers.pull * (log_prob - batch["old_log_prob"]).square()
    return loss


def _correction(cfg: ObjectiveCfg, old_log_prob: Tensor, batch: TensorDict, mask: Tensor, num_episodes: int) -> Tensor:
    """Factor of each element's policy loss for a sampler that is not the trainer."""
    level, _, form = cfg.correction.weight.partition("_")
    sampled = batch["sample_log_prob"]
    if level == "token":
        weight = correction.token_weight(old_log_prob, sampled)
    else:
        where = mask, batch["episode_id"], num_episodes
        weight = correction.sequence_weight(old_log_prob, sampled, *where)
    if form == "truncate":
        return correction.truncated(weight, cfg.correction.high)
    return correction.masked(weight, cfg.correction.low, cfg.correction.high)


def _held_back(
    cfg: ObjectiveCfg,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    batch: TensorDict,
    seed: int,
    all_sum: AllSum,
) -> Bool[Tensor, "row step"]:
    """Steps whose advantage and log-probability go together too well, by ``cfg.covariance``."""
    numbers = cfg.covariance
    together = selection.covariance(old_log_prob, advantage, mask, all_sum)
    if cfg.trust_region == "kl_cov":
        return selection.top_fraction(together, numbers.fraction, mask, all_sum)
    candidate = (together > numbers.low) & (together < numbers.high) & mask
    noise = selection.element_noise(seed, batch["sample_log_prob"], advantage, batch["step"])
    return selection.random_fraction(noise, numbers.fraction, candidate, mask, all_sum)


def _turns(batch: TensorDict) -> Tensor:
    """One id for each turn of each episode, dense in this rank's rollout; -1 outside episodes."""
    turn = batch.get("turn_id", None)
    if turn is None:
        raise DataError(
            "ratio='turn' needs turn_id in the rollout, the index of the turn within the episode; fix: ratio='token', "
            "where every step is a turn of its own"
        )
    inside = (batch["episode_id"] >= 0) & (turn >= 0)
    key = batch["episode_id"] * (int(turn.max()) + 1) + turn
    _, dense = torch.unique(torch.where(inside, key, -1), return_inverse=True)
    return torch.where(inside, dense, -1)
