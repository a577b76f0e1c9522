"""Settings of the algorithms, and their registry. Imports no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field, SerializeAsAny, TypeAdapter, ValidationError, model_validator

from groupwise.config.base import Cfg, Choice, Fraction, NonNegative, Positive, PositiveInt, register_choice
from groupwise.config.credit import CreditCfg as CreditCfg
from groupwise.config.credit import PartsCfg
from groupwise.config.objective import FixedLengthCfg, TrustRegionCfg
from groupwise.config.objective import ObjectiveCfg as ObjectiveCfg
from groupwise.config.ranges import ClipRange, LinearRangeCfg, range_at

_CLIP_RANGE: TypeAdapter[float | LinearRangeCfg] = TypeAdapter(ClipRange)
OnNonFinite: TypeAlias = Literal["stop", "drop", "zero"]
LearningRate: TypeAlias = Annotated[float, Gt(0), Le(1000)]
"""Bounded, so that no step makes a parameter infinite."""


class OptimizerCfg(Choice):
    """Which optimiser, and its settings other than the learning rate."""

    family: ClassVar = "optimizer"
    default: ClassVar = "adam"
    known: ClassVar = {}


@register_choice
class AdamCfg(OptimizerCfg):
    """Adam."""

    name: Literal["adam"] = "adam"
    eps: Positive = 1e-5
    """Added to the denominator. Default: the reference PPO's; torch has 1e-8."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay of the moments."""


@register_choice
class AdamWCfg(AdamCfg):
    """Adam with decoupled weight decay."""

    name: Literal["adamw"] = "adamw"  # type: ignore[assignment]
    weight_decay: NonNegative = 0.0
    """Weight decay."""


@register_choice
class SGDCfg(OptimizerCfg):
    """Stochastic gradient descent."""

    name: Literal["sgd"] = "sgd"
    momentum: Fraction = 0.0
    """Momentum."""


@register_choice
class RMSpropCfg(OptimizerCfg):
    """RMSprop."""

    name: Literal["rmsprop"] = "rmsprop"
    momentum: Fraction = 0.0
    """Momentum."""
    eps: Positive = 1e-5
    """Added to the denominator."""


class ScheduleCfg(Choice):
    """How the learning rate changes over training."""

    family: ClassVar = "schedule"
    default: ClassVar = "none"
    known: ClassVar = {}


@register_choice
class ConstantCfg(ScheduleCfg):
    """A constant learning rate."""

    name: Literal["none"] = "none"


@register_choice
class LinearCfg(ScheduleCfg):
    """The learning rate falls linearly over training."""

    name: Literal["linear"] = "linear"
    final: Fraction = 0.0
    """Share of the learning rate left at the end. 1: constant."""
    warmup: Annotated[float, Ge(0), Lt(1)] | PositiveInt = 0.0
    """The rate first rises linearly, then falls: over a share of training, or from 1 on over a number in the unit of the budget (steps, iterations, epochs). Of n iterations the first has 1/n of the rate."""


@register_choice
class CosineCfg(LinearCfg):
    """The learning rate falls along half a cosine."""

    name: Literal["cosine"] = "cosine"  # type: ignore[assignment]


@register_choice
class StepCfg(ScheduleCfg):
    """The learning rate drops at intervals."""

    name: Literal["step"] = "step"
    decay: Annotated[float, Gt(0), Le(1)] = 0.5
    """Factor over one interval."""
    interval: Annotated[float, Gt(0), Le(1)] = 0.25
    """Share of training between two decays."""


@register_choice
class ExponentialCfg(StepCfg):
    """The learning rate decays continuously, by ``decay`` over one interval."""

    name: Literal["exponential"] = "exponential"  # type: ignore[assignment]


@register_choice
class AdaptiveKLCfg(ScheduleCfg):
    """The learning rate follows the measured KL, by rsl_rl's rule."""

    name: Literal["adaptive_kl"] = "adaptive_kl"
    desired_kl: Positive = 0.01
    """Above twice this the rate is divided by 1.5, below half of it multiplied. Default: rsl_rl's."""
    min_factor: Positive = 0.01
    """Least rate, as a share of ``learning_rate``."""
    max_factor: Positive = 10.0
    """Greatest rate, as a multiple of ``learning_rate``."""


class AdaptiveEntropyCfg(Cfg):
    """A bonus that rises while the entropy is low (Skywork-OR1, https://arxiv.org/abs/2505.22312).

    The weight rises by ``step`` after a minibatch with entropy at or below ``target`` and falls by ``step`` after any
    other. The bonus is off until the entropy is at or below ``target`` again.
    """

    target: float = 0.2
    """Entropy in nats per step, of the joint action; negative is possible for densities."""
    step: Positive = 0.005
    """Change of the weight in one optimiser step."""
    min_coef: NonNegative = 0.0
    """Least weight."""
    max_coef: NonNegative = 1.0
    """Greatest weight."""

    @model_validator(mode="after")
    def _check(self) -> "AdaptiveEntropyCfg":
        if self.min_coef > self.max_coef:
            raise ValueError(f"got min_coef={self.min_coef} > max_coef={self.max_coef}; fix: swap them")
        return self


class SyncRefModelCfg(Cfg):
    """When and how the reference follows the policy."""

    steps: PositiveInt = 1
    """Iterations between updates (TRL's ``ref_model_sync_steps``, which are optimiser steps)."""
    mixup_alpha: Fraction = 1.0
    """Weight of the policy in an updated reference. 1: replaces it (TRL's ``ref_model_mixup_alpha``: 0.6)."""


class CollectionCfg(Cfg):
    """How groups are collected."""

    noise: Literal["independent", "shared"] = "independent"
    """Noise after the start: each member draws its own, or all draw the same."""
    partial_groups: Literal["complete", "truncate"] = "complete"
    """Groups that are still running at the end of an iteration: complete or truncate them. ``truncate`` needs a simulator in torch."""
    horizon: PositiveInt | None = None
    """Steps after which episodes of a group are truncated. None: whole episodes."""
    on_env_error: Literal["raise", "retry", "drop"] = "raise"
    """When an environment raises an error, or its process dies or hangs: raise it, start the member again, or drop its group."""
    dynamic_sampling: NonNegative | None = None
    """Leave groups without variance out of the loss, and collect others in their place, with at most this many times the steps of an iteration (DAPO). 0: only leave them out. None: they stay."""


class AlgorithmCfg(Choice):
    """Settings of every algorithm. Subclass it for your own and give ``name`` a default."""

    family: ClassVar = "algorithm"
    default: ClassVar = "grpo"
    known: ClassVar = {}
    algorithm: ClassVar[type[Any] | None] = None
    """The ``BaseAlgorithm`` that ``register_algorithm`` gave these settings; ``training.build`` knows the built-in ones."""

    learning_rate: LearningRate = 3e-4
    """Learning rate, before its schedule."""
    num_steps: PositiveInt = 256
    """Steps per environment in one iteration. GRPO opens groups until ``num_envs * num_steps`` steps are taken, and completes them."""
    num_epochs: PositiveInt = 10
    """Passes over each rollout."""
    minibatch_size: PositiveInt | None = 256
    """Steps in one optimiser step, over all ranks. The rollout is split into parts of equal size. None: the whole rollout."""
    micro_batch_size: PositiveInt | None = None
    """Most steps, or tokens with padding, in one forward pass. Bounds memory, never changes the gradient. None: the whole minibatch."""
    gamma: Fraction = 0.99
    """Discount. GRPO reads it with ``credit.returns="return_to_go"``, with the baseline ``gigpo``, and in normalised rewards."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus; its first value with ``adaptive_entropy``."""
    max_grad_norm: Positive | None = 0.5
    """Largest global norm of the gradient. None: no clipping."""
    target_kl: Positive | None = None
    """Stops the update when the approximate KL of a minibatch exceeds 1.5 times this (SB3's rule). None: never."""
    clip_coef: ClipRange | None = Field(default=None, exclude=True)
    """Sets ``clip_low`` and ``clip_high`` of the trust region together, to a number or a schedule. Saved settings have these two."""
    objective: ObjectiveCfg = ObjectiveCfg()
    """Ratio, trust region, correction, aggregation."""
    optimizer: SerializeAsAny[OptimizerCfg] = AdamCfg()
    """The optimiser, by name or with its parameters."""
    schedule: SerializeAsAny[ScheduleCfg] = ConstantCfg()
    """The schedule of the learning rate, by name or with its parameters."""
    on_nonfinite: OnNonFinite = "stop"
    """What NaN and infinity in a rollout or a gradient do. ``stop``: an error names the place. ``drop``: the group is left out (PPO: the episode). ``zero``: 0 takes their place. With both, optimiser steps on such gradients are skipped, and 10 bad updates in a row end training."""

    @property
    def reward_parts(self) -> tuple[str, ...]:
        """Entries of ``info`` that a rollout keeps as the parts of the reward."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _apply_clip_coef(cls, data: object) -> object:
        """Set the trust region's range to ``clip_coef``."""
        if not isinstance(data, dict) or data.get("clip_coef") is None:
            return data
        try:
            coef = _CLIP_RANGE.validate_python(data["clip_coef"])
        except ValidationError:
            return data  # the field's own check says what is wrong
        objective = data.get("objective", {})
        values = dict(objective) if isinstance(objective, dict | ObjectiveCfg) else {}
        region: TrustRegionCfg = TrustRegionCfg.model_validate(values.get("trust_region", {}))
        if "clip_low" not in type(region).model_fields:
            raise ValueError(
                f"clip_coef={data['clip_coef']!r} sets a clip range, which trust_region={region.name!r} does not have; fix: leave it out"
            )
        given = {name: value for name, value in region if name in region.model_fields_set}
        both = given | {"clip_low": coef, "clip_high": coef}
        return {**data, "objective": values | {"trust_region": both}}


A = TypeVar("A", bound=AlgorithmCfg)
C = TypeVar("C", bound=Cfg)


def has_range_schedule(cfg: AlgorithmCfg) -> bool:
    """Whether a clip range changes over training."""
    return any(isinstance(value, LinearRangeCfg) for part in (cfg, cfg.objective.trust_region) for _, value in part)


def at_progress(cfg: A, progress: float) -> A:
    """``cfg`` with the clip ranges that its schedules have at a share ``progress`` of training."""
    region = _with_numbers(cfg.objective.trust_region, progress)
    objective = cfg.objective.model_copy(update={"trust_region": region})
    return _with_numbers(cfg.model_copy(update={"objective": objective}), progress)


def _with_numbers(cfg: C, progress: float) -> C:
    scheduled = {name: value for name, value in cfg if isinstance(value, LinearRangeCfg)}
    return cfg.model_copy(update={name: range_at(value, progress) for name, value in scheduled.items()})


def with_max_length(cfg: A, longest: int | None) -> A:
    """``cfg`` with the longest episode filled in, where the aggregation divides by it and it is not set."""
    aggregation = cfg.objective.aggregation
    if not isinstance(aggregation, FixedLengthCfg) or aggregation.max_length is not None:
        return cfg
    aggregation = aggregation.model_copy(update={"max_length": longest})
    return cfg.model_copy(update={"objective": cfg.objective.model_copy(update={"aggregation": aggregation})})


T = TypeVar("T", bound=type[Any])


def register_algorithm(cfg_type: type[AlgorithmCfg]) -> Callable[[T], T]:
    """Class decorator that registers a ``BaseAlgorithm`` under the default of its config's ``name``.

    Raises:
        ConfigError: ``name`` has no default, or belongs to another config class.
    """
    register_choice(cfg_type)

    def register(target: T) -> T:
        cfg_type.algorithm = target
        return target

    return register


@register_choice
class PPOCfg(AlgorithmCfg):
    """Proximal policy optimisation, with a critic."""

    name: Literal["ppo"] = "ppo"
    """Name in the registry."""
    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    vf_coef: NonNegative = 0.5
    """Weight of the value loss."""
    clip_range_vf: ClipRange | None = None
    """Clips the change of the value, in units of the return: a number or a schedule, as ``clip_coef``. None: no clipping."""
    normalize_advantage: Literal["none", "batch", "minibatch"] = "minibatch"
    """Scale advantages to mean 0 and standard deviation 1: never, over the rollout, or over each minibatch (SB3)."""


@register_choice
class GRPOCfg(AlgorithmCfg):
    """Group relative policy optimisation: compares the members of a group, without a critic."""

    name: Literal["grpo"] = "grpo"
    """Name in the registry."""
    group_size: Annotated[int, Ge(2)] = 8
    """Members of a group."""
    credit: CreditCfg = CreditCfg()
    """From rewards to advantages."""
    collection: CollectionCfg = CollectionCfg()
    """How groups are collected."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL to a reference policy. 0: no reference."""
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "k3_unbiased", "abs", "exact"] = "k3"
    """Estimator of the KL to the reference. ``k3+``: value of k3, gradient of k2; ``k3_unbiased``: k3 times the ratio (DeepSeek-V3.2); ``exact``: closed form, for control."""
    sync_ref_model: SyncRefModelCfg | None = None
    """Updates of the reference. None: it is frozen."""
    top_entropy_quantile: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the steps, those with the highest entropy, that have a policy loss (TRL). 1: all."""
    adaptive_entropy: AdaptiveEntropyCfg | None = None
    """Adapts ``ent_coef`` to the entropy. None: ``ent_coef`` is constant."""

    @property
    def reward_parts(self) -> tuple[str, ...]:
        """The names of ``credit.reward="parts"``."""
        return self.credit.reward.names if isinstance(self.credit.reward, PartsCfg) else ()

    @model_validator(mode="after")
    def _check(self) -> "GRPOCfg":
        if self.kl_coef == 0 and self.sync_ref_model is not None:
            raise ValueError("sync_ref_model updates a reference, and kl_coef=0 has none; fix: kl_coef > 0, or None")
        equal_returns_teach = self.credit.reward.name == "parts" or not self.credit.baseline.within_group
        if equal_returns_teach and self.collection.dynamic_sampling is not None:
            raise ValueError(
                f"credit.reward={self.credit.reward.name!r} with credit.baseline={self.credit.baseline.name!r} learns from groups "
                f"of equal whole return, which collection.dynamic_sampling leaves out; fix: dynamic_sampling=None"
            )
        return self


@register_choice
class BCCfg(AlgorithmCfg):
    """Behaviour cloning: maximum likelihood of demonstrated actions."""

    name: Literal["bc"] = "bc"
    """Name in the registry."""
    data: Path | None = None
    """Folder of the demonstrations, as ``groupwise demos`` writes it."""
    learning_rate: LearningRate = 1e-3
    """Learning rate, before its schedule."""
    num_epochs: PositiveInt = 1
    """Passes over each batch of ``num_envs * num_steps`` demonstrated steps. Batches follow one another through the data, again and again until ``total_steps``."""
    minibatch_size: PositiveInt | None = 64
    """Steps in one optimiser step, over all ranks. None: the whole batch."""
    holdout: Fraction = 0.1
    """Share of the episodes that are left out of training, for ``eval/demo_loss``. At least one episode is trained on."""
    label_noise: NonNegative = 0.1
    """Standard deviation of Gaussian noise on the labels of Box actions, in units of the action. It is the least standard deviation that the clone learns, with which it explores afterwards. A policy with a ``label`` of its own may not use it."""

    @model_validator(mode="after")
    def _check(self) -> "BCCfg":
        unread = self.changed("target_kl", "clip_coef") | {
            f"objective.{name}": value
            for name, value in self.objective.changed(
                "ratio", "trust_region", "importance_sampling_correction", "old_log_prob"
            ).items()
        }
        for name, value in unread.items():
            raise ValueError(
                f"{name}={value!r} has no effect on behaviour cloning, which has no ratio; fix: leave it out"
            )
        return self
