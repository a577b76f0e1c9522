"""Settings of the objective: the loss of a step, and how steps are aggregated. Imports no torch."""

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import SerializeAsAny, model_validator

from groupwise.config.base import Cfg, Positive, PositiveInt
from groupwise.config.choices import Choice, register_recipe
from groupwise.config.ranges import ClipRange, range_at

if TYPE_CHECKING:
    from torch import Tensor

    from groupwise.algorithms.loss import Counts, UpdateStart
    from groupwise.policies.base import Batch, Policy


class TrustRegionCfg(Choice):
    """How the policy update is limited. Subclass it with a ``loss``, and ``@register_recipe`` it."""

    family: ClassVar = "trust region"
    default: ClassVar = "clip"
    known: ClassVar = dict.fromkeys(
        ("cispo", "clip_cov", "dppo", "dual_clip", "gmpo", "kl_cov", "none", "reinforce", "sapo", "two_sided", "vespo"),
        "groupwise.recipes.trust_regions",
    )
    needs_ratio: ClassVar[str | None] = None
    """The required ``objective.ratio``. None: any."""
    whole_episodes: ClassVar[bool] = False
    """Whether minibatches must keep episodes whole."""
    needs_old_log_prob: ClassVar[bool] = False
    """Whether ``at_start`` reads ``old_log_prob``."""

    @property
    def learns_alone(self) -> bool:
        """Whether its loss has a gradient where all advantages are 0."""
        return False

    @property
    def clip_range(self) -> tuple[float, float]:
        """Distances below and above 1 from which a ratio counts in ``train/clip_fraction``."""
        return 0.2, 0.2

    def check_policy(self, policy: "Policy") -> None:
        """Refuse unsupported policies, by a ``ConfigError``."""

    def at_start(self, start: "UpdateStart") -> "dict[str, Tensor]":
        """Further keys of ``loss``'s batch that depend on the whole rollout; ``policy_factor`` multiplies the loss."""
        return {}

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """Policy loss of each step; its advantage is ``batch["advantage"]``."""
        raise NotImplementedError(f"{type(self).__name__} has no loss()")


class ClippedCfg(TrustRegionCfg):
    """A trust region with a clip range of the ratio; its loss is PPO's."""

    clip_low: ClipRange = 0.2
    """The ratio is clipped at 1 - clip_low. A number, or a schedule over training: ``{"name": "linear", "start": 0.2, "end": 0.05}``."""
    clip_high: ClipRange = 0.2
    """The ratio is clipped at 1 + clip_high. A number or a schedule."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """The clip range; of schedules, that at the beginning of training."""
        return range_at(self.clip_low), range_at(self.clip_high)

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``."""
        from groupwise.functional.objective import clip_loss

        return clip_loss(ratio, batch["advantage"], *self.clip_range)


@register_recipe
class ClipCfg(ClippedCfg):
    """PPO's minimum of raw and clipped; with clip_high above clip_low DAPO's clip-higher."""

    name: Literal["clip"] = "clip"
    source: ClassVar = "https://arxiv.org/abs/1707.06347"


class CorrectionCfg(Choice):
    """How the difference between sampler and trainer is corrected."""

    family: ClassVar = "importance sampling correction"
    default: ClassVar = "none"
    known: ClassVar = dict.fromkeys(("mis", "off_policy_mask", "tis"), "groupwise.recipes.corrections")
    reweights: ClassVar[bool] = False
    """Whether it has a ``factor``, which needs ``old_log_prob="recomputed"``."""

    @property
    def mask_threshold(self) -> float | None:
        """Steps of negative advantage are dropped where the episode's mean of ``sample_log_prob - log_prob`` exceeds this."""
        return None

    def factor(self, start: "UpdateStart") -> "Tensor":
        """Weight of each step's policy loss."""
        raise NotImplementedError(f"{type(self).__name__} has no factor()")


class MaskCorrectionCfg(CorrectionCfg):
    """A correction with an off-policy mask."""

    off_policy_mask_threshold: Positive | None = None
    """Drops steps of negative advantage where the episode's mean of ``sample_log_prob - log_prob`` exceeds this (TRL 0.5, AgileRL 0.03). None: no limit."""

    @property
    def mask_threshold(self) -> float | None:
        """The setting."""
        return self.off_policy_mask_threshold


@register_recipe
class NoCorrectionCfg(CorrectionCfg):
    """No correction."""

    name: Literal["none"] = "none"
    source: ClassVar = "https://arxiv.org/abs/1707.06347"


class AggregationCfg(Choice):
    """How the losses of steps become one loss."""

    family: ClassVar = "aggregation"
    default: ClassVar = "token_mean"
    known: ClassVar = {}
    by_episode: ClassVar[bool] = True
    """Whether minibatches must keep episodes whole."""

    @property
    def divisor(self) -> int | None:
        """The constant that it divides by, if any."""
        return None


@register_recipe
class TokenMeanCfg(AggregationCfg):
    """Mean over all steps of the minibatch (DAPO)."""

    name: Literal["token_mean"] = "token_mean"
    source: ClassVar = "https://arxiv.org/abs/2503.14476"
    by_episode: ClassVar = False


@register_recipe
class SeqMeanTokenMeanCfg(AggregationCfg):
    """Mean of episode means."""

    name: Literal["seq_mean_token_mean"] = "seq_mean_token_mean"
    source: ClassVar = "https://arxiv.org/abs/2402.03300"


@register_recipe
class SeqMeanTokenSumCfg(AggregationCfg):
    """Mean of episode sums."""

    name: Literal["seq_mean_token_sum"] = "seq_mean_token_sum"
    source: ClassVar = "https://arxiv.org/abs/2402.14740"


class FixedLengthCfg(AggregationCfg):
    """An aggregation that divides by a fixed length."""

    max_length: PositiveInt | None = None
    """Length of the longest episode. None: the step limit of the environment, or the token limit of a completion."""

    @property
    def divisor(self) -> int | None:
        """The length."""
        return self.max_length


@register_recipe
class ConstantLengthCfg(FixedLengthCfg):
    """Sum over episodes times ``max_length`` (Dr. GRPO)."""

    name: Literal["constant"] = "constant"
    source: ClassVar = "https://arxiv.org/abs/2503.20783"


@register_recipe
class SeqMeanTokenSumNormCfg(FixedLengthCfg):
    """Sum over ``max_length`` (Dr. GRPO in verl); grows with the batch."""

    name: Literal["seq_mean_token_sum_norm"] = "seq_mean_token_sum_norm"
    source: ClassVar = "https://github.com/volcengine/verl"
    by_episode: ClassVar = False


class ObjectiveCfg(Cfg):
    """The loss of a step, and how steps are aggregated."""

    ratio: Literal["token", "turn", "sequence", "sequence_token", "sequence_product"] = "token"
    """Level of the probability ratio: ``token``, each step; ``turn``, geometric mean over the turn; ``sequence``, over the episode (GSPO); ``sequence_token``, the same with the gradient of each step; ``sequence_product``, the product over the episode."""
    trust_region: SerializeAsAny[TrustRegionCfg] = ClipCfg()
    """How the update is limited, by name or with its parameters: ``{"name": "cispo", "high": 1.2}``."""
    importance_sampling_correction: SerializeAsAny[CorrectionCfg] = NoCorrectionCfg()
    """Correction of the difference between sampler and trainer, by name or with its parameters. ``tis`` and ``mis`` need ``old_log_prob="recomputed"``."""
    aggregation: SerializeAsAny[AggregationCfg] = TokenMeanCfg()
    """How steps become one loss, by name or with its parameters: ``{"name": "constant", "max_length": 500}``."""
    old_log_prob: Literal["sampled", "recomputed"] = "sampled"
    """Denominator of the ratio: as the sampler reported it, or recomputed at the update's start."""

    @model_validator(mode="after")
    def _check(self) -> "ObjectiveCfg":
        region = self.trust_region
        if region.needs_ratio not in (None, self.ratio):
            raise ValueError(
                f"trust_region={region.name!r} needs ratio={region.needs_ratio!r}; got ratio={self.ratio!r}, "
                f"fix: ratio={region.needs_ratio!r}"
            )
        correction = self.importance_sampling_correction
        if correction.reweights and self.old_log_prob == "sampled":
            raise ValueError(
                f"importance_sampling_correction={correction.name!r} compares old_log_prob with the sampler's, and "
                "old_log_prob='sampled' is the sampler's; fix: old_log_prob='recomputed'"
            )
        return self
