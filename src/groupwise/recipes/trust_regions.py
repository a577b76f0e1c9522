"""Trust regions other than PPO's clip. Formulas are in ``functional``. Imports torch only when a loss is computed."""

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt
from pydantic import model_validator

from groupwise.config.base import Fraction, NonNegative, Positive
from groupwise.config.choices import register_recipe
from groupwise.config.objective import ClippedCfg, TrustRegionCfg
from groupwise.config.ranges import range_at
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from groupwise.algorithms.loss import Counts, UpdateStart
    from groupwise.data.rollout import Nested
    from groupwise.policies.base import Batch, Policy


@register_recipe
class DualClipCfg(ClippedCfg):
    """The clip, also bounded at negative advantage."""

    name: Literal["dual_clip"] = "dual_clip"
    bound: Annotated[float, Gt(1)] = 3.0
    """The loss is at most this many times the negative advantage. Default: verl's ``clip_ratio_c``."""
    source: ClassVar = "https://arxiv.org/abs/1912.09729"

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``min(clip_loss, -bound * A)`` at negative advantage, else ``clip_loss``."""
        from groupwise.functional.objective import dual_clip_loss

        return dual_clip_loss(ratio, batch["advantage"], *self.clip_range, self.bound)


@register_recipe
class TwoSidedCfg(ClippedCfg):
    """The ratio also bounded at negative advantage (INTELLECT-2)."""

    name: Literal["two_sided"] = "two_sided"
    delta: Annotated[float, Gt(1)] = 4.0
    """Bound of the ratio, above 1 + clip_high."""
    source: ClassVar = "https://arxiv.org/abs/2505.07291"

    @model_validator(mode="after")
    def _check_delta(self) -> "TwoSidedCfg":
        high = max(range_at(self.clip_high), range_at(self.clip_high, 1.0))
        if self.delta <= 1 + high:
            raise ValueError(
                f"delta={self.delta} must exceed 1 + clip_high = {1 + high}; fix: delta={max(4.0, 2 + high)}"
            )
        return self

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-min(min(ratio, delta) * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``."""
        from groupwise.functional.trust_regions import two_sided_loss

        return two_sided_loss(ratio, batch["advantage"], *self.clip_range, self.delta)


@register_recipe
class ClipCovCfg(ClippedCfg):
    """The clip, without a few random steps of high covariance."""

    name: Literal["clip_cov"] = "clip_cov"
    fraction: Fraction = 2e-4
    """Share of the rollout's steps that are left out, at least one."""
    low: float = 1.0
    """They are drawn from the steps whose ``(A - mean A)(log_prob - mean log_prob)`` is above this."""
    high: float = 5.0
    """And below this."""
    source: ClassVar = "https://arxiv.org/abs/2505.22617"
    needs_old_log_prob: ClassVar = True

    @model_validator(mode="after")
    def _check(self) -> "ClipCovCfg":
        if self.low >= self.high:
            raise ValueError(f"got low={self.low} and high={self.high}; expected low < high, fix: 1 and 5")
        return self

    def at_start(self, start: "UpdateStart") -> "dict[str, Tensor]":
        """A factor 0 for the steps that are left out.

        The choice hashes what a step holds. Advantages are not hashed: their last bits depend on the order of rows.
        """
        from groupwise.functional import selection

        together = selection.covariance(start.old_log_prob, start.advantage, start.mask, start.all_sum)
        candidate = (together > self.low) & (together < self.high) & start.mask
        batch = start.batch
        content = batch["sample_log_prob"], batch["step"], *_numbers(batch["action"], like=start.mask)
        noise = selection.element_noise(start.seed, *content)
        masked = selection.random_fraction(noise, self.fraction, candidate, start.mask, start.all_sum)
        return {"policy_factor": (~masked).to(start.old_log_prob)}


def _numbers(action: "Nested", like: "Tensor") -> "list[Tensor]":
    """Each number of the actions ``[N, T, ...]``, shaped like the mask."""
    from torch import Tensor

    leaves = [action] if isinstance(action, Tensor) else action.values(True, True)
    parts = [part for leaf in leaves for part in leaf.reshape(*leaf.shape[:2], -1).unbind(-1)]
    return [part.view(*part.shape, *[1] * (like.dim() - 2)).expand_as(like) for part in parts]


@register_recipe
class GmpoCfg(ClippedCfg):
    """The geometric mean over the episode of ratios clipped step by step, at exp(-clip_low) and exp(clip_high)."""

    name: Literal["gmpo"] = "gmpo"
    source: ClassVar = "https://arxiv.org/abs/2507.20673"
    needs_ratio: ClassVar = "token"
    whole_episodes: ClassVar = True

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-A * exp(mean of the episode's clipped log-ratios)``."""
        from groupwise.functional.trust_regions import gmpo_loss

        episodes = batch["loss_mask"], batch["episode_id"], counts.episodes
        old, advantage = batch["old_log_prob"], batch["advantage"]
        return gmpo_loss(log_prob, old, advantage, *episodes, *self.clip_range)


@register_recipe
class ReinforceCfg(TrustRegionCfg):
    """Log-probability times advantage, without ratio."""

    name: Literal["reinforce"] = "reinforce"
    source: ClassVar = "https://arxiv.org/abs/2504.02546"

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-log_prob * A``; for a single pass over fresh data."""
        from groupwise.functional.trust_regions import reinforce_loss

        return reinforce_loss(log_prob, batch["advantage"])


@register_recipe
class UnclippedCfg(TrustRegionCfg):
    """Ratio times advantage."""

    name: Literal["none"] = "none"
    source: ClassVar = "https://arxiv.org/abs/2402.14740"

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-ratio * A``."""
        from groupwise.functional.objective import unclipped_loss

        return unclipped_loss(ratio, batch["advantage"])


@register_recipe
class KlCovCfg(TrustRegionCfg):
    """No clip, and a pull on the steps of highest covariance."""

    name: Literal["kl_cov"] = "kl_cov"
    fraction: Fraction = 2e-4
    """Share of the rollout's steps that is pulled back: those whose ``(A - mean A)(log_prob - mean log_prob)`` is highest."""
    penalty: NonNegative = 1.0
    """Weight of ``|log_prob - old_log_prob|`` on them."""
    source: ClassVar = "https://arxiv.org/abs/2505.22617"
    needs_old_log_prob: ClassVar = True

    @property
    def learns_alone(self) -> bool:
        """The pull has a gradient of its own."""
        return True

    def at_start(self, start: "UpdateStart") -> "dict[str, Tensor]":
        """Which steps are pulled back."""
        from groupwise.functional import selection

        together = selection.covariance(start.old_log_prob, start.advantage, start.mask, start.all_sum)
        return {"pulled": selection.top_fraction(together, self.fraction, start.mask, start.all_sum)}

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-ratio * A``, plus ``penalty * |log_prob - old_log_prob|`` on the steps that are pulled back."""
        from groupwise.functional.trust_regions import kl_cov_loss

        old, advantage = batch["old_log_prob"], batch["advantage"]
        return kl_cov_loss(log_prob, old, ratio, advantage, batch["pulled"], self.penalty)


@register_recipe
class SapoCfg(TrustRegionCfg):
    """A gradient that fades smoothly on both sides of ratio 1."""

    name: Literal["sapo"] = "sapo"
    positive: Positive = 1.0
    """Temperature at positive advantage: how fast an action loses influence as its ratio leaves 1."""
    negative: Positive = 1.05
    """Temperature at negative advantage; higher, so that these actions lose it sooner."""
    source: ClassVar = "https://arxiv.org/abs/2511.20347"

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-(4 / tau) sigmoid(tau (ratio - 1)) * A``."""
        from groupwise.functional.trust_regions import sapo_loss

        return sapo_loss(ratio, batch["advantage"], self.positive, self.negative)


@register_recipe
class CispoCfg(TrustRegionCfg):
    """A policy gradient whose weight, the ratio, is clipped."""

    name: Literal["cispo"] = "cispo"
    low: NonNegative | None = None
    """Least weight, absolute. None: no lower bound (TRL, AgileRL; verl: 1 - its clip, so 0.8)."""
    high: Positive | None = 5.0
    """Greatest weight, absolute. Default: ScaleRL's, which TRL names (verl and AgileRL: 1.2). None: no upper bound."""
    source: ClassVar = "https://arxiv.org/abs/2506.13585"

    @model_validator(mode="after")
    def _check(self) -> "CispoCfg":
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"got low={self.low} and high={self.high}; expected low < high, fix: 0.8 and 1.2")
        return self

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-sg(clip(ratio, low, high)) * A * log_prob``: no step loses its gradient."""
        from groupwise.functional.trust_regions import cispo_loss

        return cispo_loss(log_prob, ratio, batch["advantage"], self.low, self.high)


@register_recipe
class VespoCfg(TrustRegionCfg):
    """A policy gradient with weight ``w^power * exp(decay * (1 - w))``, w the episode's ratio."""

    name: Literal["vespo"] = "vespo"
    positive_power: NonNegative = 2.0
    """Power k at advantage 0 and above."""
    positive_decay: NonNegative = 3.0
    """Decay lambda at advantage 0 and above."""
    negative_power: NonNegative = 3.0
    """Power k at negative advantage."""
    negative_decay: NonNegative = 2.0
    """Decay lambda at negative advantage."""
    source: ClassVar = "https://arxiv.org/abs/2602.10693"
    needs_ratio: ClassVar = "sequence_product"

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-sg(w^k exp(lambda (1 - w))) * A * log_prob``."""
        from groupwise.functional.trust_regions import vespo_loss

        positive = self.positive_power, self.positive_decay
        negative = self.negative_power, self.negative_decay
        return vespo_loss(log_prob, ratio, batch["advantage"], positive=positive, negative=negative)


@register_recipe
class DppoCfg(TrustRegionCfg):
    """Steps whose probability has moved too far are dropped; discrete actions."""

    name: Literal["dppo"] = "dppo"
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
    source: ClassVar = "https://github.com/PrimeIntellect-ai/prime-rl"

    @property
    def learns_alone(self) -> bool:
        """The pull has a gradient of its own."""
        return self.pull > 0

    def check_policy(self, policy: "Policy") -> None:
        """Refuse densities."""
        from groupwise.data.rollout import TensorSpec

        if isinstance(policy.action_spec, TensorSpec) and policy.action_spec.dtype.is_floating_point:
            raise ConfigError(
                "trust_region='dppo' compares probabilities, and this policy's continuous actions have densities; fix: 'clip'"
            )

    def at_start(self, start: "UpdateStart") -> "dict[str, Tensor]":
        """The sampler's log-probabilities."""
        return {"sample_log_prob": start.batch["sample_log_prob"]}

    def loss(self, ratio: "Tensor", log_prob: "Tensor", batch: "Batch", counts: "Counts") -> "Tensor":
        """``-A * sg(min(ratio, max_ratio)) * log_prob`` of the steps that are kept, and the pull."""
        from groupwise.functional.trust_regions import dppo_keeps, dppo_loss

        sampled, advantage = batch["sample_log_prob"], batch["advantage"]
        keeps = dppo_keeps(log_prob, sampled, advantage, self.divergence, self.low, self.high)
        loss = dppo_loss(log_prob, ratio, advantage, keeps, self.max_ratio)
        if self.pull:
            loss = loss + self.pull * (log_prob - batch["old_log_prob"]).square()
        return loss
