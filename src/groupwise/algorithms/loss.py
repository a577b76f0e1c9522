"""The policy objective that ``ObjectiveCfg`` describes, per element: ratio, trust region, correction, KL to the reference.

What depends on the whole rollout (corrections, covariances, quantiles of the entropy) is computed once, at the update's
start, by ``objective_data``; the rest looks at single elements or at whole episodes. So no split changes the gradient.
The trust regions and corrections of papers are in ``recipes/``.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from tensordict import TensorDict
from torch import Tensor

from groupwise.config.objective import FixedLengthCfg, ObjectiveCfg
from groupwise.data.minibatch import Unit
from groupwise.data.rollout import Nested
from groupwise.errors import ConfigError, DataError
from groupwise.functional import kl, objective
from groupwise.functional.correction import off_policy_keeps
from groupwise.functional.reduce import AllSum, local
from groupwise.policies.base import Batch, Evaluation, Policy


class Counts(NamedTuple):
    """How many ids there are, in the rollout of this rank."""

    episodes: int
    turns: int = 0
    """Ids in ``turn``; 0 unless the ratio is of turns."""


class UpdateStart(NamedTuple):
    """What is known when an update begins."""

    batch: TensorDict | Batch
    """Transitions ``[N, T]`` of the rollout; units ``[N, T, K]`` of policies scored by ``token``, here and below."""
    advantage: Float[Tensor, "row step *unit"]
    mask: Bool[Tensor, "row step *unit"]
    """Steps that are trained on."""
    old_log_prob: Float[Tensor, "row step *unit"]
    num_episodes: int
    seed: int
    """Of this update's random choices, the same on every rank."""
    all_sum: AllSum


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
    loss = cfg.trust_region.loss(ratio, log_prob, batch, counts)
    if "policy_factor" in batch:
        loss = loss * batch["policy_factor"]
    limit = cfg.importance_sampling_correction.mask_threshold
    if limit is None:
        return loss
    where = batch["loss_mask"], batch["episode_id"], counts.episodes
    keeps = off_policy_keeps(log_prob, batch["sample_log_prob"], batch["advantage"], *where, limit)
    return loss.masked_fill(~keeps, 0)


def reference_kl(estimator: str, policy: Policy, evaluation: Evaluation, batch: Batch) -> Tensor:
    """KL of the policy to the reference at each element, by ``GRPOCfg.kl_estimator``."""
    if estimator == "exact":
        assert evaluation.dist is not None
        return policy.kl(evaluation.dist, batch["ref_dist"])
    log_prob, ref_log_prob = evaluation.log_prob, batch["ref_log_prob"]
    if estimator == "k3_unbiased":
        return kl.k3(log_prob, ref_log_prob) * objective.token_ratio(log_prob, batch["old_log_prob"])
    estimators = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3, "k3+": kl.k3_plus, "abs": kl.absolute}
    return estimators[estimator](log_prob, ref_log_prob)


DIAGNOSTICS = ("approx_kl", "clip_fraction", "clip_fraction_low", "clip_fraction_high")
"""Names of what ``diagnostics`` returns, in its order."""


@torch.no_grad()
def diagnostics(cfg: ObjectiveCfg, ratio: Tensor, log_prob: Tensor, old_log_prob: Tensor) -> tuple[Tensor, ...]:
    """Of each element: approximate KL to the old policy; 1.0 where the ratio is outside, below, above the clip range."""
    clip_low, clip_high = cfg.trust_region.clip_range
    low, high = (ratio < 1 - clip_low).to(ratio.dtype), (ratio > 1 + clip_high).to(ratio.dtype)
    return kl.k3(old_log_prob, log_prob), low + high, low, high


def objective_data(
    cfg: ObjectiveCfg,
    batch: TensorDict | Batch,
    advantage: Float[Tensor, "row step *unit"],
    mask: Bool[Tensor, "row step *unit"],
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
        score: the policy's scores of every step at the update's start; called only if something needs them.
        seed: of this update's random choices, the same on every rank.
        single_pass: the update is one optimiser step. The policy's scores in it are those at the start, and a recomputed
            ``old_log_prob`` is left to it.

    Raises:
        DataError: ratios of turns, and the rollout has no ``turn_id``.
    """
    region, correction = cfg.trust_region, cfg.importance_sampling_correction
    recomputes, sampled = cfg.old_log_prob == "recomputed", batch["sample_log_prob"]
    left_out = recomputes and single_pass and not correction.reweights and not region.needs_old_log_prob
    old = score().log_prob if recomputes and not left_out else sampled
    start = UpdateStart(batch, advantage, mask, old, num_episodes, seed, all_sum)
    data: dict[str, Nested] = {} if left_out else {"old_log_prob": old}
    if correction.mask_threshold is not None:
        data["sample_log_prob"] = sampled
    if cfg.ratio == "turn":
        data["turn"] = _turns(batch)
    data |= region.at_start(start)
    return multiplied(data, correction.factor(start)) if correction.reweights else data


def multiplied(data: dict[str, Nested], factor: Tensor) -> dict[str, Nested]:
    """``data`` with a further factor of the policy loss."""
    earlier = data.get("policy_factor")
    return data | {"policy_factor": earlier * factor if isinstance(earlier, Tensor) else factor}


def check_objective(cfg: ObjectiveCfg, policy: Policy) -> None:
    """Refuse what cannot work with this policy.

    Raises:
        ConfigError: a divisor is missing, or probabilities are asked of a policy that has densities.
    """
    if isinstance(cfg.aggregation, FixedLengthCfg) and cfg.aggregation.max_length is None:
        raise ConfigError(
            f"aggregation={cfg.aggregation.name!r} divides by its max_length, which is None; fix: set it to the longest episode"
        )
    cfg.trust_region.check_policy(policy)


def finest_unit(cfg: ObjectiveCfg) -> Unit:
    """What a minibatch must keep whole: an episode, where anything looks at episodes or counts them."""
    by_step = (
        cfg.ratio == "token"
        and not cfg.trust_region.whole_episodes
        and cfg.importance_sampling_correction.mask_threshold is None
        and not cfg.aggregation.by_episode
    )
    return "transition" if by_step else "episode"


def _turns(batch: TensorDict | Batch) -> Tensor:
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
