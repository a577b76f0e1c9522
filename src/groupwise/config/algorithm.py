"""Settings of the algorithms: objective, credit, optimiser, schedule, collection; and their registry. Imports no torch.

Trust regions, corrections and baselines other than the defaults are made from the functions of ``algorithms/losses.py`` and
``algorithms/advantages.py``.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    ConfigDict,
    Field,
    SerializeAsAny,
    TypeAdapter,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)

from groupwise.config.base import Cfg, Choice, Fraction, NonNegative, Positive, PositiveInt, register_choice
from groupwise.errors import ConfigError

# Objective: the loss of a step, and the average over steps


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
    """How the policy update is limited: settings of a function registered with ``register_loss``, which explains the attributes."""

    known: ClassVar = dict.fromkeys(
        ("cispo", "clip_cov", "dppo", "dual_clip", "gmpo", "kl_cov", "none", "reinforce", "sapo", "two_sided", "vespo"),
        "groupwise.algorithms.losses",
    )
    needs_ratio: ClassVar[str | None] = None
    needs_old_log_prob: ClassVar[bool] = False


class ClipCfg(TrustRegionCfg, name="clip", source="https://arxiv.org/abs/1707.06347"):
    """PPO's minimum of raw and clipped; with clip_high above clip_low DAPO's clip-higher."""

    clip_low: ClipRange = 0.2
    """The ratio is clipped at 1 - clip_low. A number, or a schedule over training: ``{"name": "linear", "start": 0.2, "end": 0.05}``."""
    clip_high: ClipRange = 0.2
    """The ratio is clipped at 1 + clip_high. A number or a schedule."""


class CorrectionCfg(Choice, family="importance sampling correction", default="none"):
    """How the difference between sampler and trainer is corrected: settings of a function registered with ``register_correction``."""

    known: ClassVar = dict.fromkeys(("mis", "off_policy_mask", "tis"), "groupwise.algorithms.losses")
    reweights: ClassVar[bool] = False


class NoCorrectionCfg(CorrectionCfg, name="none", source="https://arxiv.org/abs/1707.06347"):
    """No correction."""


class AggregationCfg(Choice, family="aggregation", default="token_mean"):
    """How the losses of steps become one loss."""

    by_episode: ClassVar[bool] = True
    """Whether minibatches must keep episodes whole."""


class TokenMeanCfg(AggregationCfg, name="token_mean", source="https://arxiv.org/abs/2503.14476"):
    """Mean over all steps of the minibatch (DAPO)."""

    by_episode: ClassVar = False


class SeqMeanTokenMeanCfg(AggregationCfg, name="seq_mean_token_mean", source="https://arxiv.org/abs/2402.03300"):
    """Mean of episode means."""


class SeqMeanTokenSumCfg(AggregationCfg, name="seq_mean_token_sum", source="https://arxiv.org/abs/2402.14740"):
    """Mean of episode sums."""


class FixedLengthCfg(AggregationCfg):
    """An aggregation that divides by a fixed length."""

    max_length: PositiveInt | None = None
    """Length of the longest episode. None: the step limit of the environment, or the token limit of a completion."""


class ConstantLengthCfg(FixedLengthCfg, name="constant", source="https://arxiv.org/abs/2503.20783"):
    """Sum over episodes times ``max_length`` (Dr. GRPO)."""


class SeqMeanTokenSumNormCfg(
    FixedLengthCfg, name="seq_mean_token_sum_norm", source="https://github.com/volcengine/verl"
):
    """Sum over ``max_length`` (Dr. GRPO in verl); grows with the batch."""

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
            fix = f"fix: ratio={region.needs_ratio!r}"
            raise ValueError(f"trust_region={region.name!r} excludes ratio={self.ratio!r}; {fix}")
        if correction.reweights and self.old_log_prob == "sampled":
            raise ValueError(
                f"importance_sampling_correction={correction.name!r} compares old_log_prob with the sampler's; "
                "fix: old_log_prob='recomputed'"
            )
        return self


# Credit: advantages from the rewards of a group


class BaselineCfg(Choice, family="baseline", default="mean"):
    """Baseline, subtracted from the score: settings of a function registered with ``register_baseline``, which explains the attributes."""

    known: ClassVar = dict.fromkeys(
        ("gigpo", "greedy", "knn", "leave_one_out", "length_weighted", "lstd", "none"),
        "groupwise.algorithms.advantages",
    )
    whole: ClassVar[bool] = False
    needs: ClassVar[dict[str, tuple[str, ...]]] = {}
    within_group: ClassVar[bool] = True
    discounts: ClassVar[bool] = False
    states: ClassVar[bool] = False
    greedy_members: ClassVar[Literal[0, 1]] = 0


class MeanCfg(BaselineCfg, name="mean", source="https://arxiv.org/abs/2402.03300"):
    """The mean of those compared."""


class CreditRewardCfg(Choice, family="reward", default="total"):
    """Which reward is compared."""


class TotalCfg(CreditRewardCfg, name="total", source="https://arxiv.org/abs/2402.03300"):
    """The reward as one number."""


class PartsCfg(CreditRewardCfg, name="parts", source="https://arxiv.org/abs/2601.05242"):
    """Each part of the reward on its own, advantages added up (GDPO)."""

    names: tuple[str, ...] = ()
    """Entries of ``info`` that make up the reward, such as ``reward_forward``. Empty for texts, where each reward function is a part."""
    weights: tuple[float, ...] = ()
    """Weight of each part's advantage. Empty: 1 each."""

    @model_validator(mode="after")
    def _check(self) -> "PartsCfg":
        if len({*self.names}) < len(self.names):
            raise ValueError(f"names={self.names!r} has one of them twice; fix: each once")
        if self.names and self.weights and len(self.names) != len(self.weights):
            raise ValueError(f"weights={self.weights!r} are not as many as names={self.names!r}; fix: one for each")
        return self


class GroupKeyCfg(Choice, family="group key", default="group"):
    """Returns that are compared with one another."""


class WholeGroupCfg(GroupKeyCfg, name="group", source="https://arxiv.org/abs/2402.03300"):
    """Members are compared as a whole."""


class GroupStepCfg(GroupKeyCfg, name="group_step", source="https://github.com/DexForce/EmbodiChain"):
    """Members are compared at the same time step; with ``returns="turn"`` or ``"turn_to_go"`` at the same turn."""

    finished_members: Literal["zero", "mask", "trajectory"] = "mask"
    """After a member has ended: ``zero``, a terminated member counts with return 0; ``mask``, it is left out; ``trajectory``, steps take the advantage of the whole episode."""
    singleton: Literal["zero", "trajectory"] = "zero"
    """A member with nothing to compare with: advantage 0, or the advantage of the whole episode."""


class CreditCfg(Cfg):
    """How rewards become advantages: a composition of independent choices."""

    rule: str = "composed"
    """``composed``: the choices below; or the name of a registered credit rule."""
    reward: SerializeAsAny[CreditRewardCfg] = TotalCfg()
    """The whole reward, or each of its parts on its own, with the advantages added (GDPO)."""
    group_key: SerializeAsAny[GroupKeyCfg] = WholeGroupCfg()
    """Returns that are compared: of the whole group, or of its members at the same step, by name or with parameters: ``{"name": "group_step", "singleton": "trajectory"}``."""
    returns: Literal["outcome", "process", "return_to_go", "turn", "turn_to_go"] = "outcome"
    """Score: ``outcome``, the sum of the episode's rewards; ``process``, normalised step rewards summed from this step; ``return_to_go``, discounted rewards from this step; ``turn``, the sum of the turn's rewards; ``turn_to_go``, rewards of this and later turns, with ``gamma`` for each turn."""
    baseline: SerializeAsAny[BaselineCfg] = MeanCfg()
    """Subtracted from the score, by name or with its parameters: ``{"name": "knn", "k": 16}``."""
    scale: Literal["std", "population_std", "batch_std", "mean", "nonzero_share", "none"] = "std"
    """Divisor: standard deviation of what is compared, unbiased or of the population; unbiased standard deviation of the batch; mean of what is compared (MaxRL); share of scores that are not 0 (GPG); nothing."""
    eps: NonNegative = 1e-4
    """Added to the standard deviation, in units of the score. 1e-8 would turn rounding noise into full advantages."""
    normalize: Literal["none", "batch", "informative", "episodes"] = "none"
    """Scale advantages to mean 0 and standard deviation 1: never; over all steps of the batch; over the steps of groups with variance; over episodes, whatever their length (GDPO)."""
    kl_placement: Literal["loss", "reward", "advantage"] = "loss"
    """Where ``kl_coef`` times the KL goes: into the loss, off each reward before credit, or into the advantage."""

    @property
    def discounts(self) -> bool:
        """Whether ``gamma`` has an effect; True for a registered rule, which may read it."""
        return self.rule != "composed" or self.returns.endswith("_to_go") or self.baseline.discounts

    @property
    def composed_baseline(self) -> BaselineCfg:
        """The baseline that is read; a registered rule reads none, and compares whole groups as ``mean`` does."""
        return self.baseline if self.rule == "composed" else MeanCfg()

    @property
    def remembers(self) -> bool:
        """Whether sums of earlier rewards are kept, whose unit must stay the same."""
        return self.rule == "composed" and self.baseline.name == "lstd" and self.baseline.decay > 0  # type: ignore[attr-defined]

    @model_validator(mode="after")
    def _check_together(self) -> "CreditCfg":
        by_step = isinstance(self.group_key, GroupStepCfg)
        needed = self.composed_baseline.needs
        own = {field: getattr(vars(self)[field], "name", vars(self)[field]) for field in needed}
        if wrong := {field: found for field, found in own.items() if found not in needed[field]}:
            needs = ", ".join(f"{field}={' or '.join(map(repr, needed[field]))}" for field in wrong)
            got = ", ".join(f"{field}={found!r}" for field, found in wrong.items())
            fix = ", ".join(f"{field}={needed[field][0]!r}" for field in wrong)
            raise ValueError(
                f"baseline={self.baseline.name!r} needs {needs}; got {got}, fix: {fix}, or baseline='mean'"
            )
        if by_step and self.returns not in ("return_to_go", "turn", "turn_to_go"):
            raise ValueError(f"group_key='group_step' excludes returns={self.returns!r}; fix: returns='return_to_go'")
        if self.returns in ("turn", "turn_to_go") and not by_step:
            raise ValueError(f"returns={self.returns!r} compares the same turns; fix: group_key='group_step'")
        if self.normalize == "episodes" and (self.returns != "outcome" or self.baseline.name == "gigpo"):
            raise ValueError(
                "normalize='episodes' needs one advantage for each episode; got "
                f"returns={self.returns!r}, baseline={self.baseline.name!r}, fix: returns='outcome', or normalize='batch'"
            )
        if self.kl_placement == "reward" and self.reward.name == "parts":
            raise ValueError("kl_placement='reward' needs one reward; got reward='parts', fix: kl_placement='loss'")
        return self


# Optimisers and schedules

OnNonFinite: TypeAlias = Literal["stop", "drop", "zero"]
LearningRate: TypeAlias = Annotated[float, Gt(0), Le(1000)]
"""Bounded, so that no step makes a parameter infinite."""


class OptimizerCfg(Choice, family="optimizer", default="adam"):
    """Which optimiser, and its settings other than the learning rate."""


class AdamCfg(OptimizerCfg, name="adam"):
    """Adam."""

    eps: Positive = 1e-5
    """Added to the denominator. Default: the reference PPO's; torch has 1e-8."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Decay of the moments."""


class AdamWCfg(AdamCfg, name="adamw"):
    """Adam with decoupled weight decay."""

    weight_decay: NonNegative = 0.0
    """Weight decay."""


class SGDCfg(OptimizerCfg, name="sgd"):
    """Stochastic gradient descent."""

    momentum: Fraction = 0.0
    """Momentum."""


class RMSpropCfg(OptimizerCfg, name="rmsprop"):
    """RMSprop."""

    momentum: Fraction = 0.0
    """Momentum."""
    eps: Positive = 1e-5
    """Added to the denominator."""


class ScheduleCfg(Choice, family="schedule", default="none"):
    """How the learning rate changes over training."""


class ConstantCfg(ScheduleCfg, name="none"):
    """A constant learning rate."""


class LinearCfg(ScheduleCfg, name="linear"):
    """The learning rate falls linearly over training."""

    final: Fraction = 0.0
    """Share of the learning rate left at the end. 1: constant."""
    warmup: Annotated[float, Ge(0), Lt(1)] | PositiveInt = 0.0
    """The rate first rises linearly, then falls: over a share of training, or from 1 on over a number in the unit of the budget (steps, iterations, epochs). The first of n iterations has 1/n of the rate."""


class CosineCfg(LinearCfg, name="cosine"):
    """The learning rate falls along half a cosine."""


class StepCfg(ScheduleCfg, name="step"):
    """The learning rate drops at intervals."""

    decay: Annotated[float, Gt(0), Le(1)] = 0.5
    """Factor over one interval."""
    interval: Annotated[float, Gt(0), Le(1)] = 0.25
    """Share of training between two decays."""


class ExponentialCfg(StepCfg, name="exponential"):
    """The learning rate decays continuously, by ``decay`` over one interval."""


class AdaptiveKLCfg(ScheduleCfg, name="adaptive_kl"):
    """The learning rate follows the measured KL, by rsl_rl's rule."""

    desired_kl: Positive = 0.01
    """Above twice this the rate is divided by 1.5, below half of it multiplied. Default: rsl_rl's."""
    min_factor: Positive = 0.01
    """Least rate, as a share of ``learning_rate``."""
    max_factor: Positive = 10.0
    """Greatest rate, as a multiple of ``learning_rate``."""


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
    """When an environment raises an error, or its process dies or hangs: raise it, start the member again, or drop its group (of texts: the member)."""
    dynamic_sampling: NonNegative | None = None
    """Leave groups without variance out of the loss, and collect others in their place, with at most this many times the steps of an iteration (DAPO). 0: only leave them out. None: they stay."""


class Groups(NamedTuple):
    """Groups in which an algorithm collects episodes."""

    size: int = 1
    """Episodes at the same start. 1: there are no groups."""
    greedy_members: Literal[0, 1] = 0
    """Further episodes of each group that act greedily and are not trained on."""
    collection: CollectionCfg = CollectionCfg()


class AlgorithmCfg(Choice, family="algorithm", default="grpo"):
    """Settings of every algorithm. Subclass it for your own, with a name."""

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
    """Discount of a step or token, of a turn with ``credit.returns="turn_to_go"`` and with the baseline ``gigpo`` on texts. GRPO reads it with returns to go, that baseline, and in normalised rewards."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    max_grad_norm: Positive | None = 0.5
    """Largest global norm of the gradient. None: no clipping."""
    target_kl: Positive | None = None
    """Stops the update when the approximate KL of a minibatch exceeds 1.5 times this (SB3's rule). None: never."""
    clip_coef: ClipRange | None = Field(default=None, exclude=True)
    """Sets ``clip_low`` and ``clip_high`` of the trust region, unless they are given beside it, to a number or a schedule. Saved settings have these two."""
    objective: ObjectiveCfg = ObjectiveCfg()
    """Ratio, trust region, correction, aggregation."""
    optimizer: SerializeAsAny[OptimizerCfg] = AdamCfg()
    """The optimiser, by name or with its parameters."""
    schedule: SerializeAsAny[ScheduleCfg] = ConstantCfg()
    """The schedule of the learning rate, by name or with its parameters."""
    on_nonfinite: OnNonFinite = "stop"
    """Answer to NaN and infinity in a rollout or a gradient. ``stop``: an error names the place. ``drop``: the group is left out (PPO: the episode). ``zero``: 0 takes their place. With both, optimiser steps on such gradients are skipped, and 10 bad updates in a row end training."""

    @property
    def reward_parts(self) -> tuple[str, ...]:
        """Entries of ``info`` that a rollout keeps as the parts of the reward."""
        return ()

    @property
    def groups(self) -> Groups:
        """How episodes are collected."""
        return Groups()

    @property
    def has_reference(self) -> bool:
        """Whether training keeps a reference policy."""
        return False

    @field_validator("objective", mode="before")
    @classmethod
    def _apply_clip_coef(cls, objective: Any, info: ValidationInfo) -> Any:
        """Set the sides of the trust region's range that are not given to ``clip_coef``."""
        coef = info.data.get("clip_coef")
        if coef is None or not isinstance(objective, dict | ObjectiveCfg):
            return objective
        set_by_user = objective if isinstance(objective, dict) else objective.model_fields_set
        values = {name: value for name, value in dict(objective).items() if name in set_by_user}
        region: TrustRegionCfg = TrustRegionCfg.model_validate(values.get("trust_region", {}))
        if missing := {"clip_low", "clip_high"} - type(region).model_fields.keys():
            name = " and ".join(sorted(missing))
            raise ValueError(
                f"clip_coef={coef!r} sets clip_low and clip_high; trust_region={region.name!r} has no {name}; fix: its own settings"
            )
        given = {name: value for name, value in region if name in region.model_fields_set}
        return values | {"trust_region": {"clip_low": coef, "clip_high": coef} | given}


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


def with_rewards(cfg: AlgorithmCfg, weights: tuple[float, ...]) -> AlgorithmCfg:
    """``cfg`` for reward functions with these weights: no discount where none is read, and weights of rewards compared one by one.

    Raises:
        ConfigError: rewards are compared one by one, and there is only one.
    """
    if not isinstance(cfg, GRPOCfg):
        return cfg
    if not cfg.credit.discounts:
        cfg = cfg.model_copy(update={"gamma": 1.0})
    if isinstance(cfg.credit.reward, PartsCfg):
        if len(weights) < 2:
            raise ConfigError("credit.reward='parts' compares several rewards; got one, fix: credit.reward='total'")
        if own := cfg.credit.reward.weights:
            if len(own) != len(weights):
                raise ConfigError(f"credit.reward.weights={own!r} are for {len(weights)} rewards; fix: one for each")
        else:
            credit = cfg.credit.model_copy(update={"reward": PartsCfg(weights=weights)})
            cfg = cfg.model_copy(update={"credit": credit})
    return cfg


T = TypeVar("T", bound=type[Any])


def register_algorithm(cfg_type: type[AlgorithmCfg]) -> Callable[[T], T]:
    """Class decorator that registers a ``BaseAlgorithm`` under the default of its config's ``name``.

    Raises:
        ConfigError: ``name`` has no default, or belongs to another config class; or these are no settings.
    """
    if not (isinstance(cfg_type, type) and issubclass(cfg_type, AlgorithmCfg)):
        raise ConfigError(
            f"@register_algorithm was given {cfg_type!r:.80}, expected a subclass of AlgorithmCfg; fix: @register_algorithm(MyCfg)"
        )
    register_choice(cfg_type)

    def register(target: T) -> T:
        cfg_type.algorithm = target
        return target

    return register


class PPOCfg(AlgorithmCfg, name="ppo"):
    """Proximal policy optimisation, with a critic."""

    gae_lambda: Fraction = 0.95
    """Lambda of generalised advantage estimation."""
    vf_coef: NonNegative = 0.5
    """Weight of the value loss."""
    clip_range_vf: ClipRange | None = None
    """Clips the change of the value, in units of the return: a number or a schedule, as ``clip_coef``. None: no clipping."""
    normalize_advantage: Literal["none", "batch", "minibatch"] = "minibatch"
    """Scale advantages to mean 0 and standard deviation 1: never, over the rollout, or over each minibatch (SB3)."""


class GRPOCfg(AlgorithmCfg, name="grpo"):
    """Group relative policy optimisation: compares the members of a group, without a critic."""

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

    @property
    def reward_parts(self) -> tuple[str, ...]:
        """The names of ``credit.reward="parts"``."""
        return self.credit.reward.names if isinstance(self.credit.reward, PartsCfg) else ()

    @property
    def groups(self) -> Groups:
        """How groups are collected."""
        return Groups(self.group_size, self.credit.baseline.greedy_members, self.collection)

    @property
    def has_reference(self) -> bool:
        """Whether the policy is kept near a reference."""
        return self.kl_coef > 0

    @model_validator(mode="after")
    def _check(self) -> "GRPOCfg":
        if self.kl_coef == 0 and self.sync_ref_model is not None:
            raise ValueError("sync_ref_model updates a reference, and kl_coef=0 has none; fix: kl_coef > 0, or None")
        equal_returns_teach = self.credit.reward.name == "parts" or not self.credit.composed_baseline.within_group
        if equal_returns_teach and self.collection.dynamic_sampling is not None:
            raise ValueError(
                f"credit.baseline={self.credit.baseline.name!r} with reward={self.credit.reward.name!r} learns from groups of "
                "equal whole return, which collection.dynamic_sampling leaves out; fix: dynamic_sampling=None"
            )
        return self


class BCCfg(AlgorithmCfg, name="bc"):
    """Behaviour cloning: maximum likelihood of demonstrated actions."""

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
    """Standard deviation of Gaussian noise on the labels of Box actions, in units of the action. It is the least standard deviation that the clone learns, with which it explores afterwards. Policies of tokens, such as ``vla``, and those with a ``label`` of their own may not use it."""

    @model_validator(mode="after")
    def _check(self) -> "BCCfg":
        names = ("ratio", "trust_region", "importance_sampling_correction", "old_log_prob")
        objective = {f"objective.{name}": value for name, value in self.objective.changed(*names).items()}
        unread = self.changed("target_kl", "clip_coef") | objective
        unread |= {"schedule": "adaptive_kl"} if isinstance(self.schedule, AdaptiveKLCfg) else {}
        for name, value in unread.items():
            raise ValueError(f"{name}={value!r} has no effect on behaviour cloning; fix: leave it out")
        return self
