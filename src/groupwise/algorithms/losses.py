"""The policy loss of a step: probability ratio, trust region, correction of the sampler, KL to a reference; and the value loss.

    r = exp(log_prob - old_log_prob), of the step or its episode      A = advantage      sg = stop gradient

A trust region is one function: it takes ``LossInputs`` and its own settings, and returns the loss of each step.
``{"name": "cispo", "high": 5.0}`` in a configuration calls ``cispo(x, high=5.0)``: the signature is the settings, with their
types, bounds and defaults, and their texts stand under ``Args:``. Nothing is averaged here; ``loss_weights`` does that.

Data that depend on the whole rollout (corrections, covariances, quantiles of the entropy) are computed once, at the
update's start, by ``objective_data``; the rest looks at single elements or whole episodes. So no split changes the gradient.
Unless stated otherwise, a loss has the gradient ``-A`` with respect to ``log_prob`` at ratio 1.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch
from annotated_types import Gt
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import mse_loss

from groupwise.config.algorithm import (
    CorrectionCfg,
    FixedLengthCfg,
    LinearRangeCfg,
    ObjectiveCfg,
    TrustRegionCfg,
    range_at,
)
from groupwise.config.base import Fraction, NonNegative, Positive, settings_of
from groupwise.data.minibatch import Item
from groupwise.data.rollout import Nested, TensorDict, TensorSpec, leaves
from groupwise.errors import ConfigError, DataError, require_name
from groupwise.functional.reduce import (
    AllSum,
    covariance,
    element_noise,
    gather_segments,
    random_fraction,
    segment_mean,
    segment_sum,
    top_fraction,
)
from groupwise.policies.base import Batch, Evaluation, Policy


class Counts(NamedTuple):
    """How many ids there are, in the rollout of this rank."""

    episodes: int
    turns: int = 0
    """Ids in ``turn``; 0 unless the ratio is of turns."""


class LossInputs(NamedTuple):
    """Inputs of a trust region, of each step, [B] or [B, T]. Only ``log_prob`` and ``ratio`` carry a gradient."""

    log_prob: Float[Tensor, "*batch"]
    """Log-probability under the policy that is trained."""
    old_log_prob: Float[Tensor, "*batch"]
    """Log-probability under the policy at the update's start."""
    sample_log_prob: Float[Tensor, "*batch"]
    """Log-probability that the sampler reported where the update keeps it, as with ``reads_sampler``; otherwise ``old_log_prob``."""
    ratio: Float[Tensor, "*batch"]
    """Probability ratio at the level of ``objective.ratio``."""
    advantage: Float[Tensor, "*batch"]
    mask: Bool[Tensor, "*batch"]
    """Steps that count."""
    episode_id: Int[Tensor, "*batch"]
    num_episodes: int
    chosen: Bool[Tensor, "*batch"]
    """Choice of the loss's ``select`` at the update's start; ``mask`` without one."""


class UpdateStart(NamedTuple):
    """Facts that are known when an update begins."""

    batch: TensorDict | Batch
    """Transitions ``[N, T]`` of the rollout; units ``[N, T, K]`` of policies scored by ``token``, here and below."""
    advantage: Float[Tensor, "row step *unit"]
    mask: Bool[Tensor, "row step *unit"]
    """Steps that are trained on."""
    old_log_prob: Float[Tensor, "row step *unit"]
    num_episodes: int
    seed: int
    """Seed of this update's random choices, the same on every rank."""
    all_sum: AllSum


# --- the probability ratio ---

_MAX_LOG_RATIO = 20.0
"""Ratios stop growing at e^20 (verl's bound): the gradient of an infinite one is NaN even where it is clipped away."""


def bounded_exp(log_ratio: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``exp(min(log_ratio, 20))``: finite, and so is its gradient."""
    return log_ratio.clamp(max=_MAX_LOG_RATIO).exp()


def policy_ratio(
    cfg: ObjectiveCfg, log_prob: Float[Tensor, "*batch"], batch: Batch, counts: Counts
) -> Float[Tensor, "*batch"]:
    """Ratio of new to old probability of each element, at the level that ``cfg.ratio`` names; 1 outside the mask if not ``token``.

    - ``token``: ``exp(log_prob - old_log_prob)``, https://arxiv.org/abs/1707.06347, sec. 3;
    - ``sequence``: geometric mean over the episode (GSPO, https://arxiv.org/abs/2507.18071); ``turn``: over the turn;
    - ``sequence_token``: the same value with the gradient of each element's own log-probability (GSPO-token), so that
      advantages may differ within an episode;
    - ``sequence_product``: product over the episode, its true ratio, whose spread grows exponentially with its length.
    """
    if cfg.ratio == "token":
        return bounded_exp(log_prob - batch["old_log_prob"])
    return _segment_ratio(cfg, log_prob, batch, counts)


def _segment_ratio(
    cfg: ObjectiveCfg, log_prob: Float[Tensor, "*batch"], batch: Batch, counts: Counts
) -> Float[Tensor, "*batch"]:
    moved, mask, is_own = log_prob - batch["old_log_prob"], batch["loss_mask"], cfg.ratio == "sequence_token"
    segment, number = batch["episode_id"], counts.episodes
    if cfg.ratio == "turn":
        segment, number = batch["turn"], counts.turns
    reduce = segment_sum if cfg.ratio == "sequence_product" else segment_mean
    reduced = reduce(moved.detach() if is_own else moved, segment, number, mask)
    log_ratio = gather_segments(reduced, segment).masked_fill(~mask, 0)
    if is_own:
        log_ratio = log_ratio + (log_prob - log_prob.detach()).masked_fill(~mask, 0)
    return bounded_exp(log_ratio)


# --- trust regions ---

Bounds: TypeAlias = Callable[..., tuple[float, float]]
"""From the settings to the least and the greatest ratio that is not clipped."""


class Loss(NamedTuple):
    """A registered trust region: its function, and its needs in the update; ``register_loss`` explains the fields."""

    function: Callable[..., Tensor]
    select: Callable[..., Tensor] | None
    whole_episodes: bool
    reads_sampler: bool
    probabilities: bool
    learns_alone: Callable[..., bool]
    bounds: Bounds


LOSSES: dict[str, Loss] = {}
"""Trust regions by name."""

CLIP = 0.2
"""Distance from 1 beyond which a ratio counts as clipped under trust regions that have no ``clip_low`` and ``clip_high``."""

F = TypeVar("F", bound=Callable[..., Any])


def register_loss(
    name: str,
    *,
    select: Callable[..., Tensor] | None = None,
    needs_ratio: str | None = None,
    whole_episodes: bool = False,
    needs_old_log_prob: bool = False,
    reads_sampler: bool = False,
    probabilities: bool = False,
    learns_alone: Callable[..., bool] = lambda **settings: False,
    bounds: Bounds = lambda clip_low=CLIP, clip_high=CLIP, **settings: (1 - clip_low, 1 + clip_high),
    check: Callable[..., None] | None = None,
) -> Callable[[F], F]:
    """Decorator: make a function available as ``objective.trust_region=name``. Its parameters after the first are its settings.

    Args:
        select: maps ``UpdateStart`` and the settings to ``LossInputs.chosen``, once for the whole rollout.
        needs_ratio: the required ``objective.ratio``. None: any.
        whole_episodes: minibatches must keep episodes whole.
        needs_old_log_prob: ``select`` reads ``old_log_prob``.
        reads_sampler: the loss reads ``sample_log_prob``.
        probabilities: it compares probabilities, so continuous actions, which have densities, are refused.
        learns_alone: whether, with these settings, the loss has a gradient where all advantages are 0.
        bounds: the ratios, with these settings, beyond which ``train/clip_fraction`` counts a step.
        check: called with the settings; raises a ``ValueError`` where they contradict each other.

    Raises:
        ConfigError: the name is taken, or missing.
    """
    require_name("loss", name)

    def register(function: F) -> F:
        if name in LOSSES or name != TrustRegionCfg.default:  # the default's settings are in ``config``
            needs = {"needs_ratio": needs_ratio, "needs_old_log_prob": needs_old_log_prob}
            settings_of(function, name, TrustRegionCfg, check, **needs)
        LOSSES[name] = Loss(function, select, whole_episodes, reads_sampler, probabilities, learns_alone, bounds)
        return function

    return register


def _ordered(low: float | None, high: float | None, **settings: object) -> None:
    if low is not None and high is not None and low >= high:
        raise ValueError(f"got low={low} and high={high}; expected low < high, fix: a lower low")


@register_loss("clip")
def clip(x: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """PPO's minimum of raw and clipped; with clip_high above clip_low DAPO's clip-higher.

    ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``: no gain from moving beyond the clip.

    Source: PPO, https://arxiv.org/abs/1707.06347, eq. 7; clip-higher: https://arxiv.org/abs/2503.14476.
    """
    cost = -x.advantage
    return torch.maximum(x.ratio * cost, x.ratio.clamp(1 - clip_low, 1 + clip_high) * cost)


@register_loss("dual_clip")
def dual_clip(
    x: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2, bound: Annotated[float, Gt(1)] = 3.0
) -> Tensor:
    """The clip, also bounded at negative advantage.

    ``min(clip, -bound A)`` where A < 0, however large the ratio.

    Args:
        bound: The loss is at most this many times the negative advantage. Default: verl's ``clip_ratio_c``.

    Source: Ye et al. 2020, https://arxiv.org/abs/1912.09729.
    """
    loss = clip(x, clip_low, clip_high)
    return torch.where(x.advantage < 0, torch.minimum(loss, -bound * x.advantage), loss)


def _bound_beyond_clip(clip_high: float | LinearRangeCfg, delta: float, **settings: object) -> None:
    high = max(range_at(clip_high), range_at(clip_high, 1.0))
    if delta <= 1 + high:
        raise ValueError(f"delta={delta} must exceed 1 + clip_high = {1 + high}; fix: delta={max(4.0, 2 + high)}")


@register_loss("two_sided", check=_bound_beyond_clip)
def two_sided(
    x: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2, delta: Annotated[float, Gt(1)] = 4.0
) -> Tensor:
    """The ratio also bounded at negative advantage (INTELLECT-2).

    The clip of ``min(r, delta)``.

    Args:
        delta: Bound of the ratio, above 1 + clip_high.

    Source: INTELLECT-2, https://arxiv.org/abs/2505.07291.
    """
    return clip(x._replace(ratio=x.ratio.clamp(max=delta)), clip_low, clip_high)


def _random_high_covariance(start: UpdateStart, fraction: float, low: float, high: float, **settings: object) -> Tensor:
    """A random ``fraction`` of the steps whose covariance is between low and high.

    The choice hashes the data of a step. Advantages are not hashed: their last bits depend on the order of rows.
    """
    batch, mask = start.batch, start.mask
    together = covariance(start.old_log_prob, start.advantage, mask, start.all_sum)
    candidate = (together > low) & (together < high) & mask
    parts = [part for leaf in leaves(batch["action"]) for part in leaf.reshape(*leaf.shape[:2], -1).unbind(-1)]
    numbers = [part.view(*part.shape, *[1] * (mask.dim() - 2)).expand_as(mask) for part in parts]
    noise = element_noise(start.seed, batch["sample_log_prob"], batch["step"], *numbers)
    return random_fraction(noise, fraction, candidate, mask, start.all_sum)


@register_loss("clip_cov", select=_random_high_covariance, needs_old_log_prob=True, check=_ordered)
def clip_cov(
    x: LossInputs,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    fraction: Fraction = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Tensor:
    """The clip, without a few random steps of high covariance.

    Args:
        fraction: Share of the rollout's steps that are left out, at least one.
        low: They are drawn from the steps whose ``(A - mean A)(log_prob - mean log_prob)`` is above this.
        high: And below this.

    Source: https://arxiv.org/abs/2505.22617.
    """
    return clip(x, clip_low, clip_high) * (~x.chosen).to(x.log_prob)


@register_loss(
    "gmpo",
    needs_ratio="token",
    whole_episodes=True,
    bounds=lambda clip_low, clip_high: (math.exp(-clip_low), math.exp(clip_high)),
)
def gmpo(x: LossInputs, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """The geometric mean over the episode of ratios clipped step by step, at exp(-clip_low) and exp(clip_high).

    ``-A exp(mean of u over the episode)``, where ``u`` is ``log_prob - old_log_prob``, at most clip_high where A > 0, at least
    -clip_low where A < 0. At ratio 1 the losses of an episode together have the gradient ``-A`` with respect to each of its
    log-probabilities.

    Source: GMPO, https://arxiv.org/abs/2507.20673.
    """
    moved = x.log_prob - x.old_log_prob
    clipped = torch.where(x.advantage > 0, moved.clamp(max=clip_high), moved.clamp(min=-clip_low))
    clipped = clipped.masked_fill(x.advantage == 0, 0)
    mean = segment_mean(clipped, x.episode_id, x.num_episodes, x.mask)
    return -x.advantage * bounded_exp(gather_segments(mean, x.episode_id))


@register_loss("reinforce")
def reinforce(x: LossInputs) -> Tensor:
    """Log-probability times advantage, without ratio.

    ``-A log_prob``: right for a single pass over fresh data only.

    Source: GPG, https://arxiv.org/abs/2504.02546; Williams 1992.
    """
    return -x.log_prob * x.advantage


@register_loss("none")
def unclipped(x: LossInputs) -> Tensor:
    """Ratio times advantage.

    ``-r A``: the importance-weighted policy gradient.

    Source: RLOO, https://arxiv.org/abs/2402.14740.
    """
    return -x.ratio * x.advantage


def _highest_covariance(start: UpdateStart, fraction: float, **settings: object) -> Tensor:
    together = covariance(start.old_log_prob, start.advantage, start.mask, start.all_sum)
    return top_fraction(together, fraction, start.mask, start.all_sum)


@register_loss("kl_cov", select=_highest_covariance, needs_old_log_prob=True)
def kl_cov(x: LossInputs, fraction: Fraction = 2e-4, penalty: NonNegative = 1.0) -> Tensor:
    """No clip, and a pull on the steps of highest covariance.

    ``-r A``, plus ``penalty |log_prob - old_log_prob|`` on the steps that are pulled back.

    Args:
        fraction: Share of the rollout's steps that is pulled back: those whose ``(A - mean A)(log_prob - mean log_prob)`` is
            highest.
        penalty: Weight of ``|log_prob - old_log_prob|`` on them.

    Source: KL-Cov, https://arxiv.org/abs/2505.22617.
    """
    distance = (x.log_prob - x.old_log_prob).abs().masked_fill(~x.chosen, 0)
    return -x.ratio * x.advantage + penalty * distance


@register_loss("sapo")
def sapo(x: LossInputs, positive: Positive = 1.0, negative: Positive = 1.05) -> Tensor:
    """A gradient that fades smoothly on both sides of ratio 1.

    ``-(4 / tau) sigmoid(tau (r - 1)) A``, with the temperature tau by the sign of A.

    Args:
        positive: Temperature at positive advantage: how fast an action loses influence as its ratio leaves 1.
        negative: Temperature at negative advantage; higher, so that these actions lose it sooner.

    Source: SAPO, https://arxiv.org/abs/2511.20347.
    """
    tau = torch.where(x.advantage > 0, positive, negative)
    return -(4 / tau) * torch.sigmoid(tau * (x.ratio - 1)) * x.advantage


@register_loss("cispo", check=_ordered)
def cispo(x: LossInputs, low: NonNegative | None = None, high: Positive | None = 5.0) -> Tensor:
    """A policy gradient whose weight, the ratio, is clipped.

    ``-sg(clip(r, low, high)) A log_prob``: no step loses its gradient.

    Args:
        low: Least weight, absolute. None: no lower bound (TRL, AgileRL; verl: 1 - its clip, so 0.8).
        high: Greatest weight, absolute. Default: ScaleRL's, which TRL names (verl and AgileRL: 1.2). None: no upper bound.

    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585.
    """
    weight = x.ratio.detach()
    weight = weight if low is None else weight.clamp(min=low)
    weight = weight if high is None else weight.clamp(max=high)
    return -weight * x.advantage * x.log_prob


@register_loss("vespo", needs_ratio="sequence_product")
def vespo(
    x: LossInputs,
    positive_power: NonNegative = 2.0,
    positive_decay: NonNegative = 3.0,
    negative_power: NonNegative = 3.0,
    negative_decay: NonNegative = 2.0,
) -> Tensor:
    """A policy gradient with weight ``w^power * exp(decay * (1 - w))``, w the episode's ratio.

    ``-sg(w^power exp(decay (1 - w))) A log_prob``: the weight is 1 at ratio 1 and fades on both sides.

    Args:
        positive_power: Power k at advantage 0 and above.
        positive_decay: Decay lambda at advantage 0 and above.
        negative_power: Power k at negative advantage.
        negative_decay: Decay lambda at negative advantage.

    Source: VESPO, https://arxiv.org/abs/2602.10693.
    """
    w, good = x.ratio.detach().clamp(min=1e-8), x.advantage >= 0  # so that the logarithm is finite
    power = torch.where(good, positive_power, negative_power)
    decay = torch.where(good, positive_decay, negative_decay)
    return -torch.exp(decay + power * w.log() - decay * w) * x.advantage * x.log_prob


@register_loss("dppo", reads_sampler=True, probabilities=True, learns_alone=lambda pull, **settings: pull > 0)
def dppo(
    x: LossInputs,
    divergence: Literal["tv", "kl"] = "tv",
    low: Positive = 0.15,
    high: Positive = 0.15,
    max_ratio: Positive | None = 20.0,
    pull: NonNegative = 0.0,
) -> Tensor:
    """Steps whose probability has moved too far are dropped; discrete actions.

    ``-sg(min(r, max_ratio)) A log_prob`` of the steps that ``dppo_keeps``, plus ``pull (log_prob - old_log_prob)^2``.

    Args:
        divergence: Of "this action or another": total variation (the difference of probabilities), or KL(sampler || policy).
        low: Greatest divergence downwards, at negative advantage. Default: TRL's for ``tv`` (0.05 for ``kl``; prime-rl 0.2).
        high: Greatest divergence upwards, at positive advantage.
        max_ratio: The weight of a step, its ratio, counts as at most this (TRL). None: no limit (prime-rl).
        pull: Weight of ``(log_prob - old_log_prob)^2``, added at every step (prime-rl: 1e-3).

    Source: DPPO as in prime-rl, https://github.com/PrimeIntellect-ai/prime-rl, and TRL.
    """
    loss = cispo(x, None, max_ratio).masked_fill(~dppo_keeps(x, divergence, low, high), 0)
    return loss + pull * (x.log_prob - x.old_log_prob).square() if pull else loss


@torch.no_grad()
def dppo_keeps(x: LossInputs, divergence: Literal["tv", "kl"], low: float, high: float) -> Bool[Tensor, "*batch"]:
    """False where the action's probability has moved further than the bound in the direction of its advantage.

    With p the probability now and q the sampler's, of "this action or another", the distance is ``|p - q|`` (``tv``) or
    ``q log(q / p) + (1 - q) log((1 - q) / (1 - p))`` (``kl``).
    """
    rose = x.log_prob > x.sample_log_prob
    if divergence == "tv":
        moved = (x.log_prob.exp() - x.sample_log_prob.exp()).abs()
    else:
        moved = _coin_kl(x.sample_log_prob, x.log_prob)
    return torch.where(x.advantage > 0, ~(rose & (moved > high)), rose | (moved <= low))


def _coin_kl(log_prob: Float[Tensor, "*batch"], other_log_prob: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """KL of two coins from the log-probabilities of one side; that of the other side is kept finite."""
    p, other = (x.exp().clamp(max=1 - 2**-23) for x in (log_prob, other_log_prob))
    return p * (log_prob - other_log_prob) + (1 - p) * (torch.log1p(-p) - torch.log1p(-other))


# --- corrections: a sampler whose probabilities differ from the trainer's ---

CORRECTIONS: dict[str, Callable[..., Tensor | None]] = {"none": lambda start: None}
"""Corrections by name."""


def register_correction(
    name: str, *, reweights: bool = True, check: Callable[..., None] | None = None
) -> Callable[[F], F]:
    """Decorator: make a function available as ``objective.importance_sampling_correction=name``.

    It maps ``UpdateStart`` and its settings to the weight of each step's policy loss, without gradient; None: no weight. A
    setting ``off_policy_mask_threshold`` drops steps by ``off_policy_keeps``, with every function.

    Args:
        reweights: the weight compares ``old_log_prob`` with the sampler's, so ``old_log_prob="recomputed"`` is required.
        check: called with the settings; raises a ``ValueError`` where they contradict each other.

    Raises:
        ConfigError: the name is taken, or missing.
    """
    require_name("correction", name)

    def register(function: F) -> F:
        settings_of(function, name, CorrectionCfg, check, reweights=reweights)
        CORRECTIONS[name] = function
        return function

    return register


@register_correction("tis")
@torch.no_grad()
def tis(
    start: UpdateStart,
    off_policy_mask_threshold: Positive | None = None,
    level: Literal["token", "sequence"] = "token",
    high: Positive = 3.0,
) -> Tensor:
    """The weight ``exp(old_log_prob - sample_log_prob)``, at most ``high``.

    Args:
        off_policy_mask_threshold: Drops steps of negative advantage where the episode's mean of ``sample_log_prob - log_prob``
            exceeds this (TRL 0.5, AgileRL 0.03). None: no limit.
        level: Weight of each step, or the product over its episode.
        high: Greatest weight. Default: TRL's (AgileRL: 2).

    Source: https://github.com/huggingface/trl.
    """
    return sampler_weight(start, level).clamp(max=high)


@register_correction("mis", check=_ordered)
@torch.no_grad()
def mis(
    start: UpdateStart,
    off_policy_mask_threshold: Positive | None = None,
    level: Literal["token", "sequence"] = "token",
    low: NonNegative | None = None,
    high: Positive = 3.0,
) -> Tensor:
    """The weight ``exp(old_log_prob - sample_log_prob)``, 0 outside ``[low, high]``.

    Args:
        off_policy_mask_threshold: Drops steps of negative advantage where the episode's mean of ``sample_log_prob - log_prob``
            exceeds this (TRL 0.5, AgileRL 0.03). None: no limit.
        level: Weight of each step, or the product over its episode.
        low: Least weight that counts (IcePop, AgileRL: 0.5). None: no lower bound.
        high: Greatest weight that counts. Default: TRL's (AgileRL: 5).

    Source: IcePop, https://arxiv.org/abs/2510.18855.
    """
    weight = sampler_weight(start, level)
    outside = weight > high if low is None else (weight > high) | (weight < low)
    return weight.masked_fill(outside, 0)


@register_correction("off_policy_mask", reweights=False)
def off_policy_mask(start: UpdateStart, off_policy_mask_threshold: Positive | None = 0.5) -> None:
    """Drops steps of negative advantage in episodes that have become unlikely.

    Args:
        off_policy_mask_threshold: Greatest mean of ``sample_log_prob - log_prob`` over the episode (TRL 0.5, AgileRL 0.03). None:
            no limit.

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556.
    """


def sampler_weight(start: UpdateStart, level: Literal["token", "sequence"]) -> Float[Tensor, "row step *unit"]:
    """``exp(old_log_prob - sample_log_prob)`` of each step, or the product over its episode; the latter is 1 outside the mask."""
    moved = start.old_log_prob - start.batch["sample_log_prob"]
    if level == "sequence":
        episode = start.batch["episode_id"]
        total = segment_sum(moved, episode, start.num_episodes, start.mask)
        moved = gather_segments(total, episode).masked_fill(~start.mask, 0)
    return bounded_exp(moved)


@torch.no_grad()
def off_policy_keeps(x: LossInputs, limit: float) -> Bool[Tensor, "*batch"]:
    """False at negative advantage in episodes whose mean of ``sample_log_prob - log_prob`` exceeds the limit.

    Source: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556.
    """
    distance = segment_mean(x.sample_log_prob - x.log_prob, x.episode_id, x.num_episodes, x.mask)
    return (x.advantage >= 0) | (gather_segments(distance, x.episode_id) <= limit)


# --- KL(policy || reference) from one sample, and the value loss ---


def k1(log_prob: Float[Tensor, "*batch"], ref_log_prob: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``log_prob - ref_log_prob``: unbiased for samples of the policy, often negative.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    return log_prob - ref_log_prob


def k2(log_prob: Float[Tensor, "*batch"], ref_log_prob: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``(log_prob - ref_log_prob)^2 / 2``: biased in value, but its mean has the gradient of the KL.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html.
    """
    return (log_prob - ref_log_prob).square() / 2


def k3(log_prob: Float[Tensor, "*batch"], ref_log_prob: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``exp(d) - d - 1`` with ``d = ref_log_prob - log_prob``: unbiased for samples of the policy, never negative.

    ``d`` counts as at most 20, as in verl, so that one improbable step cannot overflow the mean.

    Source: Schulman 2020, http://joschu.net/blog/kl-approx.html; GRPO, https://arxiv.org/abs/2402.03300, eq. 4.
    """
    difference = ref_log_prob - log_prob
    return difference.clamp(max=20).expm1() - difference.clamp(max=20)


def k3_plus(log_prob: Float[Tensor, "*batch"], ref_log_prob: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """The value of ``k3`` with the gradient of ``k2``: unbiased in value and, for samples of the policy, in gradient.

    Source: verl's ``k3+``, https://github.com/volcengine/verl.
    """
    gradient = k2(log_prob, ref_log_prob)
    return k3(log_prob, ref_log_prob).detach() + (gradient - gradient.detach())


def absolute(log_prob: Float[Tensor, "*batch"], ref_log_prob: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """``|log_prob - ref_log_prob|``: no estimate of the KL, but a distance with a gradient of constant size.

    Source: verl's ``abs``, https://github.com/volcengine/verl.
    """
    return (log_prob - ref_log_prob).abs()


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "k3+": k3_plus, "abs": absolute}
"""Estimators that compare two log-probabilities, by ``GRPOCfg.kl_estimator``."""


def reference_kl(estimator: str, policy: Policy, evaluation: Evaluation, batch: Batch) -> Float[Tensor, "*batch"]:
    """KL of the policy to the reference at each element, by ``GRPOCfg.kl_estimator``."""
    log_prob = evaluation.log_prob
    if estimator == "exact":
        assert evaluation.dist is not None
        return policy.kl(evaluation.dist, batch["ref_dist"])
    if estimator == "k3_unbiased":
        return k3(log_prob, batch["ref_log_prob"]) * bounded_exp(log_prob - batch["old_log_prob"])
    return KL_ESTIMATORS[estimator](log_prob, batch["ref_log_prob"])


def value_loss(
    value: Float[Tensor, "*batch"],
    target: Float[Tensor, "*batch"],
    old_value: Float[Tensor, "*batch"] | None = None,
    clip: float | None = None,
) -> Float[Tensor, "*batch"]:
    """Squared error, without a half; with ``clip`` the greater one of it and of the value held within ``clip`` of ``old_value``.

    Source: the clip is that of OpenAI's baselines (ppo2); the paper has no such term.
    """
    error = mse_loss(value, target, reduction="none")
    if clip is None or old_value is None:
        return error
    held = old_value + (value - old_value).clamp(-clip, clip)
    return torch.maximum(error, mse_loss(held, target, reduction="none"))


# --- the loss of an element ---

DIAGNOSTICS = ("approx_kl", "clip_fraction", "clip_fraction_low", "clip_fraction_high")
"""Metrics of ``policy_loss``: approximate KL to the old policy; 1.0 where the ratio is outside, below, above the clip range, which
is 0.8 to 1.2 of a trust region without one."""


def policy_loss(
    cfg: ObjectiveCfg, log_prob: Float[Tensor, "*batch"], batch: Batch, counts: Counts
) -> tuple[Float[Tensor, "*batch"], tuple[Tensor, ...]]:
    """Policy loss of each element, and ``DIAGNOSTICS``: the trust region's, times correction and selections."""
    settings, old, mask = cfg.trust_region.parameters(), batch["old_log_prob"], batch["loss_mask"]
    sampled, chosen, episode = batch.get("sample_log_prob", old), batch.get("chosen", mask), batch["episode_id"]
    ratio = policy_ratio(cfg, log_prob, batch, counts)
    x = LossInputs(log_prob, old, sampled, ratio, batch["advantage"], mask, episode, counts.episodes, chosen)
    loss: Tensor = LOSSES[cfg.trust_region.name].function(x, **settings)
    if "policy_factor" in batch:
        loss = loss * batch["policy_factor"]
    limit = cfg.importance_sampling_correction.parameters().get("off_policy_mask_threshold")
    if limit is not None:
        loss = loss.masked_fill(~off_policy_keeps(x, limit), 0)
    with torch.no_grad():
        least, most = LOSSES[cfg.trust_region.name].bounds(**settings)
        low, high = (ratio < least).to(ratio.dtype), (ratio > most).to(ratio.dtype)
        return loss, (k3(old, log_prob), low + high, low, high)


# --- data computed once per update ---


def objective_data(
    cfg: ObjectiveCfg, start: UpdateStart, score: Callable[[], Evaluation], single_pass: Callable[[], bool]
) -> dict[str, Nested]:
    """Inputs of the objective, of each step, besides the advantage, ``[N, T]``.

    Args:
        start: with the sampler's log-probabilities as ``old_log_prob``.
        score: the policy's scores of every step at the update's start; called only if something needs them.
        single_pass: whether the update is one optimiser step. The policy's scores in it are those at the start, and a recomputed
            ``old_log_prob`` is left to it.

    Raises:
        DataError: ratios of turns, and the rollout has no ``turn_id``.
    """
    region, correction = cfg.trust_region, cfg.importance_sampling_correction
    loss, sampled = LOSSES[region.name], start.old_log_prob
    recomputes = cfg.old_log_prob == "recomputed"
    left_out = recomputes and not correction.reweights and not region.needs_old_log_prob and single_pass()
    if recomputes and not left_out:
        start = start._replace(old_log_prob=score().log_prob)
    data: dict[str, Nested] = {} if left_out else {"old_log_prob": start.old_log_prob}
    if loss.reads_sampler or correction.parameters().get("off_policy_mask_threshold") is not None:
        data["sample_log_prob"] = sampled
    if cfg.ratio == "turn":
        data["turn"] = _turns(start.batch)
    if loss.select is not None:
        data["chosen"] = loss.select(start, **region.parameters())
    weight = CORRECTIONS[correction.name](start, **correction.parameters())
    return data if weight is None else multiplied(data, weight)


def _turns(batch: TensorDict | Batch) -> Int[Tensor, "*batch"]:
    """One id for each turn of each episode, dense in this rank's rollout; -1 outside."""
    turn, episode = batch.get("turn_id", None), batch["episode_id"]
    if turn is None:
        raise DataError(
            "ratio='turn' needs turn_id in the rollout, the index of the turn within the episode; fix: ratio='token', "
            "where every step is a turn of its own"
        )
    inside = (episode >= 0) & (turn >= 0)
    key = torch.where(inside, episode * (int(turn.max()) + 1) + turn, -1)
    return torch.where(inside, torch.unique(key, return_inverse=True)[1], -1)


def multiplied(data: dict[str, Nested], factor: Tensor) -> dict[str, Nested]:
    """``data`` with a further factor of the policy loss."""
    earlier = data.get("policy_factor")
    return data | {"policy_factor": earlier * factor if isinstance(earlier, Tensor) else factor}


def finest_item(cfg: ObjectiveCfg) -> Item:
    """The item that a minibatch must keep whole: an episode, where anything looks at episodes or counts them."""
    by_step = (
        cfg.ratio == "token"
        and not LOSSES[cfg.trust_region.name].whole_episodes
        and cfg.importance_sampling_correction.parameters().get("off_policy_mask_threshold") is None
        and not cfg.aggregation.by_episode
    )
    return "transition" if by_step else "episode"


def check_objective(cfg: ObjectiveCfg, policy: Policy) -> None:
    """Refuse settings that cannot work with this policy.

    Raises:
        ConfigError: a divisor is missing, or probabilities are asked of a policy that has densities.
    """
    if isinstance(cfg.aggregation, FixedLengthCfg) and cfg.aggregation.max_length is None:
        raise ConfigError(
            f"aggregation={cfg.aggregation.name!r} divides by its max_length, which is None; fix: set it to the longest episode"
        )
    has_densities = isinstance(policy.action_spec, TensorSpec) and policy.action_spec.dtype.is_floating_point
    if LOSSES[cfg.trust_region.name].probabilities and has_densities:
        raise ConfigError(
            f"trust_region={cfg.trust_region.name!r} compares probabilities, and this policy's continuous actions have "
            "densities; fix: 'clip'"
        )
    # the function may be the user's: try it
    log_prob, step = torch.zeros(1, 2, requires_grad=True), torch.zeros(1, 2, dtype=torch.int64)
    mask, advantage = step == 0, torch.ones(1, 2)
    x = LossInputs(log_prob, log_prob.detach(), log_prob.detach(), log_prob.exp(), advantage, mask, step, 1, mask)
    settings = {key: range_at(value, 0.0) for key, value in cfg.trust_region.parameters().items()}
    loss: object = LOSSES[cfg.trust_region.name].function(x, **settings)
    if not isinstance(loss, Tensor) or loss.shape != mask.shape:
        got = f"shape {[*loss.shape]}" if isinstance(loss, Tensor) else f"{loss!r:.80}"
        raise ConfigError(
            f"trust_region={cfg.trust_region.name!r} returned {got}, expected the loss of each step, {[*mask.shape]}; fix: no mean, "
            "which objective.aggregation takes"
        )
