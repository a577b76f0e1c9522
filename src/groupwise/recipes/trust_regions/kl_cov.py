"""KL-Cov: nothing is clipped, and the steps of highest covariance are pulled back to the old policy."""

from typing import TYPE_CHECKING, ClassVar, Literal

from groupwise.config.base import Fraction, NonNegative
from groupwise.config.choices import register_recipe
from groupwise.config.objective import TrustRegionCfg

if TYPE_CHECKING:
    from groupwise.recipes.types import Batch, Counts, Tensor, UpdateStart


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
