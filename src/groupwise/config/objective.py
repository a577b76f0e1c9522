"""Settings of the objective: what one element's loss is, and how elements are added up. Imports no torch."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt, Le
from pydantic import SerializeAsAny, model_validator

from groupwise.config.base import Cfg, NonNegative, Positive, PositiveInt
from groupwise.config.choices import Choice, recipes_in, register_recipe

if TYPE_CHECKING:
    from torch import Tensor

    from groupwise.algorithms.loss import Counts, UpdateStart
    from groupwise.policies.base import Batch, Policy


class TrustRegionCfg(Choice):
    """What keeps a step from going too far. Derive yours with a ``loss``, and ``@register_recipe`` it."""

    family: ClassVar = "trust region"
    default: ClassVar = "clip"
    known: ClassVar = recipes_in("trust_regions")
    needs_ratio: ClassVar[str | None] = None
    """The only ``objective.ratio`` that it works with. None: any."""
    whole_episodes: ClassVar[bool] = False
    """Whether its loss reads whole episodes, so that minibatches must not cut them."""
    needs_old_log_prob: ClassVar[bool] = False
    """Whether ``at_start`` reads ``old_log_prob``."""
    learns_alone: ClassVar[bool] = False
    """Whether its loss has a gradient where all advantages are 0."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """How far below and above 1 a ratio counts as clipped in ``train/clip_fraction``."""
        return 0.2, 0.2

    def check_policy(self, policy: "Policy") -> None:
        """Refuse policies that it cannot work with, by a ``ConfigError``."""

    def at_start(self, start: "UpdateStart") -> "dict[str, Tensor]":
        """What ``loss`` reads in its batch and depends on the whole rollout; a ``policy_factor`` multiplies the loss."""
        return {}

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """Policy loss of each element; its advantage is ``batch["advantage"]``."""
        raise NotImplementedError(f"{type(self).__name__} has no loss()")


class ClippedCfg(TrustRegionCfg):
    """A trust region with a range of the ratio."""

    clip_low: Positive = 0.2
    """The ratio is clipped at 1 - clip_low."""
    clip_high: Positive = 0.2
    """The ratio is clipped at 1 + clip_high."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """Its range."""
        return self.clip_low, self.clip_high


@register_recipe
class ClipCfg(ClippedCfg):
    """PPO's minimum of raw and clipped; with clip_high above clip_low DAPO's clip-higher."""

    name: Literal["clip"] = "clip"
    """Name in the registry."""
    source: ClassVar = "https://arxiv.org/abs/1707.06347"


class CorrectionCfg(Choice):
    """What is done about a sampler whose probabilities differ from the trainer's at the update's start."""

    family: ClassVar = "importance sampling correction"
    default: ClassVar = "none"
    known: ClassVar = recipes_in("corrections")

    def factor(self, start: "UpdateStart") -> "Tensor":
        """Weight of each element's policy loss."""
        raise NotImplementedError(f"{type(self).__name__} has no factor()")


@register_recipe
class NoCorrectionCfg(CorrectionCfg):
    """Sampler and trainer are taken to agree."""

    name: Literal["none"] = "none"
    """Name in the registry."""
    source: ClassVar = "https://arxiv.org/abs/1707.06347"


class EntropyCfg(Choice):
    """How the weight of the entropy bonus changes over training."""

    family: ClassVar = "entropy control"
    default: ClassVar = "constant"
    known: ClassVar = {}


@register_recipe
class ConstantEntropyCfg(EntropyCfg):
    """``ent_coef`` throughout."""

    name: Literal["constant"] = "constant"
    """Name in the registry."""
    source: ClassVar = "https://arxiv.org/abs/1707.06347"


@register_recipe
class AdaptiveEntropyCfg(EntropyCfg):
    """The bonus rises while the entropy is low (Skywork-OR1).

    ``step`` more after a minibatch with entropy at or below ``target``, ``step`` less after another, and no bonus until the
    entropy is at or below it again.
    """

    name: Literal["adaptive"] = "adaptive"
    """Name in the registry."""
    target: float = 0.2
    """Entropy in nats per step, of the joint action; negative is possible for densities."""
    step: Positive = 0.005
    """Change of the weight in one optimiser step."""
    min_coef: NonNegative = 0.0
    """Least weight."""
    max_coef: NonNegative = 1.0
    """Greatest weight."""
    source: ClassVar = "https://arxiv.org/abs/2505.22312"

    @model_validator(mode="after")
    def _check(self) -> "AdaptiveEntropyCfg":
        if self.min_coef > self.max_coef:
            raise ValueError(f"got min_coef={self.min_coef} > max_coef={self.max_coef}; fix: swap them")
        return self


class ObjectiveCfg(Cfg):
    """Ratio, trust region, correction, aggregation, KL and entropy: one element's loss, and how elements are added up."""

    ratio: Literal["token", "turn", "sequence", "sequence_token", "sequence_product"] = "token"
    """Level of the probability ratio: per step (token), geometric mean over the turn (needs ``turn_id`` in the rollout) or over the episode (GSPO), the latter with per-step gradient (GSPO-token), or the product over the episode (explodes with length)."""
    trust_region: SerializeAsAny[TrustRegionCfg] = ClipCfg()
    """What keeps a step from going too far: ``"cispo"``, or with its parameters ``{"name": "cispo", "high": 1.2}``. ``groupwise list trust-region`` names all."""
    top_entropy_quantile: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the rollout's steps, those of highest entropy at the update's start, that have a policy loss."""
    importance_sampling_correction: SerializeAsAny[CorrectionCfg] = NoCorrectionCfg()
    """What is done about a sampler whose probabilities differ from the trainer's. Needs ``old_log_prob="recomputed"``."""
    off_policy_mask_threshold: Positive | None = None
    """Steps of negative advantage do not count where the episode's mean of ``sample_log_prob - log_prob``, under the policy as it is now, exceeds this (TRL suggests 0.5, AgileRL 0.03). None: no limit."""
    aggregation: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant", "seq_mean_token_sum_norm"
    ] = "token_mean"
    """How elements become one loss: over all steps of the optimiser batch; mean of episode means; mean of episode sums; sum over (episodes x ``max_length``); sum over ``max_length`` (verl's name for it)."""
    max_length: PositiveInt | None = None
    """Steps that ``constant`` and ``seq_mean_token_sum_norm`` divide by; None takes the environment's step limit."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "abs", "exact"] = "k3"
    """KL to the reference policy, used when ``kl_coef > 0``; ``k3+``: value of k3, gradient of k2; ``exact`` needs a closed form (control policies have it)."""
    kl_weight: Literal["none", "ratio"] = "none"
    """``ratio``: each step's KL estimate times its probability ratio, which makes it unbiased off-policy (DeepSeek-V3.2)."""
    kl_clamp: Positive | None = None
    """Greatest absolute value of a step's KL estimate (verl, AgileRL: 10). None: no limit."""
    old_log_prob: Literal["sampled", "recomputed"] = "sampled"
    """Denominator of the ratio: what the sampler reported, or a forward pass at the update's start."""
    entropy: SerializeAsAny[EntropyCfg] = ConstantEntropyCfg()
    """Weight of the entropy bonus over time: ``"constant"``, or ``"adaptive"`` with its parameters."""

    @model_validator(mode="after")
    def _check(self) -> "ObjectiveCfg":
        region = self.trust_region
        if region.needs_ratio not in (None, self.ratio):
            raise ValueError(
                f"trust_region={region.name!r} needs ratio={region.needs_ratio!r}; got ratio={self.ratio!r}, "
                f"fix: ratio={region.needs_ratio!r}"
            )
        if self.importance_sampling_correction.name != "none" and self.old_log_prob == "sampled":
            raise ValueError(
                f"importance_sampling_correction={self.importance_sampling_correction.name!r} compares old_log_prob with the sampler's, which "
                "old_log_prob='sampled' makes the same; fix: old_log_prob='recomputed'"
            )
        if self.kl_estimator == "exact" and self.kl_weight == "ratio":
            raise ValueError("kl_estimator='exact' samples no action to weigh; fix: kl_weight='none', or 'k3'")
        return self
