"""Settings of the objective: what one element's loss is, and how elements are added up. Imports no torch."""

from typing import Annotated, Literal

from annotated_types import Gt, Le
from pydantic import model_validator

from groupwise.config.base import Cfg, Fraction, NonNegative, Positive, PositiveInt


class CispoCfg(Cfg):
    """Bounds of the ratio's weight under ``trust_region="cispo"``, absolute: libraries disagree on them."""

    low: NonNegative | None = None
    """Least weight. None: no lower bound (TRL, AgileRL; verl: 1 - its clip, so 0.8)."""
    high: Positive | None = 5.0
    """Greatest weight. Default: ScaleRL's, which TRL names (verl and AgileRL: 1 + their clip, so 1.2). None: no upper bound."""

    @model_validator(mode="after")
    def _check(self) -> "CispoCfg":
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"got low={self.low} and high={self.high}; expected low < high, fix: 0.8 and 1.2")
        return self


class SapoCfg(Cfg):
    """Temperatures of ``trust_region="sapo"``: how fast an action loses influence as its ratio leaves 1."""

    positive: Positive = 1.0
    """At positive advantage."""
    negative: Positive = 1.05
    """At negative advantage; higher, so that these actions lose it sooner."""


class VespoCfg(Cfg):
    """Shape of ``trust_region="vespo"``: the weight ``w^power * exp(decay * (1 - w))`` of a ratio w."""

    positive_power: NonNegative = 2.0
    """Power k at advantage 0 and above."""
    positive_decay: NonNegative = 3.0
    """Decay lambda at advantage 0 and above."""
    negative_power: NonNegative = 3.0
    """Power k at negative advantage."""
    negative_decay: NonNegative = 2.0
    """Decay lambda at negative advantage."""


class CovarianceCfg(Cfg):
    """Which steps ``clip_cov`` and ``kl_cov`` hold back: those whose ``(A - mean A)(log_prob - mean log_prob)`` is high."""

    fraction: Fraction = 2e-4
    """Share of the rollout's steps that is held back, at least one."""
    low: float = 1.0
    """``clip_cov``: drawn from the steps whose covariance is above this."""
    high: float = 5.0
    """``clip_cov``: and below this."""
    penalty: NonNegative = 1.0
    """``kl_cov``: weight of ``|log_prob - old_log_prob|`` on the steps held back."""

    @model_validator(mode="after")
    def _check(self) -> "CovarianceCfg":
        if self.low >= self.high:
            raise ValueError(f"got low={self.low} and high={self.high}; expected low < high, fix: 1 and 5")
        return self


class DppoCfg(Cfg):
    """When ``trust_region="dppo"`` drops a step: its probability has moved too far from the sampler's, and would further."""

    divergence: Literal["tv", "kl"] = "tv"
    """Of "this action or another": total variation (the difference of probabilities), or KL(sampler || policy)."""
    low: Positive = 0.15
    """Greatest divergence downwards, at negative advantage. Default: TRL's for ``tv`` (0.05 for ``kl``; prime-rl 0.2)."""
    high: Positive = 0.15
    """Greatest divergence upwards, at positive advantage."""
    max_ratio: Positive | None = 20.0
    """The weight of a step, its ratio, counts as at most this (TRL). None: no limit (prime-rl)."""
    pull: NonNegative = 0.0
    """Weight of ``(log_prob - old_log_prob)^2``, added at every step (prime-rl: 1e-3)."""


class CorrectionCfg(Cfg):
    """What is done about a sampler whose probabilities differ from the trainer's at the update's start."""

    weight: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """Factor of the policy loss: ``w = exp(old_log_prob - sample_log_prob)`` of the step or the product over its episode; ``truncate``: at most ``high``; ``mask``: 0 outside ``[low, high]``. Needs ``old_log_prob="recomputed"``."""
    low: NonNegative | None = None
    """``mask``: least weight that counts (IcePop, AgileRL: 0.5). None: no lower bound."""
    high: Positive = 3.0
    """Greatest weight. Default: TRL's (AgileRL: 2 to truncate, 5 to mask)."""
    off_policy_limit: Positive | None = None
    """Steps of negative advantage do not count where the episode's mean of ``sample_log_prob - log_prob``, under the policy as it is now, exceeds this (TRL suggests 0.5, AgileRL 0.03). None: no limit."""

    @model_validator(mode="after")
    def _check(self) -> "CorrectionCfg":
        if self.low is not None and not self.weight.endswith("mask"):
            raise ValueError(f"low={self.low} is for masks; got weight={self.weight!r}, fix: 'token_mask'")
        if self.low is not None and self.low >= self.high:
            raise ValueError(f"got low={self.low} and high={self.high}; expected low < high, fix: 0.5 and 5")
        return self


class EntropyCfg(Cfg):
    """How the weight of the entropy bonus changes: after every optimiser step, by the entropy measured in it."""

    control: Literal["constant", "adaptive"] = "constant"
    """``constant``: ``ent_coef`` throughout; ``adaptive``: ``step`` more after a minibatch with entropy at or below ``target``, ``step`` less after another, and no bonus until the entropy is at or below it again."""
    target: float = 0.2
    """Entropy in nats per step, of the joint action; negative is possible for densities."""
    step: Positive = 0.005
    """Change of the weight in one optimiser step."""
    min_coef: NonNegative = 0.0
    """Least weight."""
    max_coef: NonNegative = 1.0
    """Greatest weight."""

    @model_validator(mode="after")
    def _check(self) -> "EntropyCfg":
        if self.min_coef > self.max_coef:
            raise ValueError(f"got min_coef={self.min_coef} > max_coef={self.max_coef}; fix: swap them")
        return self


class ObjectiveCfg(Cfg):
    """Ratio, trust region, correction, aggregation, KL and entropy: one element's loss, and how elements are added up."""

    ratio: Literal["token", "turn", "sequence", "sequence_token", "sequence_product"] = "token"
    """Level of the probability ratio: per step (token), geometric mean over the turn (needs ``turn_id`` in the rollout) or over the episode (GSPO), the latter with per-step gradient (GSPO-token), or the product over the episode (explodes with length)."""
    trust_region: Literal[
        "clip", "dual_clip", "two_sided", "cispo", "sapo", "gmpo", "vespo", "clip_cov", "kl_cov", "dppo", "reinforce", "none"
    ] = "clip"  # fmt: skip
    """What keeps a step from going too far: ``clip``, PPO's minimum of raw and clipped; ``dual_clip`` and ``two_sided`` also bound it at negative advantage; ``none``: ratio times advantage; ``reinforce``: no ratio either. ``docs/variants.md`` has the others."""
    clip_low: Positive = 0.2
    """The ratio is clipped at 1 - clip_low (``gmpo``: at exp(-clip_low))."""
    clip_high: Positive = 0.2
    """The ratio is clipped at 1 + clip_high (``gmpo``: at exp(clip_high))."""
    dual_clip: Annotated[float, Gt(1)] = 3.0
    """Bound c of ``dual_clip`` (verl's default)."""
    two_sided: Annotated[float, Gt(1)] = 4.0
    """Bound of the ratio under ``two_sided``, above 1 + clip_high (INTELLECT-2's delta)."""
    cispo: CispoCfg = CispoCfg()
    """Numbers of ``cispo``."""
    sapo: SapoCfg = SapoCfg()
    """Numbers of ``sapo``."""
    vespo: VespoCfg = VespoCfg()
    """Numbers of ``vespo``."""
    dppo: DppoCfg = DppoCfg()
    """Numbers of ``dppo``."""
    covariance: CovarianceCfg = CovarianceCfg()
    """Numbers of ``clip_cov`` and ``kl_cov``."""
    top_entropy: Annotated[float, Gt(0), Le(1)] = 1.0
    """Share of the rollout's steps, those of highest entropy at the update's start, that have a policy loss."""
    correction: CorrectionCfg = CorrectionCfg()
    """Sampler against trainer."""
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
    entropy: EntropyCfg = EntropyCfg()
    """Weight of the entropy bonus over time."""

    @model_validator(mode="after")
    def _check(self) -> "ObjectiveCfg":
        if self.trust_region == "two_sided" and self.two_sided <= 1 + self.clip_high:
            enough = max(4.0, 2 + self.clip_high)
            raise ValueError(
                f"two_sided={self.two_sided} must exceed 1 + clip_high = {1 + self.clip_high}; fix: two_sided={enough}"
            )
        if self.trust_region == "gmpo" and self.ratio != "token":
            raise ValueError(f"gmpo averages over the episode itself; got ratio={self.ratio!r}, fix: ratio='token'")
        if self.trust_region == "vespo" and self.ratio != "sequence_product":
            raise ValueError(f"vespo weighs whole episodes; got ratio={self.ratio!r}, fix: ratio='sequence_product'")
        if self.correction.weight != "none" and self.old_log_prob == "sampled":
            raise ValueError(
                f"correction.weight={self.correction.weight!r} compares old_log_prob with the sampler's, which "
                "old_log_prob='sampled' makes the same; fix: old_log_prob='recomputed'"
            )
        if self.kl_estimator == "exact" and self.kl_weight == "ratio":
            raise ValueError("kl_estimator='exact' samples no action to weigh; fix: kl_weight='none', or 'k3'")
        return self
