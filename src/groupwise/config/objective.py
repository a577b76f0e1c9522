"""Settings of the objective: the loss of a step, and how steps are aggregated. Imports no torch.

Trust regions and corrections other than the defaults are made from the functions of ``algorithms/losses.py``.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, SerializeAsAny, TypeAdapter, WrapValidator, model_validator

from groupwise.config.base import Cfg, Choice, NonNegative, Positive, PositiveInt, register_choice


class LinearRangeCfg(Cfg):
    """A clip range that goes in a straight line from ``start`` to ``end``."""

    name: Literal["linear"] = "linear"
    """The only schedule."""
    start: Positive
    """Range at the beginning of training."""
    end: NonNegative = 0.0
    """Range at its end."""


_NUMBER: TypeAdapter[float] = TypeAdapter(Positive, config=ConfigDict(allow_inf_nan=False))


def _number_or_schedule(value: object, handler: Callable[[object], Any]) -> float | LinearRangeCfg:
    """Check the one that was meant: the errors of a union name both."""
    schedule = isinstance(value, Mapping | LinearRangeCfg)
    return LinearRangeCfg.model_validate(value) if schedule else _NUMBER.validate_python(value)


ClipRange: TypeAlias = Annotated[Positive | LinearRangeCfg, WrapValidator(_number_or_schedule)]
"""A number, or ``{"name": "linear", "start": 0.2, "end": 0.05}``."""


def range_at(value: float | LinearRangeCfg, progress: float = 0.0) -> float:
    """The number at a share ``progress`` of training."""
    return value.start + progress * (value.end - value.start) if isinstance(value, LinearRangeCfg) else value


class TrustRegionCfg(Choice, family="trust region", default="clip"):
    """How the policy update is limited: settings of a function registered with ``register_loss``."""

    known: ClassVar = dict.fromkeys(
        ("cispo", "clip_cov", "dppo", "dual_clip", "gmpo", "kl_cov", "none", "reinforce", "sapo", "two_sided", "vespo"),
        "groupwise.algorithms.losses",
    )
    needs_ratio: ClassVar[str | None] = None
    """The required ``objective.ratio``. None: any."""
    needs_old_log_prob: ClassVar[bool] = False
    """Whether it reads ``old_log_prob`` before the first optimiser step."""


@register_choice
class ClipCfg(TrustRegionCfg):
    """PPO's minimum of raw and clipped; with clip_high above clip_low DAPO's clip-higher."""

    name: Literal["clip"] = "clip"
    clip_low: ClipRange = 0.2
    """The ratio is clipped at 1 - clip_low. A number, or a schedule over training: ``{"name": "linear", "start": 0.2, "end": 0.05}``."""
    clip_high: ClipRange = 0.2
    """The ratio is clipped at 1 + clip_high. A number or a schedule."""
    source: ClassVar = "https://arxiv.org/abs/1707.06347"


class CorrectionCfg(Choice, family="importance sampling correction", default="none"):
    """How the difference between sampler and trainer is corrected: settings of a function registered with ``register_correction``."""

    known: ClassVar = dict.fromkeys(("mis", "off_policy_mask", "tis"), "groupwise.algorithms.losses")
    reweights: ClassVar[bool] = False
    """Whether it weighs steps by ``old_log_prob`` against the sampler's, which needs ``old_log_prob="recomputed"``."""


@register_choice
class NoCorrectionCfg(CorrectionCfg):
    """No correction."""

    name: Literal["none"] = "none"
    source: ClassVar = "https://arxiv.org/abs/1707.06347"


class AggregationCfg(Choice, family="aggregation", default="token_mean"):
    """How the losses of steps become one loss."""

    by_episode: ClassVar[bool] = True
    """Whether minibatches must keep episodes whole."""


@register_choice
class TokenMeanCfg(AggregationCfg):
    """Mean over all steps of the minibatch (DAPO)."""

    name: Literal["token_mean"] = "token_mean"
    source: ClassVar = "https://arxiv.org/abs/2503.14476"
    by_episode: ClassVar = False


@register_choice
class SeqMeanTokenMeanCfg(AggregationCfg):
    """Mean of episode means."""

    name: Literal["seq_mean_token_mean"] = "seq_mean_token_mean"
    source: ClassVar = "https://arxiv.org/abs/2402.03300"


@register_choice
class SeqMeanTokenSumCfg(AggregationCfg):
    """Mean of episode sums."""

    name: Literal["seq_mean_token_sum"] = "seq_mean_token_sum"
    source: ClassVar = "https://arxiv.org/abs/2402.14740"


class FixedLengthCfg(AggregationCfg):
    """An aggregation that divides by a fixed length."""

    max_length: PositiveInt | None = None
    """Length of the longest episode. None: the step limit of the environment, or the token limit of a completion."""


@register_choice
class ConstantLengthCfg(FixedLengthCfg):
    """Sum over episodes times ``max_length`` (Dr. GRPO)."""

    name: Literal["constant"] = "constant"
    source: ClassVar = "https://arxiv.org/abs/2503.20783"


@register_choice
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
        region, correction = self.trust_region, self.importance_sampling_correction
        if region.needs_ratio not in (None, self.ratio):
            raise ValueError(
                f"trust_region={region.name!r} needs another ratio than {self.ratio!r}; fix: ratio={region.needs_ratio!r}"
            )
        if correction.reweights and self.old_log_prob == "sampled":
            raise ValueError(
                f"importance_sampling_correction={correction.name!r} compares old_log_prob with the sampler's; "
                "fix: old_log_prob='recomputed'"
            )
        return self
