"""DPPO: a step is dropped where its probability has moved too far from the sampler's, and would move further."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.base import NonNegative, Positive
from groupwise.config.choices import register_recipe
from groupwise.config.objective import TrustRegionCfg
from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from groupwise.recipes.types import Batch, Counts, Policy, Tensor, UpdateStart


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
