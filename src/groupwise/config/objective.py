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

    @property
    def learns_alone(self) -> bool:
        """Whether its loss has a gradient where all advantages are 0."""
        return False

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
    """The loss of a step, and how steps are aggregated."""

    ratio: Literal["token", "turn", "sequence", "sequence_token", "sequence_product"] = "token"
    """Level of the probability ratio: ``token``, each step; ``turn``, geometric mean over the turn; ``sequence``, over the episode (GSPO); ``sequence_token``, the same with the gradient of each step; ``sequence_product``, the product over the episode."""
    trust_region: SerializeAsAny[TrustRegionCfg] = ClipCfg()
    """How the update is limited, by name or with its parameters: ``{"name": "cispo", "high": 1.2}``."""
    top_entropy_quantile: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the steps, those with the highest entropy, that have a policy loss (TRL). 1: all."""
    importance_sampling_correction: SerializeAsAny[CorrectionCfg] = NoCorrectionCfg()
    """Weight for the difference between sampler and trainer, by name or with its parameters. Needs ``old_log_prob="recomputed"``."""
    off_policy_mask_threshold: Positive | None = None
    """Drops steps of negative advantage where the episode's mean of ``sample_log_prob - log_prob`` exceeds this (TRL 0.5, AgileRL 0.03). None: no limit."""
    aggregation: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant", "seq_mean_token_sum_norm"
    ] = "token_mean"
    """How steps become one loss: mean over steps; mean of episode means; mean of episode sums; sum over episodes times ``max_length``; sum over ``max_length`` (verl)."""
    max_length: PositiveInt | None = None
    """Divisor of ``constant`` and ``seq_mean_token_sum_norm``. None: the step limit of the environment."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "abs", "exact"] = "k3"
    """Estimator of the KL to the reference. ``k3+``: value of k3, gradient of k2; ``exact``: closed form, for control."""
    kl_weight: Literal["none", "ratio"] = "none"
    """``ratio``: each step's KL times its ratio, unbiased off-policy (DeepSeek-V3.2)."""
    kl_clamp: Positive | None = None
    """Largest absolute value of a step's KL (verl, AgileRL: 10). None: no limit."""
    old_log_prob: Literal["sampled", "recomputed"] = "sampled"
    """Denominator of the ratio: as the sampler reported it, or recomputed at the update's start."""
    entropy: SerializeAsAny[EntropyCfg] = ConstantEntropyCfg()
    """Weight of the entropy bonus over time."""

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
